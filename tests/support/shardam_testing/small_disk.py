"""A disk that becomes full: a small tmpfs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mounts one on a new folder; skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    result = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode:
        pytest.skip("a tmpfs cannot be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=30, check=True)
