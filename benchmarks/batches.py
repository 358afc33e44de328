"""The batches that benchmarks send: ids as recommenders draw them, a few frequent, most of them rare."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EXPONENT = 1.05
"""Of the Zipf distribution: of 16,384 ids out of 1M then 42 % are distinct."""

SEVERAL = 16
"""Batches that take turns, so that a call does not find its rows in the processor's caches because the last one read them."""

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def zipf_batches(num_rows: int, count: int, *, num_batches: int = SEVERAL, seed: int = 0) -> Int64s:
    """Returns ids 0 to num_rows - 1, int64 [num_batches, count], the frequent ones anywhere in the table."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -EXPONENT
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random((num_batches, count)))
    return rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]


def gradients(count: int, dim: int) -> Float32s:
    """Returns normal gradients, float32 [count, dim]."""
    return np.random.default_rng(1).standard_normal((count, dim), dtype=np.float32)
