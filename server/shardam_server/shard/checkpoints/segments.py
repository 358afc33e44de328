"""The form of a checkpoint's files: a preamble and frames as a base has them, in segments that can be read one by one.

    rows      header; rows of tables, in no particular order; end
    state     header; tables with their counters, clients, groups; end     (the last one of each shard)

The frames' checksums show damage while a file is loaded; its length and the xxh3 of all of it stand in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash
from google.protobuf.message import DecodeError

from shardam_proto.errors import CheckpointDamaged, VersionMismatch
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.checkpoints.file_names import file_size, segment_name
from shardam_server.shard.checkpoints.json_fields import damaged
from shardam_server.shard.checkpoints.manifest import FORMAT_VERSION, CheckpointFile, Manifest, ShardFiles
from shardam_server.shard.journal.file_operations import FileOperations
from shardam_server.shard.journal.frames import FileDamaged, FrameReader, encode_frame, encode_preamble
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.journal.journal_file import JournalFile

SEGMENT_MAGIC = b"SHRDAMC\n"
"""First bytes of a file of a checkpoint."""

SEGMENT_BYTES = 256 * 2**20
"""Bytes at which a file of rows ends: what one check or upload takes up again after a failure; 4,000 files are a terabyte."""

READ_BYTES = 4 * 2**20
"""Bytes of one read: large beside its cost, small beside memory."""


class SegmentWriter:
    """Writes one segment.

    Args:
        path: the file.
        header: what stands first in it.
        operations: the file system.

    Attributes:
        num_rows: rows in it so far.
        num_clients: clients in it so far.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, header: journal_pb2.SegmentHeader, operations: FileOperations) -> None:
        self.num_rows = 0
        self.num_clients = 0
        self._digest = xxhash.xxh3_128()
        self._sequence = 0
        self._file = JournalFile(path, operations.create(path), 0, operations)
        try:
            self._write([encode_preamble(SEGMENT_MAGIC, FORMAT_VERSION), *encode_frame(0, header.SerializeToString())])
        except BaseException:
            self._file.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Bytes so far."""
        return self._file.size_bytes

    def add(self, record: journal_pb2.BaseRecord, arrays: Arrays = ()) -> int:
        """Appends a record; returns its bytes.

        Raises:
            OSError, CutBackFailed: it cannot be written.
        """
        self._sequence += 1
        self.num_rows += record.rows.num_rows
        self.num_clients += record.HasField("client")
        return self._write(encode_frame(self._sequence, record.SerializeToString(), arrays))

    def finish(self) -> CheckpointFile:
        """Ends the segment; it is on the disk when the call returns.

        Raises:
            OSError, CutBackFailed: it cannot be written.
        """
        self.add(journal_pb2.BaseRecord(end=journal_pb2.BaseEnd(num_rows=self.num_rows, num_clients=self.num_clients)))
        self._file.sync()
        self._file.close()
        return CheckpointFile(self._file.path.name, self.size_bytes, self._digest.hexdigest(), self.num_rows)

    def abandon(self) -> None:
        """Closes the file as it is; a finished one, too."""
        self._file.close()

    def _write(self, buffers: list[bytes | bytearray | memoryview]) -> int:
        before = self.size_bytes
        for part in buffers:
            self._digest.update(part)
        self._file.write(buffers)
        return self.size_bytes - before


def segment_header(
    cluster_id: str, checkpoint_id: int, shard: ShardFiles, num_shards: int, segment: int
) -> journal_pb2.SegmentHeader:
    """Returns what stands first in a segment."""
    return journal_pb2.SegmentHeader(
        cluster_id=cluster_id,
        checkpoint_id=checkpoint_id,
        shard=shard.index,
        num_shards=num_shards,
        segment=segment,
        change_number=shard.change_number,
    )


class SegmentReader:
    """Reads one segment of a checkpoint, with one record in memory. A context manager.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.
        shard: what the shard wrote that wrote the segment.
        segment: position of the segment among the shard's.

    Attributes:
        path: the file.
        size_bytes: its bytes.

    Raises:
        CheckpointDamaged: it is missing, or not the file that the manifest names.
        VersionMismatch: another shardam wrote it.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard: ShardFiles, segment: int) -> None:
        file = shard.files[segment]
        self.path = folder / segment_name(shard.index, manifest.num_shards, segment)
        self.size_bytes = file_size(self.path)
        if self.size_bytes != file.size_bytes:
            raise damaged(self.path, f"it has {self.size_bytes} bytes, {file.size_bytes} were written")
        self._file = file
        self._header = segment_header(manifest.cluster_id, manifest.checkpoint_id, shard, manifest.num_shards, segment)
        self._arithmetic = manifest.arithmetic
        try:
            self._frames = FrameReader(self.path, SEGMENT_MAGIC)
        except FileDamaged as error:
            raise _as_damaged(error) from error
        try:
            self._read_start()
        except BaseException:
            self._frames.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._frames.close()

    def records(self, when_read: Callable[[int], None]) -> Iterator[tuple[journal_pb2.BaseRecord, memoryview]]:
        """Yields each record but the end, with the bytes of its arrays.

        Args:
            when_read: called with the bytes that were read.

        Raises:
            CheckpointDamaged: the file is not as it was written.
        """
        num_rows = num_clients = 0
        sequence, ended, before = 1, False, 0
        try:
            while (frame := self._frames.next(sequence)) is not None:
                when_read(self._frames.offset - before)
                before = self._frames.offset
                if ended:
                    raise self.damaged("a record follows the end")
                record = journal_pb2.BaseRecord.FromString(frame.message)
                if record.HasField("end"):
                    ended = record.end == journal_pb2.BaseEnd(num_rows=num_rows, num_clients=num_clients)
                    if not ended or num_rows != self._file.num_rows:
                        raise self.damaged(f"it has {num_rows} rows and {num_clients} clients, not as many as it should have")
                else:
                    num_rows += record.rows.num_rows
                    num_clients += record.HasField("client")
                    yield record, frame.arrays
                sequence += 1
        except FileDamaged as error:
            raise _as_damaged(error) from error
        except DecodeError as error:
            raise self.damaged(f"a record cannot be decoded ({error})") from error
        if not ended:
            raise self.damaged("it ends before its last record")

    def damaged(self, problem: str) -> CheckpointDamaged:
        """Returns the error of a problem of this file."""
        return damaged(self.path, problem)

    def _read_start(self) -> None:
        try:
            versions = self._frames.read_versions()
            if versions != (FORMAT_VERSION, self._arithmetic):
                raise VersionMismatch(
                    f"{self.path} has format version {versions[0]} and arithmetic version {versions[1]}, its manifest says "
                    f"{FORMAT_VERSION} and {self._arithmetic}; restore another checkpoint, or use the shardam that wrote it",
                    metadata={"file": str(self.path)},
                )
            first = self._frames.next(0)
            header = None if first is None else journal_pb2.SegmentHeader.FromString(first.message)
        except FileDamaged as error:
            raise _as_damaged(error) from error
        except DecodeError as error:
            raise self.damaged(f"its first record cannot be decoded ({error})") from error
        if header != self._header:
            raise self.damaged("it is of another checkpoint, or of another place in this one")


def hash_file(path: Path, when_read: Callable[[int], None]) -> str:
    """Reads a file through; returns its xxh3_128 in hex.

    Args:
        path: the file.
        when_read: called with the bytes of each part.

    Raises:
        CheckpointDamaged: it cannot be read.
    """
    digest, part = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            while num_bytes := file.readinto(part):
                digest.update(part[:num_bytes])
                when_read(num_bytes)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _as_damaged(error: FileDamaged) -> CheckpointDamaged:
    return damaged(error.path, f"at byte {error.offset}, {error.problem}")
