"""Rows before their first push (CONTRACT.md)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardam_kernels.hashing import INITIAL_STEP, element_hashes, row_keys
from shardam_kernels.initializers import FoldedInit, InitialRows
from shardam_kernels.reference.records import Records, write_component
from shardam_kernels.reference.weights import round_to_nearest_even, widen

_SIGN_BIT = 31
_INTERVAL_BITS = 6


def initial_rows(folded: FoldedInit, table_seed: int, row_ids: npt.NDArray[np.int64], dim: int) -> npt.NDArray[np.float32]:
    """Returns the weights with which rows start, float32 [N, dim]; knows of no padding row.

    Args:
        folded: the table's initializer.
        table_seed: the table's seed.
        row_ids: int64 [N].
        dim: number of columns.
    """
    hashes = element_hashes(row_keys(table_seed, row_ids), INITIAL_STEP, dim)
    if folded.kind == "constant":
        return np.full(hashes.shape, folded.a[0])
    if folded.kind == "uniform":
        pair, x = np.zeros(hashes.shape, np.int64), (hashes.view(np.int32) >> 8).astype(np.float32)
    else:
        pair, x = _normal_place(hashes)
    weights: npt.NDArray[np.float32] = folded.a[pair] + folded.b[pair] * x
    return weights


def _normal_place(hashes: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Returns which pair (a, b) a hash selects, and how far into the pair's interval it lies, 0 <= frac < 1."""
    sign = (hashes >> np.uint32(_SIGN_BIT)).astype(np.int64)
    u = (hashes & np.uint32(2**_SIGN_BIT - 1)).astype(np.int64)
    leading = np.frexp(np.maximum(u, 1).astype(np.float64))[1] - 1  # exact: u has 31 bits, float64 holds 53
    right = np.maximum(leading - _INTERVAL_BITS, 0)
    left = np.maximum(_INTERVAL_BITS - leading, 0)
    next_bits = ((u >> right) << left) & (2**_INTERVAL_BITS - 1)
    interval = np.where(u == 0, 0, (leading + 1) * 2**_INTERVAL_BITS + next_bits)
    remaining = u & ((1 << right) - 1)
    frac = np.ldexp(remaining.astype(np.float32), -right)
    return sign * 2048 + interval, frac


def _starting_weights(row_ids: npt.NDArray[np.int64], initial: InitialRows, dim: int) -> npt.NDArray[np.float32]:
    weights = initial_rows(initial.folded, initial.table_seed, row_ids, dim)
    if initial.padding_idx is not None:
        weights[row_ids == initial.padding_idx] = 0
    return weights


def initialize(records: Records, slots: npt.NDArray[np.int64], row_ids: npt.NDArray[np.int64], initial: InitialRows) -> int:
    """Writes new rows: the initial weight to nearest even, zero moments, zero padding bytes.

    Returns:
        How many weights were saturated.
    """
    records.arena.records[slots] = 0
    return write_component(records, "weight", slots, _starting_weights(row_ids, initial, records.layout.dim))


def gather_weights(
    records: Records,
    slots: npt.NDArray[np.int64],
    row_ids: npt.NDArray[np.int64],
    initial: InitialRows,
    out: npt.NDArray[np.float32],
) -> None:
    """Writes the weights of rows to out, float32 [N, dim]; a row without a slot (-1) reads as it would start."""
    exists = slots >= 0
    out[exists] = records.read("weight", slots[exists])
    absent = _starting_weights(row_ids[~exists], initial, records.layout.dim)
    if records.layout.dtype != "float32":
        absent = widen(round_to_nearest_even(absent, records.layout.dtype)[0], records.layout.dtype)
    out[~exists] = absent
