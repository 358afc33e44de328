"""A checkpoint's folder: found below the root folder alone, its manifest read, its files looked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardam_proto.errors import BadOption, CheckpointDamaged
from shardam_server.shard.checkpoints.file_names import MANIFEST, file_size, shard_of_segment
from shardam_server.shard.checkpoints.json_fields import damaged
from shardam_server.shard.checkpoints.manifest import MAX_MANIFEST_BYTES, CheckpointFile, Manifest


def folder_below(root: Path, path: str) -> Path:
    """Returns a path as it is below the root folder, links followed.

    Args:
        root: the root folder.
        path: relative to it, or absolute.

    Raises:
        BadOption: it leads out of the root folder, or is the root folder.
    """
    try:
        top, found = root.resolve(), (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, or a null byte
        raise BadOption(f"{path!r} is no path ({error})", metadata={"name": path}) from error
    if top not in found.parents:
        raise BadOption(
            f"{path!r} does not lie below {root}, the folder of checkpoints: only what is there can be read. Move it there, or "
            "start the shards with another --checkpoint-dir",
            metadata={"name": path, "root": str(root)},
        )
    return found


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest in a folder.

    Raises:
        CheckpointDamaged: there is none, or it is damaged.
        VersionMismatch: another shardam wrote it.
    """
    path = folder / MANIFEST
    if not path.is_symlink() and not path.exists():
        raise CheckpointDamaged(
            f"{folder} is no complete checkpoint: {MANIFEST} is missing{_parts_that_are_there(folder)}; use another checkpoint",
            metadata={"file": str(path)},
        )
    if file_size(path) > MAX_MANIFEST_BYTES:
        raise damaged(path, f"it has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        return Manifest.from_json(path.read_bytes(), path)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error


def check_sizes(manifest: Manifest, folder: Path) -> None:
    """Makes sure that all files of a checkpoint are there, as long as they should be.

    Raises:
        CheckpointDamaged: one is not; says which one.
    """
    for shard in manifest.shards:
        for file in shard.files:
            written = f" (shard {shard.index} wrote it on host {shard.host_name} as {shard.folder})"
            check_size(folder, file, written)
    for rank, file in manifest.extra.items():
        check_size(folder, file, f" (what rank {rank} added)")


def problem_of_sizes(manifest: Manifest, folder: Path) -> str:
    """Returns which file of a checkpoint is missing or has another length; empty: none."""
    try:
        check_sizes(manifest, folder)
    except CheckpointDamaged as error:
        return error.message
    return ""


def check_size(folder: Path, file: CheckpointFile, origin: str = "") -> Path:
    """Returns the path of a file that is there and as long as it should be.

    Args:
        folder: the checkpoint's folder.
        file: the file.
        origin: where it came from, for the message.

    Raises:
        CheckpointDamaged: it is missing, a link, or has another length.
    """
    path = folder / file.name
    try:
        found = file_size(path)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{error.message}{origin}", metadata=error.metadata) from error
    if found != file.size_bytes:
        raise damaged(path, f"it has {found} bytes, {file.size_bytes} were written{origin}")
    return path


def _parts_that_are_there(folder: Path) -> str:
    """Says which shards' files are there, where no manifest says which should be."""
    parts: dict[int, set[int]] = {}
    for name in names_in(folder):
        part = shard_of_segment(name)
        if part is not None:
            parts.setdefault(part[1], set()).add(part[0])
    return "".join(
        f", and of shards 0 to {num_shards - 1} there are files of {sorted(present)} only"
        for num_shards, present in parts.items()
        if len(present) < num_shards
    )


def names_in(folder: Path) -> Iterator[str]:
    """Yields the names of what is in a folder."""
    with os.scandir(folder) as found:
        yield from (one.name for one in found)


def sync_folder(folder: Path) -> None:
    """Waits until a folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
