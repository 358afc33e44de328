"""The batches that benchmarks send: ids as recommenders draw them, a few frequent, most of them rare."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EXPONENT = 1.05
"""Of the Zipf distribution: of 16,384 ids out of 1M then 42 % are distinct."""

SEVERAL = 16
"""Batches that take turns, so that a call does not find its rows in the processor's caches because the last one read them."""

SCATTER = 0x9E3779B1
"""A prime, so larger than any table here that it divides none of them: times it, modulo the table, neighbours lie apart."""

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class ZipfIds:
    """Ids 0 to num_rows - 1, the frequent ones anywhere among them."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self._num_rows = num_rows
        self._rng = np.random.default_rng(seed)
        cumulative = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -EXPONENT)
        self._cumulative = cumulative / cumulative[-1]

    def draw(self, count: int) -> Int64s:
        """Returns int64 [count]."""
        ranks = np.minimum(np.searchsorted(self._cumulative, self._rng.random(count)), self._num_rows - 1)
        scattered: Int64s = ranks.astype(np.int64) * SCATTER % self._num_rows
        return scattered


class UniformIds:
    """Ids 0 to num_rows - 1, each as likely as any other."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rng = np.random.default_rng(num_rows)

    def draw(self, count: int) -> Int64s:
        """Returns int64 [count]."""
        return self._rng.integers(0, self._num_rows, count)


def zipf_batches(num_rows: int, count: int) -> Int64s:
    """Returns ids, int64 [SEVERAL, count]."""
    ids = ZipfIds(num_rows)
    return np.stack([ids.draw(count) for _ in range(SEVERAL)])


def distinct_batches(num_rows: int, count: int, num_batches: int, *, uniform: bool) -> list[Int64s]:
    """Returns batches of distinct ids: as many are drawn as it takes.

    Args:
        num_rows: ids are 0 to num_rows - 1; at least twice as many as count.
        count: ids of a batch.
        num_batches: how many.
        uniform: every id is as likely as any other. False: Zipf.
    """
    ids = UniformIds(num_rows) if uniform else ZipfIds(num_rows)
    drawn = 2 * count
    found: list[Int64s] = []
    while len(found) < num_batches:
        row_ids = ids.draw(drawn)
        _, first = np.unique(row_ids, return_index=True)
        if first.size < count:
            drawn *= 2
        else:
            found.append(row_ids[np.sort(first)[:count]])
    return found


def gradients(count: int, dim: int) -> Float32s:
    """Returns normal gradients, float32 [count, dim]."""
    return np.random.default_rng(1).standard_normal((count, dim), dtype=np.float32)
