"""Sums of duplicates (CONTRACT.md, Arithmetic and Refusal)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import Factors
from shardam_kernels.gradients import GRADIENT_LIMIT, Merged, Runs


def merge_gradients(row_ids: npt.NDArray[np.int64], gradients: npt.NDArray[np.float32], factors: Factors) -> Merged:
    """Sums the gradients of each distinct id, left to right in float32, then unscales, then divides.

    Args:
        row_ids: int64 [N].
        gradients: float32 [N, dim].
        factors: of which unscale and divisor are used.
    """
    distinct, first_of_sorted, sorted_group_of = np.unique(row_ids, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first_of_sorted)
    group_number = np.empty(len(distinct), np.int64)
    group_number[by_appearance] = np.arange(len(distinct))
    first = first_of_sorted[by_appearance]
    group_of = group_number[sorted_group_of]

    with np.errstate(over="ignore", invalid="ignore"):
        sums = gradients[first]  # starts from the first gradient, not from zero: -0.0 stays -0.0
        is_later = np.ones(len(row_ids), bool)
        is_later[first] = False
        np.add.at(sums, group_of[is_later], gradients[is_later])  # unbuffered: one addition after the other, in order
        unscaled = sums * np.float32(factors.unscale)
        bad = ~(np.abs(unscaled) < np.float32(GRADIENT_LIMIT)).all(axis=1)
        return Merged(distinct[by_appearance], unscaled / np.float32(factors.divisor), np.flatnonzero(bad))


def group_gradients(row_ids: npt.NDArray[np.int64], gradients: npt.NDArray[np.float32], factors: Factors) -> Runs:
    """Groups the gradients of each id without summing them.

    Args:
        row_ids: int64 [N].
        gradients: float32 [N, dim].
        factors: of which unscale is used, to find the bad rows.
    """
    merged = merge_gradients(row_ids, gradients, factors)
    positions = [np.flatnonzero(row_ids == row_id) for row_id in merged.row_ids]
    lengths = np.array([len(run) for run in positions], np.int64)
    by_length = np.argsort(lengths, kind="stable")
    starts = np.concatenate([[0], np.cumsum(lengths[by_length])])
    order = np.concatenate([np.empty(0, np.int64), *(positions[row] for row in by_length)])
    return Runs(
        merged.row_ids[by_length],
        starts.astype(np.int32),
        order.astype(np.int32),
        np.flatnonzero(np.isin(by_length, merged.bad_rows)),
    )
