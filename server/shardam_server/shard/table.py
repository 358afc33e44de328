"""One table on one shard: what a change means for its rows, whatever device holds them.

A change is checked and merged before the table's lock is taken, room is reserved under it, and applying cannot fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, Factors, OptionError
from shardam_proto.errors import BadOption, IdOutOfRange, JournalDamaged, NonFiniteGradient, ReadOnly
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.locks import ReadWriteLock
from shardam_server.shard.records import Float32s, Gradients, Int64s
from shardam_server.shard.row_writes import RowWrite, check_steps, check_values, some_ids
from shardam_server.shard.storage import MakeRecords, RowStorage, make_storage
from shardam_server.shard.table_steps import RowStepValues, StagedUpdate, Step, cached_factors


class GradientSection(NamedTuple):
    """One table's gradients of one push.

    Attributes:
        table: the table.
        row_ids: int64 [N], duplicates allowed.
        gradients: float32 [N, dim].
        options: hyper-parameters.
        grad_scale: loss scale of the gradients.
        contributions: K of a mean over K contributions, whose sums the gradients are; else 1.
        recorded: of a push that is replayed from a journal: the step it was; None: computed.
    """

    table: Table
    row_ids: Int64s
    gradients: Float32s
    options: AdamOptions
    grad_scale: float
    contributions: int = 1
    recorded: RecordedStep | None = None


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """A step as a journal has it, so that a replay computes no power.

    Attributes:
        table_step: the table's step after it.
        factors: the factors used.
        row_values: what rows with steps of their own went through; None in table step mode.
    """

    table_step: int
    factors: Factors
    row_values: RowStepValues | None


class PreparedUpdate(NamedTuple):
    """A checked section: gradients by row, and the factors of the step it will be.

    Attributes:
        gradients: of distinct rows, without the padding row, as the table's device takes them.
        factors: factors of the step after the table's present one.
        options: hyper-parameters.
        recorded: what rows with steps of their own went through, if it is replayed.
    """

    gradients: Gradients
    factors: Factors
    options: AdamOptions
    recorded: RowStepValues | None = None


class StagedTableStep(NamedTuple):
    """A step of this table that is ready to be applied."""

    step: Step
    update: StagedUpdate


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """Rows as columns, all of one moment.

    Attributes:
        row_ids: int64 [N].
        found: bool [N]; a row that does not exist has its initial weight and zeros.
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim], or None if not asked for.
        exp_avg_sq: float32 [N, dim], or None if not asked for.
        step: int64 [N], the step in bias correction; zero where the row does not exist.
        last_touched_step: int64 [N].
        change_number: uint64 [N].
    """

    row_ids: Int64s
    found: npt.NDArray[np.bool_]
    weight: Float32s
    exp_avg: Float32s | None
    exp_avg_sq: Float32s | None
    step: Int64s
    last_touched_step: Int64s
    change_number: npt.NDArray[np.uint64]


class Table:
    """A table's schema, step and rows.

    Args:
        spec: the schema.
        table_id: random 63 bits.
        table_seed: seed of the initial weights.
        storage: holds the rows.
        step: t, how often the optimizer has stepped.
        read_only: steps and changes of rows are refused.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        table_id: int,
        table_seed: int,
        storage: RowStorage,
        step: int = 0,
        read_only: bool = False,
    ) -> None:
        self.spec = spec
        self.table_id = table_id
        self.table_seed = table_seed
        self.storage = storage
        self.step = step
        self.read_only = read_only
        self.lock = ReadWriteLock()
        self.last_options: AdamOptions | None = None
        self.nonfinite_pushes = 0
        self.last_delete = 0  # change number of the last delete that this process knows of

    @property
    def num_rows(self) -> int:
        """Rows that exist."""
        return self.storage.num_rows

    def schema_info(self, *, with_step: bool = False) -> common_pb2.TableInfo:
        """Describes the table as Redis keeps it: schema, id and seed; as a journal does: with its step."""
        step = self.step if with_step else 0
        return common_pb2.TableInfo(
            spec=self.spec.to_proto(),
            table_id=self.table_id,
            table_seed=self.table_seed,
            table_step=step,
            read_only=self.read_only,
        )

    # -- checks; they raise and change nothing

    def check_writable(self) -> None:
        """Refuses changes of a table that is there to be read.

        Raises:
            ReadOnly: it is.
        """
        if self.read_only:
            raise ReadOnly(
                f"table {self.spec.name!r} was restored for reading alone; restore it without --read-only to train",
                metadata={"table": self.spec.name},
            )

    def check_ids(self, row_ids: Int64s) -> None:
        """Refuses ids outside a bounded table.

        Raises:
            IdOutOfRange: at least one id is negative or too large.
        """
        bound = self.spec.num_embeddings
        if bound is None or native.all_below(row_ids, bound):
            return
        outside = row_ids[(row_ids < 0) | (row_ids >= bound)]
        raise IdOutOfRange(
            f"table {self.spec.name!r} has num_embeddings={bound}, so ids are 0 to {bound - 1}; got {some_ids(outside)}",
            metadata={"table": self.spec.name, "row_ids": some_ids(outside), "num_embeddings": str(bound)},
        )

    def check_write(self, write: RowWrite) -> None:
        """Refuses rows that may not be written.

        Raises:
            ReadOnly: the table takes no changes.
            IdOutOfRange: as check_ids.
            ShardamError: as check_values and check_steps.
        """
        self.check_writable()
        self.check_ids(write.row_ids)
        check_values(self.spec, write)
        check_steps(self.spec, self.step, write)

    def prepare(self, section: GradientSection) -> PreparedUpdate:
        """Checks a section and groups its gradients by row.

        Raises:
            ReadOnly: the table takes no changes.
            IdOutOfRange: as check_ids.
            BadOption: a hyper-parameter is out of range.
            NonFiniteGradient: a merged, unscaled value is NaN or at least 2**64 in magnitude.
            JournalDamaged: the section is replayed, and its step is not the table's next one.
        """
        row_ids, gradients = section.row_ids, section.gradients
        self.check_writable()
        self.check_ids(row_ids)
        step_factors = self._next_factors(section)
        row_ids, gradients = self.without_padding(row_ids, gradients)
        prepared = self.storage.prepare(row_ids, gradients, step_factors)
        if prepared.bad_rows.size:
            raise self.refuse_gradients(prepared.row_ids[prepared.bad_rows])
        return PreparedUpdate(
            prepared, step_factors, section.options, None if section.recorded is None else section.recorded.row_values
        )

    def without_padding(self, row_ids: Int64s, gradients: Float32s) -> tuple[Int64s, Float32s]:
        """Leaves out the padding row, which a push never writes."""
        if self.spec.padding_idx is None:
            return row_ids, gradients
        keep = row_ids != self.spec.padding_idx
        return (row_ids, gradients) if keep.all() else (row_ids[keep], gradients[keep])

    def refuse_gradients(self, bad_ids: Int64s) -> NonFiniteGradient:
        """Counts a push whose summed gradients cannot be applied, and returns the error."""
        self.nonfinite_pushes += 1
        return NonFiniteGradient(
            f"table {self.spec.name!r}: the summed gradient of ids {some_ids(bad_ids)} is NaN, infinite or at least 2**64; "
            "the push was refused and nothing changed",
            metadata={"table": self.spec.name, "row_ids": some_ids(bad_ids)},
        )

    def _next_factors(self, section: GradientSection) -> Factors:
        if section.recorded is not None:
            if section.recorded.table_step != self.step + 1:
                raise JournalDamaged(
                    f"table {self.spec.name!r} is at step {self.step}, a replayed push takes it to "
                    f"{section.recorded.table_step}"
                )
            return section.recorded.factors
        try:
            return cached_factors(section.options, self.step + 1, section.grad_scale, section.contributions)
        except OptionError as error:
            raise BadOption(f"table {self.spec.name!r}: {error}", metadata={"table": self.spec.name}) from error

    # -- changes; the caller holds the lock for writing and runs on the sequencer's thread

    def count_new(self, update: PreparedUpdate) -> int:
        """Finds the rows of a step; returns how many do not exist yet. `stage` must follow under the same lock."""
        return self.storage.count_new(update.gradients)

    def absent(self, row_ids: Int64s) -> Int64s:
        """Returns those of these ids that have no row yet."""
        return row_ids[self.storage.lookup(row_ids) < 0]

    def reserve(self, num_new: int) -> None:
        """Makes room, so that applying cannot fail.

        Raises:
            OutOfMemory: the device has no room.
        """
        self.storage.reserve(num_new)

    def stage(self, update: PreparedUpdate, change_number: int) -> StagedTableStep:
        """Creates new rows and brings the step to the device; apply or discard must follow.

        Raises:
            OutOfMemory: the device has no room; nothing has changed.
        """
        step = Step(
            update.options,
            update.factors,
            table_step=self.step + 1,
            change_number=change_number,
            recorded=update.recorded,
        )
        return StagedTableStep(step, self.storage.stage(update.gradients, step))

    def discard(self, staged: StagedTableStep) -> None:
        """Takes a staged step back."""
        self.storage.discard(staged.update)

    def apply(self, staged: StagedTableStep) -> None:
        """Applies a staged step; cannot fail."""
        self.storage.apply(staged.update, staged.step)
        self.step = staged.step.table_step
        self.last_options = staged.step.options

    def assign(self, write: RowWrite, change_number: int) -> int:
        """Writes rows and returns how many.

        Raises:
            OutOfMemory: the device has no room; nothing has changed.
        """
        if write.if_absent:
            write = write.only(self.storage.lookup(write.row_ids) < 0)
        components = {"weight": write.weight, "exp_avg": write.exp_avg, "exp_avg_sq": write.exp_avg_sq}
        self.storage.write(write.row_ids, components, change_number, write.row_steps)
        if write.table_step is not None:
            self.step = write.table_step
        return write.row_ids.size

    def delete(self, row_ids: Int64s) -> int:
        """Deletes rows and returns how many existed. A deleted row that comes back starts anew."""
        return self.storage.delete(row_ids)

    def clear_moments(self, row_ids: Int64s, change_number: int) -> int:
        """Sets the moments of rows that exist to zero and returns how many; weights and steps stay."""
        existing = np.unique(row_ids[self.storage.lookup(row_ids) >= 0])
        zeros = np.zeros((existing.size, self.spec.dim), np.float32)
        self.storage.write(existing, {"exp_avg": zeros, "exp_avg_sq": zeros}, change_number)
        return existing.size

    # -- reads; the caller holds the lock for reading

    def gather_into(self, row_ids: Int64s, out: Float32s) -> None:
        """Writes weights where they will travel from; a row that does not exist has its initial weight and is not created.

        Args:
            row_ids: int64 [N]; checked on the way.
            out: float32 [N, dim], contiguous, at any place that a float32 may have.

        Raises:
            IdOutOfRange: as check_ids; out holds anything.
        """
        try:
            self.storage.gather_into(row_ids, out)
        except IndexError:
            self.check_ids(row_ids)  # names the ids
            raise

    def gather(self, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim], as gather_into writes them."""
        out = np.empty((row_ids.size, self.spec.dim), np.float32)
        self.gather_into(row_ids, out)
        return out

    def read(self, row_ids: Int64s, *, include_optimizer: bool) -> RowBatch:
        """Returns rows in the order asked for."""
        slots = self.storage.lookup(row_ids)
        found = slots >= 0
        counters = self.storage.counters(slots)
        steps = counters.row_step if self.spec.step == "row" else np.where(found, np.int64(self.step), np.int64(0))
        return RowBatch(
            row_ids=row_ids,
            found=found,
            weight=self.storage.gather(slots, row_ids),
            exp_avg=self.storage.read("exp_avg", slots) if include_optimizer else None,
            exp_avg_sq=self.storage.read("exp_avg_sq", slots) if include_optimizer else None,
            step=steps,
            last_touched_step=counters.touched_step,
            change_number=counters.change_number,
        )

    def scan(self, from_key: int, max_rows: int, *, include_optimizer: bool) -> tuple[RowBatch, int | None]:
        """Returns a page of existing rows in index order, and the key of the next page or None."""
        row_ids, next_key = self.storage.scan(from_key, max_rows)
        return self.read(row_ids, include_optimizer=include_optimizer), next_key


@contextlib.contextmanager
def read_locks(tables: Iterable[Table]) -> Iterator[None]:
    """Holds tables for reading, so that a read sees each between whole changes."""
    unique = {table.table_id: table for table in tables}
    with contextlib.ExitStack() as stack:
        for table_id in sorted(unique):
            stack.enter_context(unique[table_id].lock.read())
        yield


def table_from_info(info: common_pb2.TableInfo, make_records: MakeRecords) -> Table:
    """Makes an empty table of this shard from its description.

    Raises:
        BadOption: the schema is malformed.
    """
    spec = TableSpec.from_proto(info.spec)
    storage = make_storage(spec, info.table_seed, make_records)
    return Table(
        spec,
        table_id=info.table_id,
        table_seed=info.table_seed,
        storage=storage,
        step=info.table_step,
        read_only=info.read_only,
    )
