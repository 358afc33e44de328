"""The form of journal and base files: a preamble, then frames, each with lengths, a sequence number and checksums.

    preamble   magic (8 bytes), format version (u32), arithmetic version (u32), checksum of these (u64)
    frame      magic (u32), message bytes (u32), array bytes (u64), sequence (u64), checksum of the body (u64),
               checksum of the header before it (u64); then the message, then the arrays

All integers are little-endian, all checksums xxh3_64. The preamble keeps its form whatever the version, so that every program
can say which one a file has. A frame's header has a checksum of its own, so that a damaged length is not taken for a record
that a crash cut off. Knows nothing of what messages and arrays mean.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from shardam_proto.errors import JournalDamaged, VersionMismatch
from shardam_server.shard.journal.file_operations import Buffer

FORMAT_VERSION = 1
"""Form of the files and meaning of their messages; another one is refused."""

ARITHMETIC_VERSION = 1
"""What a replayed push computes (CONTRACT.md): grows when the same record would give other bits."""

JOURNAL_MAGIC = b"SHRDAMJ\n"
"""First bytes of a journal file; the line feed shows a transfer that converted lines."""

BASE_MAGIC = b"SHRDAMB\n"
"""First bytes of a base file."""

_FRAME_MAGIC = 0x4D524653
"""b"SFRM": marks where a frame begins, so that a position that is off is noticed at once."""

_VERSIONS = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct("<IIQQQ")

PREAMBLE_BYTES = _VERSIONS.size + _CHECKSUM.size
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_JOINED_BYTES = 4096
"""Arrays up to this size are copied together: below it a copy costs less than one more buffer of a write."""


class FileDamaged(JournalDamaged):
    """A file of a shard's folder is not as it was written.

    Attributes:
        path: the file.
        offset: where it is wrong, in bytes.
        problem: what is wrong.
    """

    def __init__(self, path: Path, offset: int, problem: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {problem}", metadata={"file": str(path), "offset": str(offset)})
        self.path = path
        self.offset = offset
        self.problem = problem


class IncompleteFrame(FileDamaged):
    """The file ends inside a frame: what a crash leaves at the end of the last file."""


def encode_preamble(magic: bytes, format_version: int = FORMAT_VERSION) -> bytes:
    """Returns the first bytes of a file."""
    versions = _VERSIONS.pack(magic, format_version, ARITHMETIC_VERSION)
    return versions + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(versions))


def encode_frame(sequence: int, message: bytes, arrays: Sequence[npt.NDArray[np.generic]] = ()) -> list[Buffer]:
    """Returns a frame as buffers to be written one after the other; large arrays are not copied."""
    small = bytearray(message)
    body: list[Buffer] = [small]
    for array in arrays:
        if array.size == 0:
            continue
        view = np.ascontiguousarray(array).data.cast("B")
        if len(view) > _JOINED_BYTES:
            body.append(view)
            small = bytearray()
            body.append(small)
        else:
            small += view
    digest = xxhash.xxh3_64()
    for part in body:
        digest.update(part)
    num_bytes = sum(map(len, body))
    header = _HEADER.pack(_FRAME_MAGIC, len(message), num_bytes - len(message), sequence, digest.intdigest())
    first = header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
    return [first, *(part for part in body if part)]


class Frame:
    """One frame as it was read.

    Attributes:
        offset: where it begins in its file.
        sequence: its number.
        message: its message.
        arrays: the bytes of its arrays.
    """

    __slots__ = ("arrays", "message", "offset", "sequence")

    def __init__(self, offset: int, sequence: int, message: bytes, arrays: memoryview) -> None:
        self.offset = offset
        self.sequence = sequence
        self.message = message
        self.arrays = arrays


class FrameReader:
    """Reads a file frame by frame, with one frame in memory; no length is believed beyond the file's size.

    Args:
        path: the file.
        magic: what it should begin with.

    Attributes:
        path: the file.
        offset: end of what has been read and was in order.
        size_bytes: its size when it was opened.

    Raises:
        FileDamaged: it cannot be opened.
    """

    def __init__(self, path: Path, magic: bytes) -> None:
        self.path = path
        self.offset = 0
        self._magic = magic
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - __exit__ closes it
        except OSError as error:
            raise FileDamaged(path, 0, f"it cannot be opened ({error.strerror})") from error
        self.size_bytes = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def at_end(self) -> bool:
        """Whether all of the file has been read."""
        return self.offset == self.size_bytes

    def read_preamble(self) -> None:
        """Checks the first bytes.

        Raises:
            VersionMismatch: another version of shardam wrote the file.
            IncompleteFrame, FileDamaged: as read_versions.
        """
        check_versions(self.path, *self.read_versions())

    def read_versions(self) -> tuple[int, int]:
        """Reads the first bytes; returns the versions of format and arithmetic for the caller to judge.

        Raises:
            IncompleteFrame: the file ends inside them.
            FileDamaged: they are not a preamble.
        """
        data = self._read(min(PREAMBLE_BYTES, self.size_bytes))
        if not self._magic.startswith(data[: len(self._magic)]):
            raise FileDamaged(self.path, 0, f"it begins with {data[: len(self._magic)]!r}, not with {self._magic!r}")
        if len(data) < PREAMBLE_BYTES:
            raise IncompleteFrame(self.path, 0, f"it has {self.size_bytes} bytes, fewer than its first {PREAMBLE_BYTES}")
        versions = data[: _VERSIONS.size]
        if xxhash.xxh3_64_intdigest(versions) != _CHECKSUM.unpack_from(data, _VERSIONS.size)[0]:
            raise FileDamaged(self.path, 0, "the checksum of its first bytes does not match")
        _, format_version, arithmetic_version = _VERSIONS.unpack(versions)
        self.offset = PREAMBLE_BYTES
        return format_version, arithmetic_version

    def next(self, sequence: int | None) -> Frame | None:
        """Returns the next frame, or None at the end of the file.

        Args:
            sequence: the number it must have; None: any.

        Raises:
            IncompleteFrame: the file ends inside it.
            FileDamaged: it is not as it was written.
        """
        start, left = self.offset, self.size_bytes - self.offset
        if left <= 0:
            return None
        header = self._read(min(HEADER_BYTES, left))
        magic = struct.pack("<I", _FRAME_MAGIC)
        if not magic.startswith(header[: len(magic)]):
            raise FileDamaged(self.path, start, f"a record should begin here, but {header[: len(magic)]!r} stands here")
        if left < HEADER_BYTES:
            raise IncompleteFrame(self.path, start, f"the file ends {left} bytes after a record begins")
        if xxhash.xxh3_64_intdigest(header[: _HEADER.size]) != _CHECKSUM.unpack_from(header, _HEADER.size)[0]:
            raise FileDamaged(self.path, start, "the checksum of a record's header does not match")
        _, message_bytes, array_bytes, found, checksum = _HEADER.unpack_from(header)
        if sequence is not None and found != sequence:
            raise FileDamaged(self.path, start, f"a record has the sequence number {found}, {sequence} should follow here")
        if message_bytes + array_bytes > left - HEADER_BYTES:
            raise IncompleteFrame(
                self.path, start, f"a record of {message_bytes + array_bytes} bytes begins here, the file has {left} more"
            )
        message, arrays = self._read(message_bytes), self._read(array_bytes)
        digest = xxhash.xxh3_64(message)
        digest.update(arrays)
        if digest.intdigest() != checksum:
            raise FileDamaged(self.path, start, "the checksum of a record's content does not match")
        self.offset = start + HEADER_BYTES + message_bytes + array_bytes
        return Frame(start, found, bytes(message), memoryview(arrays))

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        try:
            filled = self._file.readinto(data)
        except OSError as error:
            raise FileDamaged(self.path, self.offset, f"it cannot be read ({error.strerror})") from error
        if filled < num_bytes:
            raise FileDamaged(self.path, self.offset, "the file became shorter while it was read")
        return data


def check_versions(path: Path, format_version: int, arithmetic_version: int) -> None:
    """Refuses what another version wrote.

    Raises:
        VersionMismatch: format or arithmetic is not this version's.
    """
    if format_version != FORMAT_VERSION:
        raise VersionMismatch(
            f"{path} has format version {format_version}, this shardam knows {FORMAT_VERSION}; start the shard with the "
            "shardam that wrote it",
            metadata={"found": str(format_version), "known": str(FORMAT_VERSION)},
        )
    if arithmetic_version != ARITHMETIC_VERSION:
        raise VersionMismatch(
            f"{path} was written with arithmetic version {arithmetic_version}, this shardam has {ARITHMETIC_VERSION}: replayed "
            "changes would have other bits; start the shard with the shardam that wrote it",
            metadata={"found": str(arithmetic_version), "known": str(ARITHMETIC_VERSION)},
        )
