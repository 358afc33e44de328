"""The lock on a shard's folder: one process at a time, whatever Redis says (PROTOCOL.md, section 9)."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from shardam_server.command_errors import CommandError
from shardam_server.shard.journal.file_names import LOCK

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Random for each start of the machine; cloned machines share a host name, and containers on one machine do not."""

_PID_BYTES = 32
"""Longer than any process id."""


class FolderRefused(CommandError):
    """A data folder cannot be used by this shard, now or later: a setting is wrong."""

    exit_code = 2


class FolderHeld(FolderRefused):
    """Another process holds the folder, for now."""

    exit_code = 1


class FolderLock:
    """A folder that this process holds until `release` or its end; a stopped process still holds it.

    Args:
        folder: the folder of one shard; made if it is not there.

    Raises:
        FolderHeld: another process has it.
        FolderRefused: it cannot be made or locked.
    """

    def __init__(self, folder: Path) -> None:
        try:
            for path in (folder.parent.parent, folder.parent, folder):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FolderRefused(
                f"{folder} cannot be used for the shard's state ({error.strerror}); make it writable, use another --data-dir, "
                "or --data-dir none to keep rows in memory only"
            ) from error
        try:
            self._hold(folder)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _hold(self, folder: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            pid = os.pread(self._descriptor, _PID_BYTES, 0).decode(errors="replace").strip() or "unknown"
            raise FolderHeld(
                f"{folder} is held by process {pid}, a running shard or one that is paused. Stop it, or kill it first "
                f"(kill -9 {pid}) if it is paused; for a second cluster use another --data-dir or --cluster"
            ) from error
        except OSError as error:
            raise FolderRefused(
                f"{folder} cannot be locked ({error.strerror}); use a --data-dir with space, on a file system that has flock"
            ) from error

    @property
    def identity(self) -> str:
        """Names the locked folder on its machine: whoever has the lock of the same name holds it alone; no copy has it."""
        lock = os.fstat(self._descriptor)
        return f"{_machine()}:{lock.st_dev}:{lock.st_ino}"

    def release(self) -> None:
        """Gives the folder to whoever locks it next."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may still have the descriptor
        os.close(self._descriptor)


def _machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
