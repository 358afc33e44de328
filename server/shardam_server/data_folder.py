"""Where `up` keeps the state of its shards: the folder by default, whether it can be written, and what that means to a user.

What lies in the folder, and how it is locked and read, is the shard's.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from shardam_server.command_errors import CommandError, UsageError
from shardam_server.shard.journal.file_names import LOCK

FOLDER_MODE = 0o700
"""Weights and moments are their owner's alone, as the base directory specification asks for folders it makes."""


def default_data_dir() -> Path:
    """Returns `$XDG_STATE_HOME/shardam`, else `~/.local/state/shardam`; a variable that is not an absolute path is ignored."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    return Path(state_home if os.path.isabs(state_home) else "~/.local/state") / "shardam"


def absolute_data_dir(folder: Path | None) -> Path | None:
    """Returns a folder as an absolute path, with `~` expanded; None stays None.

    Raises:
        ValueError: it starts with a home folder that the system does not know.
    """
    if folder is None:
        return None
    try:
        return Path(os.path.abspath(folder.expanduser()))
    except RuntimeError:
        raise ValueError(
            "this user has no home folder; name a folder with --data-dir PATH, or keep rows in memory only with --data-dir none"
        ) from None


def prepare_data_dir(folder: Path) -> None:
    """Makes the folder if it is missing, and writes and removes a file in it, so that a folder of no use is said at once.

    Args:
        folder: absolute path.

    Raises:
        UsageError: it cannot be made or written.
    """
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(FOLDER_MODE, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--data-dir {folder} cannot be written ({error.strerror or error}): name another folder, or keep rows in memory "
            "only with --data-dir none"
        ) from None


def check_not_held(folder: Path, cluster: str) -> None:
    """Refuses a folder whose shards run, so that a second cluster on it is said at once.

    Args:
        folder: the data folder.
        cluster: the cluster's name.

    Raises:
        CommandError: a process holds the folder of a shard.
    """
    for path in sorted((folder / cluster).glob(f"shard-*/{LOCK}")):
        with path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = lock.read().decode(errors="replace").strip() or "unknown"
                raise CommandError(
                    f"cluster {cluster!r} runs on {folder} already: {path.parent.name} is process {pid}. Stop it there, or "
                    "use another --cluster or --data-dir for a second one"
                ) from None


def describe_durability(data_dir: Path | None, journal: str) -> str:
    """Says where rows live and what a kill costs.

    Args:
        data_dir: the folder; None: memory only.
        journal: off, write or fsync.
    """
    if data_dir is None:
        return "Rows and moments live in memory only: a killed shard loses them, and so does a stop (--data-dir none)."
    promise = {
        "off": "a stop keeps them, a killed shard loses what has changed since the last one",
        "write": "a killed shard comes back with them",
        "fsync": "a killed shard comes back with them, also after a power loss",
    }[journal]
    return f"Rows and moments are kept in {data_dir} (journal: {journal}): {promise}."


def describe_checkpoints(root: Path | None, every_s: float, keep: int) -> str | None:
    """Says where checkpoints lie and when they are made; None: there are none.

    Args:
        root: their root folder.
        every_s: seconds between two that the cluster makes by itself; 0: none.
        keep: how many without a name of their own stay; 0: all.
    """
    if root is None:
        return None
    if not every_s:
        return f"Checkpoints lie in {root}: `shardam checkpoint create` makes one, --checkpoint-every-s makes them by itself."
    stay = "all stay" if not keep else f"the last {keep} stay"
    return f"Checkpoints lie in {root}: one every {every_s:g} s, of which {stay}; `shardam checkpoint list` shows them."


def aftermath_of_a_kill(index: int, data_dir: Path | None, journal: str) -> str:
    """Says what the death of a shard that served means for its rows, for the line that reports it.

    Args:
        index: the shard.
        data_dir: the folder; None: memory only.
        journal: off, write or fsync.
    """
    if data_dir is None:
        return (
            "its rows and moments were in memory only and are lost: it will be LOST, and serve nothing, until "
            f"`shardam forget-shard --index {index}`"
        )
    if journal == "off":
        return "what has changed since its last clean stop is lost (--journal off); it starts with --truncate-journal only"
    return f"it restarts from its data folder in {data_dir}"
