"""Hashes that stored state, routing and every kernel depend on bit for bit (CONTRACT.md, Hashes). Pure NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
"""G: 2**64 divided by the golden ratio, splitmix64's increment."""


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer, a bijection of 64 bits.

    Args:
        values: uint64, any shape.

    Source:
        Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", variant 13 constants.
    """
    mixed = values ^ (values >> np.uint64(30))
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed = mixed * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
