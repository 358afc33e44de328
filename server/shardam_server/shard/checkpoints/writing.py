"""A shard's part of a checkpoint: its cut written to local disk first, then moved to where all shards' parts lie."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from shardam_proto.errors import CheckpointFailed
from shardam_proto.v1 import checkpoint_pb2, common_pb2, journal_pb2
from shardam_server.shard.checkpoints.file_messages import encode_shard
from shardam_server.shard.checkpoints.file_names import CUT_FOLDER, MANIFEST, cut_folder_name, segment_name
from shardam_server.shard.checkpoints.folders import folder_below
from shardam_server.shard.checkpoints.manifest import CheckpointFile, ShardFiles
from shardam_server.shard.checkpoints.segments import READ_BYTES, SEGMENT_BYTES, SegmentWriter, segment_header
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.journal.file_operations import FileOperations, is_disk_full
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.journal.journal_file import CutBackFailed, JournalFile


class Cut(Protocol):
    """A shard's state at a cut; read by one thread while changes go on."""

    @property
    def change_number(self) -> int:
        """The change that it is as of."""
        ...

    @property
    def tables(self) -> Sequence[common_pb2.TableInfo]:
        """Its tables, with their rows, steps and options."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows over all tables."""
        ...

    @property
    def size_bytes(self) -> int:
        """About how many bytes its rows have in files."""
        ...

    def records(self, *, parts: bool) -> Iterator[tuple[journal_pb2.BaseRecord, Arrays]]:
        """Yields the records of a base: tables, rows, clients, groups, parts if asked for, and the end."""
        ...

    def close(self) -> None:
        """Ends it; may be repeated."""
        ...


@dataclasses.dataclass(frozen=True)
class WriteTerms:
    """What is written where.

    Attributes:
        cluster_id: id of the cluster.
        checkpoint_id: id of the checkpoint, 63 bits.
        index: index of the shard.
        num_shards: shards of the cluster.
        root: root folder of checkpoints.
        folder: the checkpoint's folder, relative to it; home has made it.
        staging: a folder on the shard's own disk to write in first; None: there is none.
        host_name: name of this host.
        spare_bytes: space that stays free.
        segment_bytes: bytes at which a file of rows ends.
        operations: the file system.
    """

    cluster_id: str
    checkpoint_id: int
    index: int
    num_shards: int
    root: Path
    folder: str
    staging: Path | None
    host_name: str
    spare_bytes: int
    segment_bytes: int = SEGMENT_BYTES
    operations: FileOperations = dataclasses.field(default_factory=FileOperations)


class WriteCut:
    """Writes a cut into a checkpoint's folder; a task's work.

    Args:
        cut: the state; it is closed when the work ends, however it does.
        terms: where to.
    """

    def __init__(self, cut: Cut, terms: WriteTerms) -> None:
        self._cut = cut
        self._terms = terms
        self._operations = terms.operations
        self._moved: list[Path] = []

    def run(self, progress: Progress) -> checkpoint_pb2.CheckpointShard:
        """Writes it; it is on the disk when the call returns.

        Raises:
            CheckpointFailed: it could not be written; nothing of it is left.
            BadOption: the folder lies outside the root folder.
            Dropped: it was given up; nothing of it is left.
        """
        terms = self._terms
        try:
            target = self._target()
            working = (terms.staging or target) / cut_folder_name(terms.checkpoint_id, terms.index)
            try:
                return self._write(working, target, progress)
            except BaseException:
                self.discard()
                raise
            finally:
                shutil.rmtree(working, ignore_errors=True)
        finally:
            self._cut.close()

    def discard(self) -> None:
        """Removes what was written, unless the checkpoint has become whole: tasks are given up when a home process begins, too.

        What cannot be removed is left to who deletes the checkpoint's folder.
        """
        if any((path.parent / MANIFEST).exists() for path in self._moved[:1]):
            return
        for path in self._moved:
            with contextlib.suppress(OSError):
                self._operations.remove(path)
        self._moved.clear()

    def _target(self) -> Path:
        target = folder_below(self._terms.root, self._terms.folder)
        if not target.is_dir():
            raise CheckpointFailed(
                f"shard {self._terms.index} does not see {target} on host {self._terms.host_name}, where home has made it: all "
                "shards need the same folder of checkpoints, mounted there, or named with --checkpoint-dir",
                metadata={"folder": str(target)},
            )
        return target

    def _write(self, working: Path, target: Path, progress: Progress) -> checkpoint_pb2.CheckpointShard:
        terms, size_bytes = self._terms, self._cut.size_bytes
        with _failing(working):
            working.mkdir(exist_ok=True)
            self._check_room(working, size_bytes)
            moves = working.stat().st_dev == target.stat().st_dev
            if not moves:
                self._check_room(target, size_bytes)
            progress.total_bytes = size_bytes if moves else 2 * size_bytes
            shard = ShardFiles(terms.index, terms.host_name, str(target), self._cut.change_number, ())
            files = _Segments(self._cut, working, shard, terms).write(progress)
        with _failing(target):
            for file in files:
                self._move(working / file.name, target / file.name, progress)
            self._operations.sync_folder(target)
        return encode_shard(dataclasses.replace(shard, files=tuple(files)))

    def _check_room(self, folder: Path, size_bytes: int) -> None:
        needed, free = size_bytes + self._terms.spare_bytes, self._operations.free_bytes(folder)
        if free < needed:
            raise CheckpointFailed(
                f"{folder} has {free} bytes free, shard {self._terms.index} needs {needed}: about {size_bytes} for its part of "
                f"the checkpoint, and {self._terms.spare_bytes} that stay free for others; make space, or name another folder "
                "with --checkpoint-dir",
                metadata={"folder": str(folder), "needed": str(needed), "free": str(free)},
            )

    def _move(self, old: Path, new: Path, progress: Progress) -> None:
        self._moved.append(new)
        try:
            self._operations.rename(old, new)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(old, new, progress)
            self._operations.remove(old)

    def _copy(self, old: Path, new: Path, progress: Progress) -> None:
        part = memoryview(bytearray(READ_BYTES))
        to = JournalFile(new, self._operations.create(new), 0, self._operations)
        try:
            with open(old, "rb", buffering=0) as file:
                while num_bytes := file.readinto(part):
                    to.write([part[:num_bytes]])
                    progress.add(num_bytes)
            to.sync()
        finally:
            to.close()


