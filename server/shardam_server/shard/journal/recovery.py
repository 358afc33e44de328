"""How a shard's state comes back from its folder: the base, then every change since. Writes nothing."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from shardam_proto.errors import JournalDamaged
from shardam_server.shard.journal.base_file import BaseReader
from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.frames import FileDamaged
from shardam_server.shard.journal.reader import JournalReader, Tail
from shardam_server.shard.journal.replay import Replay
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords

COPIES = "A copy of the folder helps only if nothing has changed since it was made: with an older one the shard is LOST"
"""What cannot be read is not made good by going back behind what workers have been told."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What came back.

    Attributes:
        change_number: the last change that is there.
        num_changes: changes replayed after the base.
        journal_bytes: bytes of the journal that were read.
        torn_bytes: bytes of an incomplete record at its end, which a crash left and nobody was told of.
        seconds: how long it took.
        given_up: what --truncate-journal gives up, as a sentence; empty: nothing.
        tail: where the journal goes on.
    """

    change_number: int
    num_changes: int
    journal_bytes: int
    torn_bytes: int
    seconds: float
    given_up: str
    tail: Tail


def recover(folder: Path, current: Current, state: ShardState, make_records: MakeRecords, *, truncate: bool) -> Recovery:
    """Brings a state back.

    Args:
        folder: the shard's folder.
        current: what it holds.
        state: an empty state; its limits on rows do not hold for what it had before.
        make_records: makes an empty record store for a table.
        truncate: accept what cannot be read of the journal, or changes that were made without it, as lost.

    Raises:
        JournalDamaged: the state cannot come back as it was acknowledged; the message says what would be lost.
        VersionMismatch: another version of shardam wrote it.
        OutOfMemory: this machine has less room than the one that wrote it.
    """
    start = time.monotonic()
    max_rows, state.max_rows = state.max_rows, 0
    try:
        if current.base is not None:
            _read_base(folder, current, state, make_records)
        base_change = state.change_number
        reader = JournalReader(folder, current, base_change)
        given_up = _replay(reader, Replay(state, make_records), state, truncate=truncate)
    finally:
        state.max_rows = max_rows
    if not current.complete:
        lost = (
            f"{folder} holds the state up to change {state.change_number} only: the shard went on without its journal after "
            "that (its disk was full, or --journal off) and ended before it could write a new base"
        )
        if not truncate:
            raise JournalDamaged(
                f"{lost}. --truncate-journal starts it as of change {state.change_number}; what was acknowledged after that is "
                "lost",
                metadata={"folder": str(folder), "change_number": str(state.change_number)},
            )
        given_up = given_up or lost
    return Recovery(
        change_number=state.change_number,
        num_changes=state.change_number - base_change,
        journal_bytes=reader.read_bytes,
        torn_bytes=reader.torn_bytes,
        seconds=time.monotonic() - start,
        given_up=given_up,
        tail=reader.tail,
    )


def _read_base(folder: Path, current: Current, state: ShardState, make_records: MakeRecords) -> None:
    path = folder / str(current.base)
    try:
        BaseReader(state, make_records).read(path, current)
    except FileDamaged as error:
        raise JournalDamaged(
            f"{error.message}. All rows of the shard begin with this file, so nothing can be kept: move {folder} away, start "
            f"the shard, which is then LOST, and give its rows up with `shardam forget-shard --index {current.shard}`. "
            f"{COPIES}",
            metadata=error.metadata,
        ) from error


def _replay(reader: JournalReader, replay: Replay, state: ShardState, *, truncate: bool) -> str:
    """Applies what can be read; returns what is given up.

    Raises:
        JournalDamaged: something cannot be read, and may not be given up.
    """
    try:
        for change in reader:
            try:
                replay.apply(change.record, change.arrays)
            except JournalDamaged as error:
                raise FileDamaged(change.path, change.offset, error.message) from error
    except FileDamaged as error:
        lost = reader.lost_bytes(error)
        num_bytes, names = sum(lost.values()), ", ".join(path.name for path in lost)
        after = f"the {num_bytes} bytes after them ({names})" if lost else "all changes after them"
        what = f"{error.message}. Changes up to {state.change_number} can be read; {after} would be lost"
        if not truncate:
            raise JournalDamaged(
                f"{what}. --truncate-journal starts the shard and cuts the journal there. {COPIES}",
                metadata={**error.metadata, "change_number": str(state.change_number), "lost_bytes": str(num_bytes)},
            ) from error
        return what
    return ""
