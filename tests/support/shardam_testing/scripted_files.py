"""The journal's file system with a script: each operation is shown to it first, and it may let the operation fail."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from shardam_server.shard.journal.file_operations import Buffer, FileOperations


def show_nothing(operation: str, path: Path) -> None:
    return None


class ScriptedFiles(FileOperations):
    """Operations on real files, but for those that the script fails.

    Attributes:
        script: called before each operation with its name and path; raises OSError to let it fail.
        most_bytes: a write takes at most so many; 0: no limit.
        free: what free_bytes says; None: the truth.
        failed: operation -> how often it failed.
        calls: operation -> how often it was asked for.
    """

    def __init__(self) -> None:
        self.script: Callable[[str, Path], None] = show_nothing
        self.most_bytes = 0
        self.free: int | None = None
        self.failed: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._paths: dict[int, Path] = {}

    def fail(self, operation: str, number: int, *, part: str = "", times: int = 10**9) -> None:
        """Lets an operation on paths with a part of this name fail with an errno, so many times."""
        left = times

        def script(shown: str, path: Path) -> None:
            nonlocal left
            if shown == operation and part in path.name and left > 0:
                left -= 1
                raise OSError(number, errno.errorcode[number])

        self.script = script

    def heal(self) -> None:
        self.script = show_nothing

    def _show(self, operation: str, path: Path) -> None:
        self.calls[operation] += 1
        try:
            self.script(operation, path)
        except OSError:
            self.failed[operation] += 1
            raise

    def create(self, path: Path) -> int:
        self._show("create", path)
        descriptor = super().create(path)
        self._paths[descriptor] = path
        return descriptor

    def open(self, path: Path) -> int:
        self._show("open", path)
        descriptor = super().open(path)
        self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._show("write", self._paths[descriptor])
        if self.most_bytes:
            return super().write(descriptor, [memoryview(b"".join(buffers))[: self.most_bytes]], offset)
        return super().write(descriptor, buffers, offset)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        self._show("truncate", self._paths[descriptor])
        super().truncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        self._show("sync", self._paths[descriptor])
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._show("rename", old)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._show("remove", path)
        super().remove(path)

    def sync_folder(self, path: Path) -> None:
        self._show("sync_folder", path)
        super().sync_folder(path)

    def free_bytes(self, path: Path) -> int:
        self._show("free_bytes", path)
        return super().free_bytes(path) if self.free is None else self.free
