"""Which files a checkpoint's folder has, by name, and that a name is never a way out of it."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from shardam_server.shard.checkpoints.json_fields import damaged

MANIFEST = "manifest.json"
"""Written last: a folder without it is no checkpoint."""

MANIFEST_BEING_WRITTEN = "manifest.json.tmp"
"""Its name until it is on the disk."""

CUT_FOLDER = re.compile(r"cut-[0-9a-f]{16}-\d{1,4}")
"""Folders in which shards write before files are moved to where they belong."""

_SEGMENT = re.compile(r"shard-(\d{1,4})-of-(\d{1,4})-\d{3,6}\.rows")
_EXTRA = re.compile(r"extra-rank-\d{1,10}\.safetensors(\.tmp)?")


def segment_name(index: int, num_shards: int, segment: int) -> str:
    """Returns the name of a shard's file, by its position among the shard's files."""
    return f"shard-{index}-of-{num_shards}-{segment:03d}.rows"


def shard_of_segment(name: str) -> tuple[int, int] | None:
    """Returns the shard that wrote a file and how many shards there were; None: the name is another one's."""
    found = _SEGMENT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def extra_name(rank: int) -> str:
    """Returns the name of the file of what a trainer added."""
    return f"extra-rank-{rank}.safetensors"


def cut_folder_name(checkpoint_id: int, index: int) -> str:
    """Returns the name of the folder in which a shard writes its files first."""
    return f"cut-{checkpoint_id:016x}-{index}"


def is_checkpoint_file(name: str) -> bool:
    """Returns whether shardam gives files or folders within a checkpoint's folder such a name."""
    return name in (MANIFEST, MANIFEST_BEING_WRITTEN) or any(
        pattern.fullmatch(name) for pattern in (_SEGMENT, _EXTRA, CUT_FOLDER)
    )


def file_size(path: Path) -> int:
    """Returns a file's size, having made sure that it is a file, and no link to one elsewhere.

    Raises:
        CheckpointDamaged: it is missing, or no plain file.
    """
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if stat.S_ISLNK(status.st_mode):
        raise damaged(path, "it is a link, which is not followed: it could lead out of the folder")
    if not stat.S_ISREG(status.st_mode):
        raise damaged(path, "it is no plain file")
    return status.st_size
