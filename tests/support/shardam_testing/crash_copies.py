"""What kills would leave of a folder: a copy of it before each operation on its files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path


class Crashes:
    """Copies a folder before each operation on its files: what a kill at that point leaves."""

    def __init__(self, data_dir: Path, copies: Path) -> None:
        self._data_dir = data_dir
        self._copies = copies
        self.num_copies = 0
        self.operations: list[str] = []

    def take(self, operation: str, path: Path) -> None:
        self.operations.append(f"{operation} {path.name}")
        shutil.copytree(self._data_dir, self._copies / str(self.num_copies))
        self.num_copies += 1

    def __iter__(self) -> Iterator[tuple[str, Path]]:
        for number, operation in enumerate(self.operations):
            yield operation, self._copies / str(number)
