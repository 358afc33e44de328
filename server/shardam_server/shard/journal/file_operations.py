"""What the journal asks of the file system, in one place, so that a test can let any of it fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that say that there is no space, and may pass by themselves."""

Buffer = bytes | bytearray | memoryview


class FileOperations:
    """The file system. Every method raises OSError as the call below it does."""

    def create(self, path: Path) -> int:
        """Opens an empty file for writing, whatever the path held before; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """Opens a file that exists for writing; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes buffers one after the other from an offset on; returns how many bytes were written, which may be fewer."""
        return os.pwritev(descriptor, buffers, offset)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Cuts a file to a size."""
        os.ftruncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        """Waits until a file is on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Closes a file."""
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file, over another one if there is one."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        os.unlink(path)

    def sync_folder(self, path: Path) -> None:
        """Waits until a folder's names are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Returns how much a process without privileges may still write on a folder's disk."""
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize


def is_disk_full(error: OSError) -> bool:
    """Returns whether an error says that there is no space."""
    return error.errno in DISK_FULL
