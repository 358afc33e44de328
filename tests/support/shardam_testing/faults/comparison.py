"""Rows compared bit for bit: of a live shard, of the oracle, of another run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardam_testing.faults.oracle_table import TableRows

ALL_FIELDS = tuple(field.name for field in dataclasses.fields(TableRows))
"""Fields that are equal between a shard and its oracle."""

RUN_FIELDS = tuple(name for name in ALL_FIELDS if name != "change_number")
"""Fields that are equal between two runs: change numbers also count what is no push, such as clients that open."""


def differences(expected: TableRows, got: TableRows, fields: Sequence[str] = ALL_FIELDS) -> list[str]:
    """Returns one line for each field that differs in any bit; both sides are sorted by id."""
    if not np.array_equal(expected.row_ids, got.row_ids):
        missing = np.setdiff1d(expected.row_ids, got.row_ids)[:8].tolist()
        extra = np.setdiff1d(got.row_ids, expected.row_ids)[:8].tolist()
        return [f"row_ids: {expected.row_ids.size} expected, {got.row_ids.size} found; missing {missing}, extra {extra}"]
    found = []
    for name in fields:
        left, right = _bits(getattr(expected, name)), _bits(getattr(got, name))
        if not np.array_equal(left, right):
            differs = left != right
            rows = differs if differs.ndim == 1 else differs.any(axis=1)
            place = int(np.flatnonzero(rows)[0])
            found.append(
                f"{name}: {int(rows.sum())} of {rows.size} rows differ, first id {expected.row_ids[place]}: "
                f"expected {getattr(expected, name)[place]}, found {getattr(got, name)[place]}"
            )
    return found


def joined(parts: Sequence[TableRows]) -> TableRows:
    """Returns the rows of several shards as those of one table."""
    columns = ([getattr(part, name) for part in parts] for name in ALL_FIELDS)
    return TableRows(*(np.concatenate(column) for column in columns)).sorted()


def _bits(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return values.view(np.uint32) if values.dtype == np.float32 else values
