"""Reads a shard's journal files in order, as records, without any state of a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from shardam_proto.v1 import journal_pb2
from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.file_names import (
    CURRENT,
    file_header,
    journal_name,
    list_journal_files,
    number_of,
    read_current,
)
from shardam_server.shard.journal.frames import JOURNAL_MAGIC, FileDamaged, FrameReader, IncompleteFrame


@dataclasses.dataclass(frozen=True)
class Tail:
    """Where a journal goes on.

    Attributes:
        file_number: the last file; 0: there is none, its first one is still to be made.
        size_bytes: end of its last whole record; what lies beyond it is cut off.
        sequence: sequence number of the next frame.
    """

    file_number: int = 0
    size_bytes: int = 0
    sequence: int = 0


@dataclasses.dataclass(frozen=True)
class StoredChange:
    """A record, and where it ended.

    Attributes:
        record: the change.
        arrays: the bytes of its arrays.
        path: its file.
        offset: where it begins.
    """

    record: journal_pb2.JournalRecord
    arrays: memoryview
    path: Path
    offset: int


class JournalReader:
    """Yields the changes of a journal in order, one in memory at a time; iterate once.

    Args:
        folder: the shard's folder.
        current: what it holds.
        change_number: change number before the journal's first record.

    Attributes:
        tail: end of the last change that was yielded before the present one, or of all once the iteration has ended.
        read_bytes: bytes of the files up to there.
        torn_bytes: bytes of an incomplete record at the end of the last file, which a crash leaves.

    Raises:
        FileDamaged: while iterating: a file is missing or not as it was written.
        VersionMismatch: while iterating: another version of shardam wrote a file.
    """

    def __init__(self, folder: Path, current: Current, change_number: int) -> None:
        self._folder = folder
        self._current = current
        self._change_number = change_number
        self._files = {number: path for number, path in list_journal_files(folder).items() if number >= current.first_file} or {
            current.first_file: folder / journal_name(current.first_file)
        }
        self.tail = Tail()
        self.read_bytes = 0
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[StoredChange]:
        """Yields the changes."""
        last = max(self._files)
        for number in range(self._current.first_file, last + 1):
            path = self._folder / journal_name(number)
            if number not in self._files:
                raise FileDamaged(path, 0, f"the file is missing, and {self._files[last].name} follows it")
            with FrameReader(path, JOURNAL_MAGIC) as frames:
                yield from self._read_file(frames, number, is_last=number == last)

    def _read_file(self, frames: FrameReader, number: int, *, is_last: bool) -> Iterator[StoredChange]:
        may_be_void = is_last and number > self._current.first_file  # the first one was on the disk before CURRENT named it
        try:
            self._read_header(frames, number)
        except IncompleteFrame:
            if not may_be_void:
                raise
            self.torn_bytes = frames.size_bytes
            return
        except FileDamaged:
            if may_be_void and _begins_other_lineage(frames, self._current):
                return
            raise
        self._move(frames, number, 0)
        while True:
            try:
                frame = frames.next(self.tail.sequence)
            except IncompleteFrame as error:
                if not is_last:
                    raise FileDamaged(error.path, error.offset, f"{error.problem}, and more files follow") from error
                self.torn_bytes = frames.size_bytes - frames.offset
                return
            if frame is None:
                return
            try:
                record = journal_pb2.JournalRecord.FromString(frame.message)
            except DecodeError as error:
                raise FileDamaged(frames.path, frame.offset, f"a record's message cannot be decoded ({error})") from error
            yield StoredChange(record, frame.arrays, frames.path, frame.offset)
            self._change_number = record.change_number
            self._move(frames, number, frame.offset)

    def _move(self, frames: FrameReader, number: int, start: int) -> None:
        self.tail = Tail(number, frames.offset, self.tail.sequence + 1)
        self.read_bytes += frames.offset - start

    def _read_header(self, frames: FrameReader, number: int) -> None:
        is_first = self.tail.file_number == 0
        frames.read_preamble()
        frame = frames.next(None if is_first else self.tail.sequence)
        if frame is None:
            raise IncompleteFrame(frames.path, frames.offset, "the file ends before its first record")
        check_header(frames.path, frame.message, file_header(self._current, number, self._change_number))
        if is_first:
            self.tail = dataclasses.replace(self.tail, sequence=frame.sequence)

    def lost_bytes(self, damage: FileDamaged) -> Mapping[Path, int]:
        """Returns what cannot be read because of a damage: file -> bytes from there on."""
        damaged = number_of(damage.path)
        return {
            path: path.stat().st_size - (damage.offset if number == damaged else 0)
            for number, path in self._files.items()
            if number >= damaged and path.exists()
        }


def _begins_other_lineage(frames: FrameReader, current: Current) -> bool:
    """Returns whether a file is what a new lineage left that a crash kept from being named in CURRENT."""
    with FrameReader(frames.path, JOURNAL_MAGIC) as again:
        again.read_preamble()
        try:
            first = again.next(None)
            return first is not None and read_header(again.path, first.message).lineage != current.lineage and again.at_end
        except FileDamaged:
            return False


def read_header(path: Path, message: bytes) -> journal_pb2.FileHeader:
    """Decodes what stands first in a file.

    Raises:
        FileDamaged: it cannot be decoded.
    """
    try:
        return journal_pb2.FileHeader.FromString(message)
    except DecodeError as error:
        raise FileDamaged(path, 0, f"its header cannot be decoded ({error})") from error


def check_header(path: Path, message: bytes, expected: journal_pb2.FileHeader) -> None:
    """Checks that a file is what its folder says.

    Raises:
        FileDamaged: it belongs to another state, or files between it and the one before it are missing.
    """
    header = read_header(path, message)
    if header == expected:
        return
    if header.change_number != expected.change_number:
        raise FileDamaged(
            path,
            0,
            f"it begins after change {header.change_number}, but the last change before it is {expected.change_number}",
        )
    found, wanted = str(header).split("\n"), str(expected).split("\n")
    other = ", ".join(line for line in found if line not in wanted)
    raise FileDamaged(path, 0, f"it belongs to another state than CURRENT says ({other or 'a field is missing'})")


def read_journal(folder: Path) -> Iterator[tuple[journal_pb2.JournalRecord, memoryview]]:
    """Yields the changes since the base of a shard's folder, each with the bytes of its arrays, in order.

    An incomplete record at the end, which a crash leaves, is passed over. No process may write to the folder meanwhile.

    Raises:
        FileDamaged: a file is missing or not as it was written.
        VersionMismatch: another version of shardam wrote a file.
    """
    current = read_current(folder)
    if current is None:
        raise FileDamaged(folder / CURRENT, 0, "the file is missing")
    change_number = first_change_number(folder, current)
    for change in JournalReader(folder, current, change_number):
        yield change.record, change.arrays


def first_change_number(folder: Path, current: Current) -> int:
    """Returns the change number before a journal's first record, as its first file says."""
    with FrameReader(folder / journal_name(current.first_file), JOURNAL_MAGIC) as frames:
        frames.read_preamble()
        frame = frames.next(None)
        return 0 if frame is None else read_header(frames.path, frame.message).change_number


def holds_nothing(folder: Path) -> bool:
    """Returns whether a folder without CURRENT never held a change: a crash may leave a file that none came to yet."""
    for path in list_journal_files(folder).values():
        with FrameReader(path, JOURNAL_MAGIC) as frames:
            try:
                frames.read_preamble()
                frames.next(None)
            except IncompleteFrame:
                continue
            except FileDamaged:
                return False
            if not frames.at_end:
                return False
    return not any(path.name.startswith("base-") for path in folder.iterdir())
