"""The rows of one table: ids, slots and per-row counters on the host, records on a device.

Storage knows rows and arithmetic; limits and errors for users are the table's (table.py). It is used under its table's lock:
reads may run beside each other, changes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardam_kernels import initializers, native
from shardam_kernels.factors import Factors
from shardam_kernels.hashing import mix64
from shardam_kernels.layout import Layout, layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_proto.errors import OutOfMemory
from shardam_proto.schema import TableSpec
from shardam_server.shard.records import AnyIndex, Float32s, Gradients, Int64s, Records
from shardam_server.shard.row_counters import RowCounters, SlotCounters
from shardam_server.shard.row_watchers import RowWatchers
from shardam_server.shard.table_initializers import fold_initializer
from shardam_server.shard.table_steps import RowStepValues, StagedUpdate, Step, values_by_id

_NO_IDS: Int64s = np.empty(0, np.int64)


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
        self._rounds = spec.dtype != "float32"
        self._index: AnyIndex = native.HashIndex() if spec.num_embeddings is None else native.ArrayIndex(spec.num_embeddings)
        self._records = records
        self._counts_row_steps = spec.step == "row"
        self._counters = SlotCounters(counts_row_steps=spec.step == "row")
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
        return self._index.memory_bytes + self._counters.memory_bytes

    # -- a step, in this order: prepare, count_new, reserve, stage; then apply cannot fail

    def prepare(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> Gradients:
        """Groups and checks a step's gradients; needs no lock."""
        return self._records.prepare(row_ids, gradients, factors)

    def count_new(self, gradients: Gradients) -> int:
        """Finds a step's rows; returns how many do not exist. What it finds holds as long as the lock."""
        return gradients.find(self._index)

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
            self._counters.reserve(needed)
        except MemoryError as error:
            raise self._out_of_memory(f"{num_new} more rows", error) from error

    def stage(self, gradients: Gradients, step: Step) -> StagedUpdate:
        """Creates rows that are new and brings the step to the device; apply or discard must follow.

        Raises:
            OutOfMemory: the device has no room; nothing has changed.
            JournalDamaged: the step is replayed, and a row's recorded step is not its next one; nothing has changed.
        """
        watching = self._watch(gradients.row_ids, gradients.slots) if self.watchers else ()
        new_ids = self._insert_absent(gradients) if gradients.num_absent else _NO_IDS
        try:
            row_steps = self._counters.next_row_steps(gradients.slots) if self._counts_row_steps else None
            values = of_rows = None
            if row_steps is not None:
                values = values_by_id(gradients.row_ids, row_steps, step)
                of_rows = self._steps_of_rows(gradients.row_ids, row_steps, values)
            on_device = self._records.stage(gradients, step.factors, step.table_step, of_rows)
        except MemoryError as error:
            self._remove(new_ids)
            raise self._out_of_memory(f"a step of {gradients.slots.size} rows", error) from error
        except BaseException:
            self._remove(new_ids)
            raise
        return StagedUpdate(gradients, new_ids, row_steps, values, on_device, watching)

    def discard(self, staged: StagedUpdate) -> None:
        """Takes back a staged step: its new rows are gone again."""
        if staged.new_ids.size:
            self._remove(staged.new_ids)

    def apply(self, staged: StagedUpdate, step: Step) -> None:
        """Applies a staged step; cannot fail."""
        for note in staged.watching:
            note()
        self._records.apply(staged.on_device, self._counters.touches, step.change_number)
        if staged.row_steps is not None:
            self._counters.set_row_steps(staged.slots, staged.row_steps)

    def _steps_of_rows(self, row_ids: Int64s, row_steps: npt.NDArray[np.uint32], values: RowStepValues) -> RowSteps:
        """Returns what the kernel needs of rows that count their own steps."""
        factors = np.empty(row_ids.size, np.float32)
        factors[np.argsort(row_ids)] = values.factors
        rounding = Rounding(self._initial.table_seed, row_ids, row_steps.astype(np.int64)) if self._rounds else None
        return RowSteps(factors, rounding)

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
        watching = self._watch(row_ids, self.lookup(row_ids)) if self.watchers else ()
        slots, new_ids = self._insert(row_ids)
        try:
            self._records.write(slots, {name: values for name, values in components.items() if values is not None})
        except MemoryError as error:
            self._remove(new_ids)
            raise self._out_of_memory(f"writing {slots.size} rows", error) from error
        for note in watching:
            note()
        self._counters.set_change_numbers(slots, change_number)
        if row_steps is not None:
            self._counters.set_row_steps(slots, row_steps)

    def _insert(self, row_ids: Int64s) -> tuple[Int64s, Int64s]:
        """Returns each row's slot, and the ids that are new; these have their initial values."""
        slots = np.empty(row_ids.size, np.int64)
        is_new = np.empty(row_ids.size, np.uint8)
        if not self._index.insert(row_ids, slots, is_new):
            return slots, row_ids[:0]
        places = np.flatnonzero(is_new)
        new_ids = row_ids[places]
        self._initialize(slots[places], new_ids)
        return slots, new_ids

    def _insert_absent(self, gradients: Gradients) -> Int64s:
        """Creates the rows of a step that do not exist; returns their ids."""
        places = gradients.insert(self._index)
        new_ids = gradients.row_ids[places]
        self._initialize(gradients.slots[places], new_ids)
        return new_ids

    def _initialize(self, slots: Int64s, new_ids: Int64s) -> None:
        """Gives rows that were just inserted their initial values, or takes them out again."""
        try:
            self._records.initialize(slots, new_ids)
        except MemoryError as error:
            self._remove(new_ids)
            raise self._out_of_memory(f"{new_ids.size} new rows", error) from error
        except BaseException:
            self._remove(new_ids)
            raise
        self._counters.clear(slots)

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
        if self.watchers:
            distinct = np.unique(row_ids)
            for note in self._watch(distinct, self.lookup(distinct)):
                note()
        return self._remove(row_ids)

    def _remove(self, row_ids: Int64s) -> int:
        return self._index.remove(row_ids, np.empty(row_ids.size, np.int64))

    # -- copies of rows as of a moment

    def _watch(self, row_ids: Int64s, slots: Int64s) -> Sequence[Callable[[], None]]:
        """Has distinct rows that are about to be changed seen as they are; returns what to call when they are changed."""
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
        return self._counters.change_numbers(slots)

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
        unchanged = self._counters.change_numbers(slots) <= np.uint64(change_number)
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
        self._counters.restore(slots, counters)

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
        return self._counters.read(slots)

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
