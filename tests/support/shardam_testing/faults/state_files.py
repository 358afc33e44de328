"""A shard's folder as an oracle: its base, if there is one, and every change since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shardam_proto.v1 import journal_pb2
from shardam_server.shard.journal.file_names import read_current
from shardam_server.shard.journal.frames import BASE_MAGIC, FrameReader
from shardam_server.shard.journal.reader import read_journal
from shardam_testing.faults.oracle import Oracle


def read_oracle(folder: Path) -> Oracle:
    """Replays what a shard's folder holds.

    Raises:
        AssertionError: a change does not follow from those before it.
        JournalDamaged: a file cannot be read; also while the shard writes to it.
    """
    oracle = Oracle()
    for _ in _replay(folder, oracle):
        pass
    return oracle


def oracles_at(folder: Path, change_numbers: Iterable[int]) -> Iterator[Oracle]:
    """Replays what a shard's folder holds and yields the one oracle as it is after each of some changes, in their order.

    Args:
        folder: the shard's folder.
        change_numbers: the changes; those before the folder's base are passed over.

    Raises:
        AssertionError: as read_oracle; or the journal ends before the last of them.
        JournalDamaged: as read_oracle.
    """
    left, oracle = sorted(set(change_numbers)), Oracle()
    for _ in _replay(folder, oracle):
        while left and left[0] < oracle.change_number:
            left.pop(0)
        if left and left[0] == oracle.change_number:
            yield oracle
            left.pop(0)
        if not left:
            return
    assert not left, f"{folder} ends with change {oracle.change_number}, and a checkpoint holds change {left[0]}"


def _replay(folder: Path, oracle: Oracle) -> Iterator[None]:
    """Brings an oracle to a folder's state; a stop after its base, and after each change."""
    current = read_current(folder)
    assert current is not None, f"{folder} holds no state"
    if current.base is not None:
        _read_base(oracle, folder / current.base)
    yield
    for record, arrays in read_journal(folder):
        oracle.apply(record, arrays)
        yield


def _read_base(oracle: Oracle, path: Path) -> None:
    with FrameReader(path, BASE_MAGIC) as frames:
        frames.read_preamble()
        first = frames.next(0)
        assert first is not None, f"{path} is empty"
        oracle.base_change_number = oracle.change_number = journal_pb2.FileHeader.FromString(first.message).change_number
        while (frame := frames.next(None)) is not None:
            oracle.load(journal_pb2.BaseRecord.FromString(frame.message), frame.arrays)
