"""What trainers add to a checkpoint: brought to home in parts, moved into the checkpoint's folder, read in parts."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import xxhash

from shardam_proto.errors import BadOption, CheckpointDamaged, CheckpointFailed, UnknownCheckpoint
from shardam_server.shard.checkpoints.file_names import extra_name
from shardam_server.shard.checkpoints.folders import check_size
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest

logger = logging.getLogger(__name__)

UPLOADS = ".uploads"
"""Folder, beside the checkpoints of a cluster, of what is not in one yet; no checkpoint can have its name."""

PART_BYTES = 4 * 2**20
"""Bytes of one part at most: few calls for a large model, and no long wait of others."""

KEPT_S = 3600.0
"""An addition that no checkpoint has taken is removed after this time."""

ID_BYTES = 16


class Extras:
    """The additions of one cluster's trainers; blocking, from any thread.

    Args:
        folder: where the cluster's checkpoints lie.
    """

    def __init__(self, folder: Path) -> None:
        self._uploads = folder / UPLOADS
        self._writing = threading.Lock()

    def put(self, extra_id: bytes, offset: int, total_bytes: int, data: bytes) -> int:
        """Adds a part; returns the bytes that are there without a gap. A part that is there already is passed over.

        Raises:
            BadOption: an id, a size or a place that cannot be.
            CheckpointFailed: it cannot be written.
        """
        path = self._path(extra_id)
        if len(data) > PART_BYTES or offset + len(data) > total_bytes:
            raise BadOption(
                f"a part of {len(data)} bytes at {offset} of {total_bytes}: parts have up to {PART_BYTES} bytes, and end "
                "within the whole"
            )
        try:
            self._uploads.mkdir(parents=True, exist_ok=True)
            with self._writing, path.open("ab") as file:  # a repeat may come while the first call still writes
                size = file.tell()
                if offset > size:
                    raise BadOption(f"a part at {offset} came after {size} bytes; send it from there")
                file.write(data[size - offset :] if size > offset else data)
                return file.tell()
        except OSError as error:
            raise CheckpointFailed(f"{path} cannot be written ({error.strerror}): make room there, and try again") from error

    def size(self, extra_id: bytes) -> int:
        """Returns the bytes that are there of an addition.

        Raises:
            BadOption: nothing was brought under this id.
        """
        try:
            return self._path(extra_id).stat().st_size
        except FileNotFoundError:
            raise BadOption(
                f"nothing was brought under the id {extra_id.hex()}, or the home shard has dropped it after {KEPT_S:g} s; "
                "bring it again"
            ) from None

    def take(self, extra_id: bytes, rank: int, folder: Path) -> CheckpointFile:
        """Moves an addition into a checkpoint's folder.

        Raises:
            BadOption: nothing was brought under this id.
            CheckpointFailed: it cannot be moved.
        """
        size = self.size(extra_id)
        name = extra_name(rank)
        digest = xxhash.xxh3_128()
        path = self._path(extra_id)
        try:
            with path.open("rb+") as file:
                while block := file.read(PART_BYTES):
                    digest.update(block)
                os.fsync(file.fileno())
            path.rename(folder / name)
        except OSError as error:
            raise CheckpointFailed(f"{path} cannot be moved to {folder} ({error.strerror})") from error
        return CheckpointFile(name, size, digest.hexdigest())

    def remove_old(self, kept_s: float = KEPT_S) -> None:
        """Removes additions that no checkpoint has taken in a time."""
        now = time.time()
        with contextlib.suppress(FileNotFoundError):
            for path in self._uploads.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if now - path.stat().st_mtime > kept_s:
                        path.unlink()

    def remove_all(self) -> None:
        """Removes all of them; a home shard that has just started knows of none."""
        shutil.rmtree(self._uploads, ignore_errors=True)

    def _path(self, extra_id: bytes) -> Path:
        if len(extra_id) != ID_BYTES:
            raise BadOption(f"an addition's id has {ID_BYTES} random bytes, got {len(extra_id)}")
        return self._uploads / extra_id.hex()


def read_part(manifest: Manifest, folder: Path, rank: int, offset: int) -> tuple[bytes, int]:
    """Reads a part of what a trainer added; returns it, and the bytes of the whole.

    Raises:
        UnknownCheckpoint: this rank added nothing.
        CheckpointDamaged: the file is missing, a link, or has another size.
    """
    file = manifest.extra.get(rank)
    if file is None:
        ranks = ", ".join(map(str, sorted(manifest.extra))) or "nobody"
        raise UnknownCheckpoint(
            f"rank {rank} added nothing to checkpoint {manifest.name!r}; {ranks} did: a checkpoint from the command line, REST "
            "or a schedule has no addition",
            metadata={"checkpoint": manifest.name, "rank": str(rank)},
        )
    path = check_size(folder, file)
    try:
        with path.open("rb") as opened:
            opened.seek(min(offset, file.size_bytes))
            return opened.read(PART_BYTES), file.size_bytes
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read ({error.strerror})") from error
