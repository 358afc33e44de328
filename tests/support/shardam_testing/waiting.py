"""Waiting for a fact with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 30.0) -> T:
    """Returns the first result of `look` that is neither None nor False.

    Raises:
        AssertionError: it did not come within timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = look()
        if result is not None and result is not False:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(POLL_S)
