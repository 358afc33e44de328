"""Folders in place of the user's state folder, where `shardam up` keeps rows unless told otherwise."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import uuid
from pathlib import Path


@functools.cache
def _root() -> Path:
    """Returns a folder that goes with this process."""
    root = Path(tempfile.mkdtemp(prefix="shardam-test-state-"))
    atexit.register(remove_state_homes)
    return root


def fresh_state_home() -> Path:
    """Returns a folder of which nobody knows; it is not made before something is kept in it."""
    return _root() / uuid.uuid4().hex


def remove_state_homes() -> None:
    """Removes what was kept."""
    if _root.cache_info().currsize:
        shutil.rmtree(_root(), ignore_errors=True)
        _root.cache_clear()
