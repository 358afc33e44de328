"""Whole pulls and pushes: rows by id, whatever index names their slots."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import Factors
from shardam_kernels.gradients import Merged
from shardam_kernels.initializers import InitialRows
from shardam_kernels.reference.adam import adam_update
from shardam_kernels.reference.initial import gather_weights
from shardam_kernels.reference.merge import merge_gradients
from shardam_kernels.reference.records import Records
from shardam_kernels.row_index import RowIndex
from shardam_kernels.row_steps import Rounding, RowSteps

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass
class StepRows:
    """The rows of one step.

    Attributes:
        merged: each id once, with the sum of its gradients.
        slots: int64 [U], after find: -1 where a row has none.
    """

    merged: Merged
    slots: Int64s = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_absent(self) -> int:
        """Rows that have no slot, after find."""
        return int(np.count_nonzero(self.slots < 0))

    def find(self, index: RowIndex) -> int:
        """Looks the rows up; returns how many are absent."""
        self.slots = np.empty(len(self.merged.row_ids), np.int64)
        return len(self.slots) - index.lookup(self.merged.row_ids, self.slots)

    def insert(self, index: RowIndex) -> Int64s:
        """Gives slots to the absent rows; returns their positions."""
        absent = np.flatnonzero(self.slots < 0)
        slots = np.empty(len(absent), np.int64)
        index.insert(self.merged.row_ids[absent], slots, np.empty(len(absent), np.uint8))
        self.slots[absent] = slots
        return absent


def group_rows(row_ids: Int64s, gradients: npt.NDArray[np.float32], factors: Factors) -> StepRows:
    """Groups the gradients of a step, float32 [N, dim], by row."""
    return StepRows(merge_gradients(row_ids, gradients, factors))


def update_rows(
    records: Records,
    rows: StepRows,
    factors: Factors,
    touches: npt.NDArray[np.uint64] | None,
    change_number: int,
    table_step: int,
    row_steps: RowSteps | None = None,
    table_seed: int = 0,
) -> int:
    """Applies one step to its rows and notes change_number and table_step in touches, uint64 [num_slots, 2], if given.

    Returns:
        How many weights were saturated.
    """
    num_rows = len(rows.slots)
    if row_steps is None:
        rounding = Rounding(table_seed, rows.merged.row_ids, np.full(num_rows, table_step, np.int64))
        narrow = records.layout.dtype != "float32"
        row_steps = RowSteps(factors.step_factors(num_rows), rounding if narrow else None)
    if touches is not None:
        touches[rows.slots] = change_number, table_step
    return adam_update(records, rows.slots, rows.merged.gradients, factors, row_steps)


def gather_rows(records: Records, index: RowIndex, row_ids: Int64s, initial: InitialRows, out: npt.NDArray[np.float32]) -> None:
    """Looks rows up and writes their weights to out, float32 [N, dim]; the initial weight where a row does not exist."""
    slots = np.empty(len(row_ids), np.int64)
    index.lookup(row_ids, slots)
    gather_weights(records, slots, row_ids, initial, out)
