"""Where a table's rows live on a device: one interface for all devices, and the CPU's.

Storage knows rows, slots and arithmetic; steps, limits and errors for users are the table's (table.py). A storage is used
under its table's lock: reads may run beside each other, changes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shardam_kernels import initializers, native
from shardam_kernels.factors import Factors, OptionError
from shardam_kernels.gradients import Merged
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import RowSteps
from shardam_proto.errors import BadOption, OutOfMemory
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform, XavierNormal, XavierUniform

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Counter = TypeVar("Counter", np.int64, np.uint64)

_FIRST_MARKS = 64
"""Slots that the per-row counters have room for at first; thousands of small tables must stay small."""


class RowStorage(Protocol):
    """The rows of one table on one device."""

    @property
    def num_rows(self) -> int:
        """Rows that exist."""
        ...

    @property
    def record_bytes(self) -> int:
        """Bytes of the records of existing rows."""
        ...

    @property
    def index_bytes(self) -> int:
        """Bytes of index and per-row counters."""
        ...

    def merge(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Merged:
        """Sums duplicates; needs no lock."""
        ...

    def lookup(self, row_ids: Int64s) -> Int64s:
        """Returns each row's slot, -1 if it does not exist."""
        ...

    def count_new(self, row_ids: Int64s) -> int:
        """Returns how many of these distinct ids have no row."""
        ...

    def reserve(self, num_new: int) -> None:
        """Makes room for new rows.

        Raises:
            OutOfMemory: there is none; nothing has changed.
        """
        ...

    def update(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> int:
        """Applies one step to distinct rows, creating those that are new; returns the number of saturated weights."""
        ...

    def write(self, row_ids: Int64s, components: Mapping[str, Float32s | None]) -> None:
        """Writes components of distinct rows, creating those that are new; None leaves a component as it is (new: zero)."""
        ...

    def delete(self, row_ids: Int64s) -> int:
        """Deletes rows; returns how many existed."""
        ...

    def mark(self, row_ids: Int64s, *, change_number: int, touched_step: int | None) -> None:
        """Records the change (and, if given, the step) that last touched existing rows."""
        ...

    def marks(self, slots: Int64s) -> tuple[Int64s, npt.NDArray[np.uint64]]:
        """Returns last touched step and change number by slot; zeros where a slot is -1."""
        ...

    def gather(self, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim]; the initial weight where a row does not exist."""
        ...

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component by slot, float32 [N, dim]; zeros where a slot is -1."""
        ...

    def scan(self, from_key: int, max_rows: int) -> tuple[Int64s, int | None]:
        """Returns ids of existing rows in index order, and the key to go on from, or None."""
        ...


class CpuStorage:
    """Rows in native memory, worked on by the native kernels.

    Args:
        spec: the table's schema.
        initial: what rows are before their first push.
        num_threads: threads of one kernel call.
    """

    def __init__(self, spec: TableSpec, initial: initializers.InitialRows, num_threads: int) -> None:
        record_layout = layout(spec.dim, spec.dtype)
        self._dim = spec.dim
        self._initial = initial
        self._num_threads = num_threads
        self._index: native.RowIndex = (
            native.HashIndex() if spec.num_embeddings is None else native.ArrayIndex(spec.num_embeddings)
        )
        self._arena = native.Arena(record_layout.stride_bytes)
        self._records = native.Records(self._arena, record_layout)
        self._change_numbers = np.zeros(0, np.uint64)
        self._touched_steps = np.zeros(0, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows that exist."""
        return len(self._index)

    @property
    def record_bytes(self) -> int:
        """Bytes of the records of existing rows."""
        return len(self._index) * self._records.layout.stride_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of index and per-row counters."""
        return self._index.memory_bytes + self._change_numbers.nbytes + self._touched_steps.nbytes

    def merge(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Merged:
        """Sums duplicates; needs no lock."""
        return native.merge_gradients(row_ids, gradients, factors, self._num_threads)

    def lookup(self, row_ids: Int64s) -> Int64s:
        """Returns each row's slot, -1 if it does not exist."""
        slots = np.empty(row_ids.size, np.int64)
        self._index.lookup(row_ids, slots)
        return slots

    def count_new(self, row_ids: Int64s) -> int:
        """Returns how many of these distinct ids have no row."""
        return row_ids.size - self._index.lookup(row_ids, np.empty(row_ids.size, np.int64))

    def reserve(self, num_new: int) -> None:
        """Makes room for new rows.

        Raises:
            OutOfMemory: there is none; nothing has changed.
        """
        if num_new == 0:
            return
        needed = self._index.num_slots + num_new  # freed slots may make it fewer
        try:
            self._index.reserve(num_new)
            self._arena.reserve(needed)
            if self._change_numbers.size < needed:
                size = max(needed, 2 * self._change_numbers.size, _FIRST_MARKS)
                self._change_numbers = _grown(self._change_numbers, size)
                self._touched_steps = _grown(self._touched_steps, size)
        except MemoryError as error:
            raise OutOfMemory(
                f"no memory for {num_new} more rows of {self._records.layout.stride_bytes} bytes; add shards, "
                "delete rows, or limit them with --max-rows"
            ) from error

    def update(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> int:
        """Applies one step to distinct rows, creating those that are new; returns the number of saturated weights."""
        slots = self._insert(row_ids)
        return native.adam_update(
            self._records, slots, gradients, factors, RowSteps(factors.step_factors(row_ids.size)), self._num_threads
        )

    def write(self, row_ids: Int64s, components: Mapping[str, Float32s | None]) -> None:
        """Writes components of distinct rows, creating those that are new; None leaves a component as it is (new: zero)."""
        slots = self._insert(row_ids)
        for name, values in components.items():
            if values is not None:
                native.write_component(self._records, name, slots, np.ascontiguousarray(values))

    def _insert(self, row_ids: Int64s) -> Int64s:
        slots = np.empty(row_ids.size, np.int64)
        is_new = np.empty(row_ids.size, np.uint8)
        if self._index.insert(row_ids, slots, is_new):
            new = is_new.astype(np.bool_)
            native.initialize(self._records, slots[new], row_ids[new], self._initial)
            self._touched_steps[slots[new]] = 0
            self._change_numbers[slots[new]] = 0
        return slots

    def delete(self, row_ids: Int64s) -> int:
        """Deletes rows; returns how many existed."""
        return self._index.remove(row_ids, np.empty(row_ids.size, np.int64))

    def mark(self, row_ids: Int64s, *, change_number: int, touched_step: int | None) -> None:
        """Records the change (and, if given, the step) that last touched existing rows."""
        slots = self.lookup(row_ids)
        self._change_numbers[slots] = change_number
        if touched_step is not None:
            self._touched_steps[slots] = touched_step

    def marks(self, slots: Int64s) -> tuple[Int64s, npt.NDArray[np.uint64]]:
        """Returns last touched step and change number by slot; zeros where a slot is -1."""
        touched_steps, change_numbers = np.zeros(slots.size, np.int64), np.zeros(slots.size, np.uint64)
        found = slots >= 0
        touched_steps[found] = self._touched_steps[slots[found]]
        change_numbers[found] = self._change_numbers[slots[found]]
        return touched_steps, change_numbers

    def gather(self, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim]; the initial weight where a row does not exist."""
        out = np.empty((row_ids.size, self._dim), np.float32)
        native.gather_weights(self._records, self.lookup(row_ids), row_ids, self._initial, out, self._num_threads)
        return out

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component by slot, float32 [N, dim]; zeros where a slot is -1."""
        out = np.empty((slots.size, self._dim), np.float32)
        native.read_component(self._records, component, slots, out)
        return out

    def scan(self, from_key: int, max_rows: int) -> tuple[Int64s, int | None]:
        """Returns ids of existing rows in index order, and the key to go on from, or None."""
        row_ids, _, next_key = self._index.scan(from_key, max_rows)
        return row_ids, next_key


def make_storage(spec: TableSpec, table_seed: int, num_threads: int) -> CpuStorage:
    """Makes a table's empty storage.

    Raises:
        BadOption: the initializer does not fit float32.
    """
    try:
        folded = _fold(spec)
    except OptionError as error:
        raise BadOption(f"table {spec.name!r}: {error}", metadata={"table": spec.name}) from error
    return CpuStorage(spec, initializers.InitialRows(folded, table_seed, spec.padding_idx), num_threads)


def _fold(spec: TableSpec) -> initializers.FoldedInit:
    match spec.init:
        case Normal(mean, std):
            return initializers.fold_normal(mean, std)
        case Uniform(low, high):
            return initializers.fold_uniform(low, high)
        case Constant(value):
            return initializers.fold_constant(value)
        case XavierUniform():
            bound = initializers.xavier_uniform_bound(_bound(spec), spec.dim)
            return initializers.fold_uniform(-bound, bound)
        case XavierNormal():
            return initializers.fold_normal(0.0, initializers.xavier_normal_std(_bound(spec), spec.dim))


def _bound(spec: TableSpec) -> int:
    if spec.num_embeddings is None:
        raise BadOption(f"table {spec.name!r}: a xavier initializer needs num_embeddings")
    return spec.num_embeddings


def _grown(array: npt.NDArray[Counter], size: int) -> npt.NDArray[Counter]:
    grown = np.zeros(size, array.dtype)  # pages never written stay unmapped
    grown[: array.size] = array
    return grown
