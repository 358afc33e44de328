"""What Python and NumPy allocate while something runs: a copy of a payload shows as its size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def peak_of(action: Callable[[], T]) -> tuple[int, T]:
    """Runs an action; returns the most bytes that it held at once beyond what there was before, and its result.

    Memory of native code that is no Python object is not counted.
    """
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = action()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before, result
    finally:
        tracemalloc.stop()
