"""Reads files of a checkpoint and compares them with what its manifest says."""

from __future__ import annotations

from pathlib import Path

from shardam_proto.errors import UnknownCheckpoint
from shardam_server.shard.checkpoints.folders import check_size, folder_below, read_manifest
from shardam_server.shard.checkpoints.json_fields import damaged
from shardam_server.shard.checkpoints.manifest import CheckpointFile
from shardam_server.shard.checkpoints.segments import SegmentReader, hash_file
from shardam_server.shard.checkpoints.shares import share_of
from shardam_server.shard.checkpoints.tasks import Progress


class CheckFiles:
    """Checks the files that one shard would load; a task's work. Shard 0 checks what trainers added, too.

    Together the shards of a cluster read every file of a checkpoint, whatever their number.

    Args:
        root: root folder of checkpoints.
        folder: the checkpoint's folder, relative to it.
        index: index of the shard.
        num_shards: shards that would load it.
    """

    def __init__(self, root: Path, folder: str, index: int, num_shards: int) -> None:
        self._root = root
        self._folder = folder
        self._index = index
        self._num_shards = num_shards

    def run(self, progress: Progress) -> None:
        """Reads all of them, and returns if they are as they were written.

        Raises:
            CheckpointDamaged: one is not; names it and says what is wrong.
            UnknownCheckpoint: this shard does not see the folder.
            BadOption: the folder lies outside the root folder.
            VersionMismatch: another shardam wrote it.
            Dropped: it was given up.
        """
        folder = folder_below(self._root, self._folder)
        if not folder.is_dir():
            raise UnknownCheckpoint(
                f"shard {self._index} does not see {folder}: all shards need the same folder of checkpoints, mounted there, or "
                "named with --checkpoint-dir",
                metadata={"folder": str(folder)},
            )
        manifest = read_manifest(folder)
        share = share_of(manifest, self._index, self._num_shards)
        extra = list(manifest.extra.values()) if self._index == 0 else []
        files = [*(segment.file for segment in share.segments), *extra]
        progress.total_bytes = sum(file.size_bytes for file in files)
        for file in files:  # what costs nothing comes first
            check_size(folder, file)
        for segment in share.segments:
            with SegmentReader(folder, manifest, segment.shard, segment.number):
                pass  # made to read its first record
        for file in files:
            _check_content(folder, file, progress)

    def discard(self) -> None:
        """Nothing is written."""


def _check_content(folder: Path, file: CheckpointFile, progress: Progress) -> None:
    path = check_size(folder, file)
    if hash_file(path, progress.add) != file.xxh3:
        raise damaged(path, f"its {file.size_bytes} bytes are not those that were written")
