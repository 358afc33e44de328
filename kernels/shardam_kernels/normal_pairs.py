"""Makes normal_pairs.npy, the checked-in pairs (a, b) of Normal initial weights, from the exact quantile.

Usage: python normal_pairs.py [OUT]   (OUT: default normal_pairs.npy beside this file)

An initial weight is drawn from 32 bits: a sign and u, 31 bits. u says how far out on the half-normal curve the value lies:
|z| is the value exceeded with probability (u + 0.5) / 2**31, so u = 0 is the far tail. u's leading one selects an octave, its
next six bits one of 64 intervals, and within an interval |z| = a + b * frac is the straight line with the least largest error
at the values of u that exist.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

U_BITS = 31
INTERVAL_BITS = 6
INTERVALS_PER_OCTAVE = 2**INTERVAL_BITS
NUM_PAIRS = (U_BITS + 1) * INTERVALS_PER_OCTAVE
"""Octave 0 is u = 0 (its first interval only), octave p + 1 has its leading one at position p."""

_STANDARD = statistics.NormalDist()


def exact_quantile(u: float) -> float:
    """Returns the |z| that u stands for, in float64."""
    return -_STANDARD.inv_cdf((u + 0.5) / 2 ** (U_BITS + 1))


def fit_pairs() -> npt.NDArray[np.float32]:
    """Returns the pairs, float32 [2048, 2]; intervals that no u selects are zero."""
    pairs = np.zeros((NUM_PAIRS, 2), np.float32)
    pairs[0] = exact_quantile(0), 0
    for position in range(U_BITS):
        size = 2 ** max(position - INTERVAL_BITS, 0)
        step = 2 ** max(INTERVAL_BITS - position, 0)  # low octaves have fewer than 64 values of u
        for index in range(0, INTERVALS_PER_OCTAVE, step):
            first = 2**position + (index // step) * size
            pairs[(position + 1) * INTERVALS_PER_OCTAVE + index] = _fit_line(first, size)
    return pairs


def _fit_line(first: int, size: int) -> tuple[float, float]:
    """Returns (a, b) of the minimax line over u = first .. first + size - 1, where frac = (u - first) / size."""
    start = exact_quantile(first)
    if size == 1:
        return start, 0.0
    last = (size - 1) / size
    slope = (exact_quantile(first + size - 1) - start) / last
    # The curve is convex: its largest distance below the chord is where its own slope equals the chord's. From
    # |z|' = -sqrt(pi / 2) * exp(z**2 / 2) per unit of probability follows that z directly.
    probability_per_frac = size / 2**U_BITS
    tangent = math.sqrt(max(0.0, 2 * math.log(-slope / (probability_per_frac * math.sqrt(math.pi / 2)))))
    probability = 2 * _STANDARD.cdf(-tangent)
    frac = (probability * 2**U_BITS - 0.5 - first) / size
    return start + (tangent - (start + slope * frac)) / 2, slope


if __name__ == "__main__":
    np.save(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".npy"), fit_pairs())
