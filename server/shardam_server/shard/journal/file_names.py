"""Which files a shard's folder has, by name, and what stands first in each."""

from __future__ import annotations

import re
from pathlib import Path

from shardam_proto.v1 import journal_pb2
from shardam_server.shard.journal.current import Current

CURRENT = "CURRENT"

INCOMPLETE = "CURRENT.incomplete"
"""CURRENT's name while the state in memory is ahead of the files for good; a rename needs no space."""

LOCK = "LOCK"

_JOURNAL_NAME = re.compile(r"journal-(\d{6,})")
_REPLACEABLE = re.compile(r"(?:journal|base)-\d{6,}(?:\.tmp)?|CURRENT\.tmp")


def shard_folder(data_dir: Path, cluster_name: str, index: int) -> Path:
    """Returns where a shard's files lie."""
    return data_dir / cluster_name / f"shard-{index}"


def journal_name(number: int) -> str:
    """Returns the name of a journal file."""
    return f"journal-{number:06d}"


def base_name(number: int) -> str:
    """Returns the name of the base that journal file `number` goes on from."""
    return f"base-{number:06d}"


def number_of(path: Path) -> int:
    """Returns the number in the name of a journal or base file."""
    return int(path.name.partition("-")[2])


def list_journal_files(folder: Path) -> dict[int, Path]:
    """Returns number -> journal file, in order."""
    found = {}
    for path in folder.iterdir():
        match = _JOURNAL_NAME.fullmatch(path.name)
        if match is not None:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def list_unneeded(folder: Path, current: Current) -> list[Path]:
    """Returns files that a state does not need: older ones, and what a crash left unfinished."""
    needed = {path.name for number, path in list_journal_files(folder).items() if number >= current.first_file}
    needed.add(current.base or "")
    unneeded = [path for path in sorted(folder.iterdir()) if _REPLACEABLE.fullmatch(path.name) and path.name not in needed]
    incomplete = folder / INCOMPLETE
    return [*unneeded, incomplete] if current.complete and incomplete.exists() else unneeded


def read_current(folder: Path) -> Current | None:
    """Returns what a folder holds, or None: nothing.

    Raises:
        FileDamaged: CURRENT is not as it was written.
        VersionMismatch: another version of shardam wrote it.
    """
    # A base that makes the state complete again writes CURRENT before CURRENT.incomplete is removed.
    return Current.read(folder / CURRENT, complete=True) or Current.read(folder / INCOMPLETE, complete=False)


def file_header(current: Current, file_number: int, change_number: int) -> journal_pb2.FileHeader:
    """Returns what stands first in a file of a state."""
    return journal_pb2.FileHeader(
        cluster_id=current.cluster.cluster_id,
        shard=current.shard,
        lineage=current.lineage,
        timeline=current.timeline,
        file_number=file_number,
        change_number=change_number,
    )
