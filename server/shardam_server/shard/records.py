"""The records of one table on one device: what a device must do, and the CPU's way."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_kernels.factors import Factors
from shardam_kernels.gradients import Merged
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import Layout
from shardam_kernels.row_steps import RowSteps

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class Gradients(Protocol):
    """One step's gradients of a table, checked and grouped by row, in the form that their device takes."""

    @property
    def row_ids(self) -> Int64s:
        """int64 [U], distinct."""
        ...

    @property
    def bad_rows(self) -> Int64s:
        """Positions in row_ids whose merged, unscaled gradient must be refused; the step is applied only if there is none."""
        ...


class Records(Protocol):
    """Records by slot, on one device. Used under the table's lock: reads beside each other, changes alone.

    Arrays that go in and out are on the host, and float32 whatever the dtype of the weights.
    """

    @property
    def layout(self) -> Layout:
        """Where a record's components lie."""
        ...

    def prepare(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Gradients:
        """Groups and checks a step's gradients; needs no lock and changes nothing."""
        ...

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1.

        Raises:
            MemoryError: the device has none; nothing has changed.
        """
        ...

    def initialize(self, slots: Int64s, row_ids: Int64s) -> int:
        """Writes new rows: initial weight, zero moments. Returns the number of saturated weights."""
        ...

    def update(self, slots: Int64s, gradients: Gradients, factors: Factors, steps: RowSteps) -> int:
        """Applies one step to the rows of `gradients`, whose slots are given; returns the number of saturated weights."""
        ...

    def gather(self, slots: Int64s, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim]; the initial weight where a slot is -1."""
        ...

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component, float32 [N, dim]; zeros where a slot is -1."""
        ...

    def write(self, component: str, slots: Int64s, values: Float32s) -> int:
        """Writes one component of distinct slots; returns the number of saturated values."""
        ...


class CpuRecords:
    """Records in native memory, worked on by the native kernels.

    Args:
        layout: where a record's components lie.
        initial: what rows are before their first push.
        num_threads: threads of one kernel call.
    """

    def __init__(self, layout: Layout, initial: InitialRows, num_threads: int) -> None:
        self._initial = initial
        self._num_threads = num_threads
        self._arena = native.Arena(layout.stride_bytes)
        self._records = native.Records(self._arena, layout)

    @property
    def layout(self) -> Layout:
        """Where a record's components lie."""
        return self._records.layout

    def prepare(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Merged:
        """Sums duplicates and checks the sums."""
        return native.merge_gradients(row_ids, gradients, factors, self._num_threads)

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1.

        Raises:
            MemoryError: there is none; nothing has changed.
        """
        self._arena.reserve(num_slots)

    def initialize(self, slots: Int64s, row_ids: Int64s) -> int:
        """Writes new rows: initial weight, zero moments. Returns the number of saturated weights."""
        return native.initialize(self._records, slots, row_ids, self._initial)

    def update(self, slots: Int64s, gradients: Gradients, factors: Factors, steps: RowSteps) -> int:
        """Applies one step; returns the number of saturated weights."""
        if not isinstance(gradients, Merged):
            raise TypeError(f"gradients were prepared for another device: {type(gradients).__name__}")
        return native.adam_update(self._records, slots, gradients.gradients, factors, steps, self._num_threads)

    def gather(self, slots: Int64s, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim]; the initial weight where a slot is -1."""
        out = np.empty((slots.size, self.layout.dim), np.float32)
        native.gather_weights(self._records, slots, row_ids, self._initial, out, self._num_threads)
        return out

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component, float32 [N, dim]; zeros where a slot is -1."""
        out = np.empty((slots.size, self.layout.dim), np.float32)
        native.read_component(self._records, component, slots, out)
        return out

    def write(self, component: str, slots: Int64s, values: Float32s) -> int:
        """Writes one component of distinct slots; returns the number of saturated values."""
        return native.write_component(self._records, component, slots, np.ascontiguousarray(values))
