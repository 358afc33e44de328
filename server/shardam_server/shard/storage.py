"""The rows of one table: ids, slots and per-row counters on the host, records on a device.

Storage knows rows and arithmetic; limits and errors for users are the table's (table.py). It is used under its table's lock:
reads may run beside each other, changes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardam_kernels import initializers, native
from shardam_kernels.factors import AdamOptions, Factors, OptionError, row_step_factors
from shardam_kernels.layout import Layout, layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_proto.errors import BadOption, JournalDamaged, OutOfMemory
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform, XavierNormal, XavierUniform
from shardam_server.shard.records import Float32s, Gradients, Int64s, Records, StagedStep

Counter = TypeVar("Counter", np.int64, np.uint64, np.uint32)

_FIRST_COUNTERS = 64
"""Slots that the per-row counters have room for at first; thousands of small tables must stay small."""


@dataclasses.dataclass(frozen=True)
class RowStepValues:
    """What rows that count their own steps go through in one step, by ascending id.

    Attributes:
        steps: uint32 [U], each row's own step after it.
        factors: float32 [U], each row's s.
    """

    steps: npt.NDArray[np.uint32]
    factors: Float32s


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step of a table.

    Attributes:
        options: its hyper-parameters.
        factors: their float32 factors at table_step.
        table_step: t after it.
        change_number: the shard's change that it is part of.
        recorded: of a step that is replayed from a journal: what its rows went through; None: computed.
    """

    options: AdamOptions
    factors: Factors
    table_step: int
    change_number: int
    recorded: RowStepValues | None = None


@dataclasses.dataclass(frozen=True)
class RowCounters:
    """Counters of rows; zeros where a row does not exist.

    Attributes:
        row_step: int64 [N], steps of the row itself; zeros in table step mode.
        touched_step: int64 [N], the table's step when a push last touched the row.
        change_number: uint64 [N], the shard's change that last touched it.
    """

    row_step: Int64s
    touched_step: Int64s
    change_number: npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class StagedUpdate:
    """A step that is ready to be applied.

    Attributes:
        slots: int64 [U].
        new_ids: rows that exist only for this step.
        row_steps: uint32 [U], each row's own step after it; None in table step mode.
        values: the same with each row's s, by ascending id, for a journal; None in table step mode.
        on_device: what the device needs.
    """

    slots: Int64s
    new_ids: Int64s
    row_steps: npt.NDArray[np.uint32] | None
    values: RowStepValues | None
    on_device: StagedStep