class _Segments:
    """Puts a cut's records into files."""

    def __init__(self, cut: Cut, folder: Path, shard: ShardFiles, terms: WriteTerms) -> None:
        self._cut = cut
        self._folder = folder
        self._shard = shard
        self._terms = terms
        self._files: list[CheckpointFile] = []
        self._present: SegmentWriter | None = None
        self._holds_rows = False

    def write(self, progress: Progress) -> list[CheckpointFile]:
        """Writes all of them; returns them in order."""
        tables = []
        try:
            for record, arrays in self._cut.records(parts=False):
                match record.WhichOneof("part"):
                    case "table":
                        tables.append(record)
                    case "rows":
                        progress.add(self._segment(rows=True).add(record, arrays))
                    case "client" | "group":
                        if tables:
                            self._start_state(tables, progress)
                        progress.add(self._segment(rows=False).add(record, arrays))
            self._start_state(tables, progress)
            self._finish()
        finally:
            if self._present is not None:
                self._present.abandon()
        self._check_rows()
        return self._files

    def _start_state(self, tables: list[journal_pb2.BaseRecord], progress: Progress) -> None:
        """Tables come before clients in the last file, which all that load a part of the checkpoint read."""
        segment = self._segment(rows=False)
        for record in tables:
            progress.add(segment.add(record))
        tables.clear()

    def _segment(self, *, rows: bool) -> SegmentWriter:
        present = self._present
        if present is not None and self._holds_rows == rows and not (rows and present.size_bytes >= self._terms.segment_bytes):
            return present
        self._finish()
        terms, number = self._terms, len(self._files)
        header = segment_header(terms.cluster_id, terms.checkpoint_id, self._shard, terms.num_shards, number)
        path = self._folder / segment_name(terms.index, terms.num_shards, number)
        self._present, self._holds_rows = SegmentWriter(path, header, terms.operations), rows
        return self._present

    def _finish(self) -> None:
        if self._present is not None:
            self._files.append(self._present.finish())
            self._present = None

    def _check_rows(self) -> None:
        written = sum(file.num_rows for file in self._files)
        if written != self._cut.num_rows:
            raise CheckpointFailed(
                f"shard {self._terms.index} has {self._cut.num_rows} rows in the cut, {written} were written: the checkpoint "
                "is not made; this is a defect, report it"
            )


@contextlib.contextmanager
def _failing(folder: Path) -> Iterator[None]:
    """Says where the file system failed."""
    try:
        yield
    except (OSError, CutBackFailed, MemoryError) as error:
        full = isinstance(error, OSError) and is_disk_full(error)
        what = "is full" if full else f"cannot be written to ({str(error) or type(error).__name__})"
        raise CheckpointFailed(
            f"{folder} {what}: this checkpoint is not made, the former ones are as they were; make space, or name another "
            "folder with --checkpoint-dir",
            metadata={"folder": str(folder)},
        ) from error


def remove_left_cuts(shard_folder: Path) -> None:
    """Removes what a killed shard had written of cuts in its own folder.

    Raises:
        OSError: it cannot be removed.
    """
    with os.scandir(shard_folder) as found:
        left = [one.path for one in found if CUT_FOLDER.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    for path in left:
        shutil.rmtree(path)
