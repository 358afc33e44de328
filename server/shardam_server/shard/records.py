"""The records of one table on one device: what a device must do, and the CPU's way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_kernels.factors import Factors
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import Layout
from shardam_kernels.row_steps import RowSteps

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

AnyIndex = native.HashIndex | native.ArrayIndex

Touches = npt.NDArray[np.uint64]
"""By slot, [num_slots, 2]: the change that last touched a row, and the table's step when a push last did."""


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

    @property
    def slots(self) -> Int64s:
        """int64 [U], after find: -1 for a row that has none."""
        ...

    @property
    def num_absent(self) -> int:
        """Rows that have no slot, after find."""
        ...

    def find(self, index: AnyIndex) -> int:
        """Looks the rows up; returns how many are absent."""
        ...

    def insert(self, index: AnyIndex) -> Int64s:
        """Gives slots to the absent rows; returns their positions.

        Raises:
            MemoryError: there is no room and none was reserved; nothing has changed.
        """
        ...


class StagedStep(Protocol):
    """One step's gradients and slots, on the device: all that applying needs."""


class Records(Protocol):
    """Records by slot, on one device. Used under the table's lock: reads beside each other, changes alone.

    What needs room on the device is in reserve, stage and write, which raise MemoryError and then have changed nothing;
    apply cannot fail. A change may still be under way on the device when its call returns: see Device.finish.

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

    def initialize(self, slots: Int64s, row_ids: Int64s) -> None:
        """Writes new rows: initial weight, zero moments.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        ...

    def stage(self, gradients: Gradients, factors: Factors, table_step: int, row_steps: RowSteps | None) -> StagedStep:
        """Brings a step to the device.

        Args:
            gradients: of prepare, found and inserted.
            factors: of the step.
            table_step: t after it.
            row_steps: of rows that count their own steps; None: all take the table's.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        ...

    def apply(self, staged: StagedStep, touches: Touches, change_number: int) -> None:
        """Applies a staged step, and notes for each of its rows the change that it is part of and the table's step."""
        ...

    def gather_into(self, index: AnyIndex, row_ids: Int64s, out: Float32s) -> None:
        """Writes the weights of rows to out, float32 [N, dim]; of one that the index does not have, its initial weight.

        Raises:
            IndexError: an id lies outside the index; out holds anything.
            MemoryError: the device has no room for them; out holds anything.
        """
        ...

    def gather(self, slots: Int64s, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim]; the initial weight where a slot is -1."""
        ...

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component, float32 [N, dim]; zeros where a slot is -1."""
        ...

    def write(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        """Writes components, float32 [N, dim] each, of distinct slots.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        ...

    def fill(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        """Writes all components, float32 [N, dim] each, of distinct slots, whatever they held: rows that are put back.

        Raises:
            MemoryError: the device has no room; the slots hold anything.
        """
        ...

    @property
    def saturated_values(self) -> int:
        """Values that lay beyond the weights' dtype so far and were saturated."""
        ...


class Device(Protocol):
    """The device of a shard."""

    @property
    def name(self) -> str:
        """Name as --device takes it: "cpu", "cuda:N" or "interpret"."""
        ...

    @property
    def num_threads(self) -> int:
        """Threads of the host's part of a change."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory of the device that this process holds beside the host's; zero for the CPU."""
        ...

    def make_records(self, layout: Layout, initial: InitialRows) -> Records:
        """Makes an empty record store."""
        ...

    def finish(self) -> None:
        """Waits until what was put on the device is done; called once at the end of each change."""
        ...


class CpuDevice:
    """The CPU.

    Args:
        num_threads: threads of one kernel call.
    """

    name = "cpu"
    memory_bytes = 0

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def make_records(self, layout: Layout, initial: InitialRows) -> CpuRecords:
        """Makes an empty record store."""
        return CpuRecords(layout, initial, self.num_threads)

    def finish(self) -> None:
        """Nothing to wait for: the CPU's kernels are done when they return."""


class _CpuStep(NamedTuple):
    rows: native.StepRows
    factors: Factors
    table_step: int
    row_steps: RowSteps | None


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
        self._saturated = 0
        self._arena = native.Arena(layout.stride_bytes)
        self._records = native.Records(self._arena, layout)

    @property
    def layout(self) -> Layout:
        """Where a record's components lie."""
        return self._records.layout

    def prepare(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> native.StepRows:
        """Groups gradients by row, and checks their sums; they are summed as they are applied."""
        return native.group_rows(row_ids, gradients, factors, self._num_threads)

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1.

        Raises:
            MemoryError: there is none; nothing has changed.
        """
        self._arena.reserve(num_slots)

    def initialize(self, slots: Int64s, row_ids: Int64s) -> None:
        """Writes new rows: initial weight, zero moments."""
        self._saturated += native.initialize(self._records, slots, row_ids, self._initial)

    def stage(self, gradients: Gradients, factors: Factors, table_step: int, row_steps: RowSteps | None) -> StagedStep:
        """Keeps together what applying needs."""
        if not isinstance(gradients, native.StepRows):
            raise TypeError(f"gradients were prepared for another device: {type(gradients).__name__}")
        return _CpuStep(gradients, factors, table_step, row_steps)

    def apply(self, staged: StagedStep, touches: Touches, change_number: int) -> None:
        """Applies a staged step, and notes what it touched, in one call."""
        if not isinstance(staged, _CpuStep):
            raise TypeError(f"the step was staged on another device: {type(staged).__name__}")
        rows, factors, table_step, row_steps = staged
        self._saturated += native.update_rows(
            self._records,
            rows,
            factors,
            touches,
            change_number,
            table_step,
            row_steps,
            self._initial.table_seed,
            self._num_threads,
        )

    def gather_into(self, index: AnyIndex, row_ids: Int64s, out: Float32s) -> None:
        """Writes the weights of rows to out, float32 [N, dim]; of one that the index does not have, its initial weight."""
        native.gather_rows(self._records, index, row_ids, self._initial, out, self._num_threads)

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

    def write(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        """Writes components of distinct slots."""
        contiguous = {name: np.ascontiguousarray(values) for name, values in components.items()}  # before anything is written
        for name, values in contiguous.items():
            self._saturated += native.write_component(self._records, name, slots, values)

    def fill(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        """Writes all components of distinct slots; between them a slot holds zeros, used before or not."""
        self.write(slots, components)

    @property
    def saturated_values(self) -> int:
        """Values that lay beyond the weights' dtype so far and were saturated."""
        return self._saturated