class RowStorage:
    """The rows of one table.

    Args:
        spec: the table's schema.
        initial: what rows are before their first push.
        records: an empty record store of some device.
    """

    def __init__(self, spec: TableSpec, initial: initializers.InitialRows, records: Records) -> None:
        self._initial = initial
        self._counts_row_steps = spec.step == "row"
        self._rounds = spec.dtype != "float32"
        self._index: native.RowIndex = (
            native.HashIndex() if spec.num_embeddings is None else native.ArrayIndex(spec.num_embeddings)
        )
        self._records = records
        self._change_numbers = np.zeros(0, np.uint64)
        self._touched_steps = np.zeros(0, np.int64)
        self._row_steps = np.zeros(0, np.uint32)
        self._saturated_before = 0

    @property
    def num_rows(self) -> int:
        """Rows that exist."""
        return len(self._index)

    @property
    def record_bytes(self) -> int:
        """Bytes of the records of existing rows."""
        return len(self._index) * self._records.layout.stride_bytes

    @property
    def saturated_values(self) -> int:
        """Values that lay beyond the weights' dtype so far and were saturated."""
        return self._saturated_before + self._records.saturated_values

    @property
    def index_bytes(self) -> int:
        """Bytes of index and per-row counters."""
        counters = self._change_numbers.nbytes + self._touched_steps.nbytes + self._row_steps.nbytes
        return self._index.memory_bytes + counters

    # -- a step, in this order: prepare, count_new, reserve, stage; then apply cannot fail

    def prepare(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Gradients:
        """Groups and checks a step's gradients; needs no lock."""
        return self._records.prepare(row_ids, gradients, factors)

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
            self._records.reserve(needed)
            if self._change_numbers.size < needed:
                size = max(needed, 2 * self._change_numbers.size, _FIRST_COUNTERS)
                self._change_numbers = _grown(self._change_numbers, size)
                self._touched_steps = _grown(self._touched_steps, size)
                if self._counts_row_steps:
                    self._row_steps = _grown(self._row_steps, size)
        except MemoryError as error:
            raise self._out_of_memory(f"{num_new} more rows", error) from error

    def stage(self, gradients: Gradients, step: Step) -> StagedUpdate:
        """Creates rows that are new and brings the step to the device; apply or discard must follow.

        Raises:
            OutOfMemory: the device has no room; nothing has changed.
            JournalDamaged: the step is replayed, and a row's recorded step is not its next one; nothing has changed.
        """
        row_ids = gradients.row_ids
        slots, new_ids = self._insert(row_ids)
        try:
            row_steps = self._row_steps[slots] + np.uint32(1) if self._counts_row_steps else None
            values = None if row_steps is None else _values_by_id(row_ids, row_steps, step)
            on_device = self._records.stage(
                slots, gradients, step.factors, self._kernel_steps(row_ids, row_steps, values, step)
            )
        except MemoryError as error:
            self.delete(new_ids)
            raise self._out_of_memory(f"a step of {slots.size} rows", error) from error
        except BaseException:
            self.delete(new_ids)
            raise
        return StagedUpdate(slots, new_ids, row_steps, values, on_device)

    def discard(self, staged: StagedUpdate) -> None:
        """Takes back a staged step: its new rows are gone again."""
        self.delete(staged.new_ids)

    def apply(self, staged: StagedUpdate, step: Step) -> None:
        """Applies a staged step; cannot fail."""
        self._records.apply(staged.on_device)
        if staged.row_steps is not None:
            self._row_steps[staged.slots] = staged.row_steps
        self._change_numbers[staged.slots] = step.change_number
        self._touched_steps[staged.slots] = step.table_step

    def _kernel_steps(
        self, row_ids: Int64s, row_steps: npt.NDArray[np.uint32] | None, values: RowStepValues | None, step: Step
    ) -> RowSteps:
        """Returns what the kernel needs of each row's step."""
        if row_steps is not None and values is not None:
            steps = row_steps.astype(np.int64)
            factors = np.empty(row_ids.size, np.float32)
            factors[np.argsort(row_ids)] = values.factors
        else:
            steps = np.full(row_ids.size if self._rounds else 0, step.table_step, np.int64)
            factors = step.factors.step_factors(row_ids.size)
        return RowSteps(factors, Rounding(self._initial.table_seed, row_ids, steps) if self._rounds else None)

    def write(self, row_ids: Int64s, components: Mapping[str, Float32s | None], change_number: int) -> None:
        """Writes components of distinct rows, creating those that are new.

        None leaves a component as it is (of a new row: initial, or zero).

        Raises:
            OutOfMemory: the device has no room; nothing has changed.
        """
        slots, new_ids = self._insert(row_ids)
        try:
            self._records.write(slots, {name: values for name, values in components.items() if values is not None})
        except MemoryError as error:
            self.delete(new_ids)
            raise self._out_of_memory(f"writing {slots.size} rows", error) from error
        self._change_numbers[slots] = change_number

    def _insert(self, row_ids: Int64s) -> tuple[Int64s, Int64s]:
        """Returns each row's slot, and the ids that are new; these have their initial values."""
        slots = np.empty(row_ids.size, np.int64)
        is_new = np.empty(row_ids.size, np.uint8)
        if not self._index.insert(row_ids, slots, is_new):
            return slots, row_ids[:0]
        places = np.flatnonzero(is_new)
        new_slots, new_ids = slots[places], row_ids[places]
        try:
            self._records.initialize(new_slots, new_ids)
        except MemoryError as error:
            self.delete(new_ids)
            raise self._out_of_memory(f"{new_ids.size} new rows", error) from error
        except BaseException:
            self.delete(new_ids)
            raise
        self._touched_steps[new_slots] = 0
        self._change_numbers[new_slots] = 0
        if self._counts_row_steps:
            self._row_steps[new_slots] = 0
        return slots, new_ids

    def _out_of_memory(self, what: str, error: MemoryError) -> OutOfMemory:
        return OutOfMemory(
            f"no memory for {what}, records of {self._records.layout.stride_bytes} bytes ({error}); nothing was changed. Add "
            "shards, delete rows, send smaller batches, or limit rows with --max-rows"
        )

    def delete(self, row_ids: Int64s) -> int:
        """Deletes rows; returns how many existed. One that comes back starts anew."""
        return self._index.remove(row_ids, np.empty(row_ids.size, np.int64))

    # -- rows of a base

    def restore(self, row_ids: Int64s, components: Mapping[str, Float32s], counters: RowCounters) -> None:
        """Puts distinct rows and their counters back as they were read.

        Raises:
            OutOfMemory: the device has no room; the storage is of no use.
        """
        self.reserve(row_ids.size)
        slots = np.empty(row_ids.size, np.int64)
        self._index.insert(row_ids, slots, np.empty(row_ids.size, np.uint8))
        try:
            self._records.fill(slots, components)
        except MemoryError as error:
            raise self._out_of_memory(f"{row_ids.size} rows", error) from error
        self._change_numbers[slots] = counters.change_number
        self._touched_steps[slots] = counters.touched_step
        if self._counts_row_steps:
            self._row_steps[slots] = counters.row_step

    def finish_restore(self, saturated_values: int) -> None:
        """Puts the count of saturated values back, after the last row; putting rows back saturates none."""
        if isinstance(self._index, native.HashIndex):
            self._index.spread()
        self._saturated_before = saturated_values - self._records.saturated_values

    # -- reads

    def lookup(self, row_ids: Int64s) -> Int64s:
        """Returns each row's slot, -1 if it does not exist."""
        slots = np.empty(row_ids.size, np.int64)
        self._index.lookup(row_ids, slots)
        return slots

    def counters(self, slots: Int64s) -> RowCounters:
        """Returns counters by slot; zeros where a slot is -1."""
        row_steps = _picked(self._row_steps, slots) if self._counts_row_steps else np.zeros(slots.size, np.uint32)
        return RowCounters(
            row_steps.astype(np.int64),
            _picked(self._touched_steps, slots),
            _picked(self._change_numbers, slots),
        )

    def gather(self, slots: Int64s, row_ids: Int64s) -> Float32s:
        """Returns weights by slot, float32 [N, dim]; the initial weight of the id where a slot is -1."""
        return self._records.gather(slots, row_ids)

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component by slot, float32 [N, dim]; zeros where a slot is -1."""
        return self._records.read(component, slots)

    def scan(self, from_key: int, max_rows: int) -> tuple[Int64s, int | None]:
        """Returns ids of existing rows in index order, and the key to go on from, or None."""
        row_ids, _, next_key = self._index.scan(from_key, max_rows)
        return row_ids, next_key


def _values_by_id(row_ids: Int64s, row_steps: npt.NDArray[np.uint32], step: Step) -> RowStepValues:
    """Returns distinct rows' steps and factors by ascending id: computed, or the recorded ones of a replay.

    Raises:
        JournalDamaged: the recorded steps are not these.
    """
    sorted_steps = row_steps[np.argsort(row_ids)]
    if step.recorded is None:
        return RowStepValues(sorted_steps, row_step_factors(step.options, sorted_steps.astype(np.int64)))
    if not np.array_equal(step.recorded.steps, sorted_steps):
        raise JournalDamaged(f"a replayed push takes {row_ids.size} rows to steps that are not their next ones")
    return step.recorded


MakeRecords = Callable[[Layout, initializers.InitialRows], Records]
"""Makes an empty record store on the shard's device."""


def make_storage(spec: TableSpec, table_seed: int, make_records: MakeRecords) -> RowStorage:
    """Makes a table's empty storage.

    Raises:
        BadOption: the initializer does not fit float32.
    """
    initial = initializers.InitialRows(fold_initializer(spec), table_seed, spec.padding_idx)
    return RowStorage(spec, initial, make_records(layout(spec.dim, spec.dtype), initial))


def fold_initializer(spec: TableSpec) -> initializers.FoldedInit:
    """Returns a table's initializer as kernels take it.

    Raises:
        BadOption: it does not fit float32.
    """
    try:
        return _fold(spec)
    except OptionError as error:
        raise BadOption(f"table {spec.name!r}: {error}", metadata={"table": spec.name}) from error


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


def _picked(array: npt.NDArray[Counter], slots: Int64s) -> npt.NDArray[Counter]:
    """Returns array[slot] per slot, zero where it is -1."""
    picked = np.zeros(slots.size, array.dtype)
    found = slots >= 0
    picked[found] = array[slots[found]]
    return picked
