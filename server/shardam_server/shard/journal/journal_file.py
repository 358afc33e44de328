"""One open file of a shard's folder that frames are written to."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from shardam_server.shard.journal.file_operations import Buffer, FileOperations

_MOST_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))
"""Buffers that one write takes; POSIX promises 16, Linux takes 1,024."""


class CutBackFailed(Exception):
    """A write failed, and what it had written could not be cut off again: the end of the file is not known to be whole."""


class JournalFile:
    """A file that grows by whole frames. Written by one thread at a time; `sync` and `close` may come from others.

    Args:
        path: the file.
        descriptor: it, open for writing; the object owns it.
        size_bytes: where the next frame goes.
        operations: the file system.

    Attributes:
        path: the file.
        size_bytes: end of the last whole frame.
    """

    def __init__(self, path: Path, descriptor: int, size_bytes: int, operations: FileOperations) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        self._operations = operations
        self._in_use = threading.Lock()
        self._closed = False

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Appends buffers, all or none.

        Raises:
            OSError: the write failed; the file is as it was.
            CutBackFailed: the write failed, and part of it may still be there.
        """
        try:
            self.size_bytes += self._write_all(list(buffers), self.size_bytes)
        except OSError:
            self.cut(self.size_bytes)
            raise

    def _write_all(self, buffers: list[Buffer], start: int) -> int:
        offset, first = start, 0
        while first < len(buffers):
            written = self._operations.write(self._descriptor, buffers[first : first + _MOST_BUFFERS], offset)
            if written == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            offset += written
            while first < len(buffers) and written >= len(buffers[first]):
                written -= len(buffers[first])
                first += 1
            if written:
                buffers[first] = memoryview(buffers[first])[written:]
        return offset - start

    def cut(self, size_bytes: int) -> None:
        """Cuts off what lies beyond a size.

        Raises:
            CutBackFailed: it is still there.
        """
        try:
            self._operations.truncate(self._descriptor, size_bytes)
        except OSError as error:
            raise CutBackFailed(f"{self.path} could not be cut back to {size_bytes} bytes: {error}") from error
        self.size_bytes = size_bytes

    def sync(self) -> None:
        """Waits until what was written is on the disk; of a closed file there is nothing to wait for.

        Raises:
            OSError: it may not be; asking again would not tell, because the system may have dropped the pages.
        """
        with self._in_use:
            if not self._closed:
                self._operations.sync(self._descriptor)

    def close(self) -> None:
        """Closes the file."""
        with self._in_use:
            if not self._closed:
                self._closed = True
                self._operations.close(self._descriptor)
