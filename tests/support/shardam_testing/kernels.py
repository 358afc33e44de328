"""One face for all implementations of the kernels, so that one suite holds them to the same bits.

Another implementation joins by a subclass of KernelTable and an entry in IMPLEMENTATIONS.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardam_kernels import native, reference
from shardam_kernels.factors import Factors
from shardam_kernels.gradients import Merged
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import Layout, layout
from shardam_kernels.row_steps import RowSteps

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

COMPONENTS = ("weight", "exp_avg", "exp_avg_sq")

DIMS = (1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 33, 64, 128, 129, 256, 513)
"""Below, at and off the widths of vectors, of padding and of cache lines."""


class KernelTable(Protocol):
    """Rows in slots 0 .. num_slots - 1 of one implementation."""

    layout: Layout
    num_slots: int

    def initialize(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> int: ...

    def gather(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> Float32s: ...

    def merge(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Merged: ...

    def update(self, slots: Int64s, gradients: Float32s, factors: Factors, steps: RowSteps) -> int: ...

    def read(self, name: str, slots: Int64s) -> Float32s: ...

    def write(self, name: str, slots: Int64s, values: Float32s) -> int: ...

    def record(self, slot: int) -> npt.NDArray[np.uint8]: ...


class ReferenceTable:
    """The NumPy reference."""

    def __init__(self, dim: int, num_slots: int, dtype: str = "float32") -> None:
        self.layout = layout(dim, dtype)
        self.num_slots = num_slots
        self.records = reference.Records(reference.Arena(self.layout.stride_bytes), self.layout)
        self.records.arena.reserve(num_slots)

    def initialize(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> int:
        return reference.initialize(self.records, slots, row_ids, initial)

    def gather(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> Float32s:
        out = np.empty((len(slots), self.layout.dim), np.float32)
        reference.gather_weights(self.records, slots, row_ids, initial, out)
        return out

    def merge(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Merged:
        return reference.merge_gradients(row_ids, gradients, factors)

    def update(self, slots: Int64s, gradients: Float32s, factors: Factors, steps: RowSteps) -> int:
        return reference.adam_update(self.records, slots, gradients, factors, steps)

    def read(self, name: str, slots: Int64s) -> Float32s:
        out = np.empty((len(slots), self.layout.dim), np.float32)
        reference.read_component(self.records, name, slots, out)
        return out

    def write(self, name: str, slots: Int64s, values: Float32s) -> int:
        return reference.write_component(self.records, name, slots, values)

    def record(self, slot: int) -> npt.NDArray[np.uint8]:
        return self.records.arena.view_record(slot)


class NativeTable:
    """The native kernels, with a number of threads."""

    def __init__(self, dim: int, num_slots: int, dtype: str = "float32", num_threads: int = 1) -> None:
        self.layout = layout(dim, dtype)
        self.num_slots = num_slots
        self.num_threads = num_threads
        self.records = native.Records(native.Arena(self.layout.stride_bytes), self.layout)
        self.records.arena.reserve(num_slots)

    def initialize(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> int:
        return native.initialize(self.records, slots, row_ids, initial)

    def gather(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> Float32s:
        out = np.empty((len(slots), self.layout.dim), np.float32)
        native.gather_weights(self.records, slots, row_ids, initial, out, self.num_threads)
        return out

    def merge(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Merged:
        return native.merge_gradients(row_ids, gradients, factors, self.num_threads)

    def update(self, slots: Int64s, gradients: Float32s, factors: Factors, steps: RowSteps) -> int:
        return native.adam_update(self.records, slots, gradients, factors, steps, self.num_threads)

    def read(self, name: str, slots: Int64s) -> Float32s:
        out = np.empty((len(slots), self.layout.dim), np.float32)
        native.read_component(self.records, name, slots, out)
        return out

    def write(self, name: str, slots: Int64s, values: Float32s) -> int:
        return native.write_component(self.records, name, slots, values)

    def record(self, slot: int) -> npt.NDArray[np.uint8]:
        return self.records.arena.view_record(slot)


class Make(Protocol):
    """Makes a table."""

    def __call__(self, dim: int, num_slots: int, dtype: str = "float32") -> KernelTable: ...


IMPLEMENTATIONS: dict[str, Make] = {
    "reference": ReferenceTable,
    "native-1": functools.partial(NativeTable, num_threads=1),
    "native-2": functools.partial(NativeTable, num_threads=2),
    "native-4": functools.partial(NativeTable, num_threads=4),
}
"""Makers of tables by name; native-N runs N threads."""


@dataclasses.dataclass
class State:
    """Weight and moments of slots 0 .. n - 1, float32 [n, dim] each."""

    weight: Float32s
    exp_avg: Float32s
    exp_avg_sq: Float32s

    def write_to(self, table: KernelTable) -> None:
        slots = np.arange(len(self.weight))
        for name in COMPONENTS:
            table.write(name, slots, getattr(self, name))

    @classmethod
    def of(cls, table: KernelTable) -> State:
        slots = np.arange(table.num_slots)
        return cls(*(table.read(name, slots) for name in COMPONENTS))


def random_state(rng: np.random.Generator, num_rows: int, dim: int) -> State:
    """Returns a state as training leaves it: nothing is zero."""
    shape = (num_rows, dim)
    moments = rng.standard_normal(shape) * 1e-2
    return State(*(values.astype(np.float32) for values in (rng.standard_normal(shape), moments, moments**2 + 1e-6)))


def table_bytes(table: KernelTable) -> npt.NDArray[np.uint8]:
    """Returns a copy of all records, padding included, uint8 [num_slots, stride]."""
    return np.stack([table.record(slot) for slot in range(table.num_slots)])


def push(table: KernelTable, slots: Int64s, gradients: Float32s, factors: Factors) -> Merged:
    """Merges and applies one step of a float32 table in table step mode; ids are slots."""
    merged = table.merge(slots, gradients, factors)
    assert merged.bad_rows.size == 0
    table.update(merged.row_ids, merged.gradients, factors, RowSteps(factors.step_factors(len(merged.row_ids))))
    return merged


def assert_same_bits(actual: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], message: str = "") -> None:
    """Asserts equality of every bit: -0.0 is not 0.0, and a NaN equals itself."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape, message
    differing = np.flatnonzero(actual.view(np.uint8) != expected.view(np.uint8))
    assert differing.size == 0, f"{message}: {differing.size} bytes differ, first at {differing[0]}; {actual} != {expected}"
