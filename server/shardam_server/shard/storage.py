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
from shardam_kernels.factors import Factors
from shardam_kernels.hashing import mix64
from shardam_kernels.layout import Layout, layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_proto.errors import OutOfMemory
from shardam_proto.schema import TableSpec
from shardam_server.shard.records import Float32s, Gradients, Int64s, Records
from shardam_server.shard.row_watchers import RowWatchers
from shardam_server.shard.table_initializers import fold_initializer
from shardam_server.shard.table_steps import RowStepValues, StagedUpdate, Step, values_by_id

Counter = TypeVar("Counter", np.int64, np.uint64, np.uint32)

_FIRST_COUNTERS = 64
"""Slots that the per-row counters have room for at first; thousands of small tables must stay small."""


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
class RowCopies:
    """Rows that exist, whole.

    Attributes:
        row_ids: int64 [N].
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim].
        exp_avg_sq: float32 [N, dim].
        counters: of each.
    """

    row_ids: Int64s
    weight: Float32s
    exp_avg: Float32s
    exp_avg_sq: Float32s
    counters: RowCounters


class RowStorage:
    """The rows of one table.

    Args:
        spec: the table's schema.
        initial: what rows are before their first push.
        records: an empty record store of some device.

    Attributes:
        watchers: see rows before they are changed.
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
        self.watchers = RowWatchers()

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
        watching = self._watch(row_ids)
        slots, new_ids = self._insert(row_ids)
        try:
            row_steps = self._row_steps[slots] + np.uint32(1) if self._counts_row_steps else None
            values = None if row_steps is None else values_by_id(row_ids, row_steps, step)
            on_device = self._records.stage(
                slots, gradients, step.factors, self._kernel_steps(row_ids, row_steps, values, step)
            )
        except MemoryError as error:
            self._remove(new_ids)
            raise self._out_of_memory(f"a step of {slots.size} rows", error) from error
        except BaseException:
            self._remove(new_ids)
            raise
        return StagedUpdate(slots, new_ids, row_steps, values, on_device, watching)

    def discard(self, staged: StagedUpdate) -> None:
        """Takes back a staged step: its new rows are gone again."""
        self._remove(staged.new_ids)

    def apply(self, staged: StagedUpdate, step: Step) -> None:
        """Applies a staged step; cannot fail."""
        for note in staged.watching:
            note()
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

    def write(
        self,
        row_ids: Int64s,
        components: Mapping[str, Float32s | None],
        change_number: int,
        row_steps: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """Writes components and steps of distinct rows, creating those that are new.

        None leaves a component or the steps as they are (of a new row: initial, or zero).

        Raises:
            OutOfMemory: the device has no room; nothing has changed.
        """
        watching = self._watch(row_ids)
        slots, new_ids = self._insert(row_ids)
        try:
            self._records.write(slots, {name: values for name, values in components.items() if values is not None})
        except MemoryError as error:
            self._remove(new_ids)
            raise self._out_of_memory(f"writing {slots.size} rows", error) from error
        for note in watching:
            note()
        self._change_numbers[slots] = change_number
        if row_steps is not None:
            self._row_steps[slots] = row_steps

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
            self._remove(new_ids)
            raise self._out_of_memory(f"{new_ids.size} new rows", error) from error
        except BaseException:
            self._remove(new_ids)
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
        """Deletes rows; returns how many existed. One that comes back starts anew.

        Raises:
            OutOfMemory: a snapshot that needs them has no room for them; nothing has changed.
        """
        for note in self._watch(np.unique(row_ids) if self.watchers else row_ids):
            note()
        return self._remove(row_ids)

    def _remove(self, row_ids: Int64s) -> int:
        return self._index.remove(row_ids, np.empty(row_ids.size, np.int64))

    # -- copies of rows as of a moment

    def _watch(self, row_ids: Int64s) -> list[Callable[[], None]]:
        """Has distinct rows that are about to be changed seen as they are; returns what to call when they are changed."""
        if not self.watchers:
            return []
        slots = self.lookup(row_ids)
        exists = slots >= 0
        try:
            return self.watchers.before(row_ids[exists], slots[exists])
        except MemoryError as error:
            raise self._out_of_memory(f"{slots.size} rows that a base or checkpoint is yet to copy", error) from error

    def scan_keys(self, row_ids: Int64s) -> npt.NDArray[np.uint64]:
        """Returns where rows stand in the index's order, as `scan` counts."""
        keys = row_ids.view(np.uint64)
        return keys if isinstance(self._index, native.ArrayIndex) else mix64(keys)

    def change_numbers(self, slots: Int64s) -> npt.NDArray[np.uint64]:
        """Returns the change that last touched each row."""
        return self._change_numbers[slots]

    def copy_page(self, from_key: int, max_rows: int, change_number: int) -> tuple[RowCopies, int | None]:
        """Copies those of the next rows in index order that no change after a certain one has touched.

        Args:
            from_key: where to begin.
            max_rows: rows to look at.
            change_number: the last change that counts.

        Returns:
            The rows, and the key to go on from, or None.
        """
        row_ids, slots, next_key = self._index.scan(from_key, max_rows)
        unchanged = self._change_numbers[slots] <= np.uint64(change_number)
        return self.copy_rows(row_ids[unchanged], slots[unchanged]), next_key

    def copy_rows(self, row_ids: Int64s, slots: Int64s) -> RowCopies:
        """Copies rows that exist."""
        return RowCopies(
            row_ids,
            self.gather(slots, row_ids),
            self.read("exp_avg", slots),
            self.read("exp_avg_sq", slots),
            self.counters(slots),
        )

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

    def gather_into(self, row_ids: Int64s, out: Float32s) -> None:
        """Writes weights by id to out, float32 [N, dim]; the initial weight of a row that does not exist.

        Raises:
            IndexError: an id lies outside a bounded table; out holds anything.
        """
        self._records.gather_into(self._index, row_ids, out)

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


MakeRecords = Callable[[Layout, initializers.InitialRows], Records]
"""Makes an empty record store on the shard's device."""


def make_storage(spec: TableSpec, table_seed: int, make_records: MakeRecords) -> RowStorage:
    """Makes a table's empty storage.

    Raises:
        BadOption: the initializer does not fit float32.
    """
    initial = initializers.InitialRows(fold_initializer(spec), table_seed, spec.padding_idx)
    return RowStorage(spec, initial, make_records(layout(spec.dim, spec.dtype), initial))


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
