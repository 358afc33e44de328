"""One table as the oracle has it: rows in NumPy, changed by the reference kernels alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels import initializers, reference
from shardam_kernels.factors import AdamOptions, Factors, factors, row_step_factors
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform, XavierNormal, XavierUniform
from shardam_proto.v1 import common_pb2, journal_pb2

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False)
class TableRows:
    """All rows of a table on one shard or on all, by ascending id.

    Attributes:
        row_ids: int64 [N].
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim].
        exp_avg_sq: float32 [N, dim].
        step: int64 [N], the step that enters bias correction.
        last_touched_step: int64 [N].
        change_number: int64 [N].
    """

    row_ids: Int64s
    weight: Float32s
    exp_avg: Float32s
    exp_avg_sq: Float32s
    step: Int64s
    last_touched_step: Int64s
    change_number: Int64s

    def sorted(self) -> TableRows:
        """Returns the rows by ascending id."""
        order = np.argsort(self.row_ids)
        return TableRows(*(getattr(self, field.name)[order] for field in dataclasses.fields(self)))


@dataclasses.dataclass
class _Counters:
    slot: int
    row_step: int = 0
    touched_step: int = 0
    change_number: int = 0


class OracleTable:
    """One table on one shard.

    Args:
        info: schema, id, seed and step.
    """

    def __init__(self, info: common_pb2.TableInfo) -> None:
        self.spec = TableSpec.from_proto(info.spec)
        self.table_id = info.table_id
        self.step = info.table_step
        self._seed = info.table_seed
        self._initial = initializers.InitialRows(_fold(self.spec), info.table_seed, self.spec.padding_idx)
        record_layout = layout(self.spec.dim, self.spec.dtype)
        self._records = reference.Records(reference.Arena(record_layout.stride_bytes), record_layout)
        self._rows: dict[int, _Counters] = {}

    # -- changes

    def push(
        self, push: journal_pb2.TablePush, row_ids: Int64s, gradients: Float32s, values: RecordedRows, change_number: int
    ) -> None:
        """Makes one step with the factors that the shard recorded.

        Raises:
            AssertionError: the step is not the table's next one, or a recorded factor is not what the options give.
        """
        step_factors = self._check_step(push, 1)
        row_ids, gradients = self.without_padding(row_ids, gradients)
        merged = reference.merge_gradients(row_ids, gradients, step_factors)
        assert merged.bad_rows.size == 0, f"table {self.spec.name}: a push was applied that had to be refused"
        self._update(push, merged.row_ids, merged.gradients, values, change_number)

    def push_unscaled(
        self, push: journal_pb2.TablePush, gradient: UnscaledGradient, values: RecordedRows, change_number: int
    ) -> None:
        """Makes one step of a group with the factors that the shard recorded.

        Raises:
            AssertionError: as push.
        """
        step_factors = self._check_step(push, gradient.contributions)
        divided = gradient.sums / np.float32(step_factors.divisor)
        self._update(push, gradient.row_ids, divided, values, change_number)

    def _check_step(self, push: journal_pb2.TablePush, contributions: int) -> Factors:
        assert push.table_step == self.step + 1, f"table {self.spec.name}: step {push.table_step} comes after {self.step}"
        return _check_factors(push, self.spec.name, contributions)

    def without_padding(self, row_ids: Int64s, gradients: Float32s) -> tuple[Int64s, Float32s]:
        """Leaves out the padding row, which no push writes."""
        if self.spec.padding_idx is None:
            return row_ids, gradients
        keep = row_ids != self.spec.padding_idx
        return row_ids[keep], gradients[keep]

    def _update(
        self, push: journal_pb2.TablePush, row_ids: Int64s, gradients: Float32s, values: RecordedRows, change_number: int
    ) -> None:
        step_factors = read_factors(push.factors)
        slots = self._slots(row_ids)
        steps = np.full(row_ids.size, push.table_step, np.int64)
        s = step_factors.step_factors(row_ids.size)
        if self.spec.step == "row":
            steps, s = self._row_steps(row_ids, push, values)
        rounding = None if self.spec.dtype == "float32" else Rounding(self._seed, row_ids, steps)
        reference.adam_update(self._records, slots, gradients, step_factors, RowSteps(s, rounding))
        self.step = push.table_step
        for row_id in row_ids.tolist():
            row = self._rows[row_id]
            row.row_step += self.spec.step == "row"
            row.touched_step, row.change_number = push.table_step, change_number

    def _row_steps(self, row_ids: Int64s, push: journal_pb2.TablePush, values: RecordedRows) -> tuple[Int64s, Float32s]:
        """Returns each row's step and s as recorded, after a check that they are the next ones."""
        by_id = np.argsort(row_ids)
        expected = self.next_row_steps(row_ids)
        assert np.array_equal(values.steps, expected), f"table {self.spec.name}: row steps {values.steps}, not {expected}"
        assert np.array_equal(values.factors, row_step_factors(_options(push.options), expected)), "s of rows"
        steps, s = np.empty(row_ids.size, np.int64), np.empty(row_ids.size, np.float32)
        steps[by_id], s[by_id] = values.steps, values.factors
        return steps, s

    def assign(
        self,
        row_ids: Int64s,
        columns: dict[str, Float32s],
        change_number: int,
        *,
        if_absent: bool,
        row_steps: Int64s | None = None,
    ) -> None:
        """Writes components of rows, and their steps if there are any."""
        if if_absent:
            absent = np.array([row_id not in self._rows for row_id in row_ids.tolist()], bool)
            row_ids, columns = row_ids[absent], {name: values[absent] for name, values in columns.items()}
            row_steps = None if row_steps is None else row_steps[absent]
        slots = self._slots(row_ids)
        for name, values in columns.items():
            reference.write_component(self._records, name, slots, values)
        for row_id in row_ids.tolist():
            self._rows[row_id].change_number = change_number
        if row_steps is not None:
            for row_id, row_step in zip(row_ids.tolist(), row_steps.tolist(), strict=True):
                self._rows[row_id].row_step = row_step

    def clear_moments(self, row_ids: Int64s, change_number: int) -> None:
        """Sets the moments of rows that exist to zero."""
        existing = np.array([row_id for row_id in np.unique(row_ids).tolist() if row_id in self._rows], np.int64)
        zeros = np.zeros((existing.size, self.spec.dim), np.float32)
        self.assign(existing, {"exp_avg": zeros, "exp_avg_sq": zeros}, change_number, if_absent=False)

    def delete(self, row_ids: Int64s) -> None:
        """Deletes rows; their slots stay unused."""
        for row_id in row_ids.tolist():
            self._rows.pop(row_id, None)

    def put(self, rows: TableRows, row_steps: Int64s) -> None:
        """Takes rows over from a base."""
        columns = {"weight": rows.weight, "exp_avg": rows.exp_avg, "exp_avg_sq": rows.exp_avg_sq}
        self.assign(rows.row_ids, columns, 0, if_absent=False)
        counters = zip(row_steps, rows.last_touched_step, rows.change_number, strict=True)
        for row_id, (row_step, touched_step, change_number) in zip(rows.row_ids.tolist(), counters, strict=True):
            row = self._rows[row_id]
            row.row_step, row.touched_step, row.change_number = int(row_step), int(touched_step), int(change_number)

    def _slots(self, row_ids: Int64s) -> Int64s:
        """Returns rows' slots; new rows get one, and their initial values."""
        new_ids = [row_id for row_id in row_ids.tolist() if row_id not in self._rows]
        if new_ids:
            start = self._records.arena.num_slots
            self._records.arena.reserve(start + len(new_ids))
            new_slots = np.arange(start, start + len(new_ids), dtype=np.int64)
            reference.initialize(self._records, new_slots, np.array(new_ids, np.int64), self._initial)
            self._rows.update({row_id: _Counters(slot) for row_id, slot in zip(new_ids, new_slots.tolist(), strict=True)})
        return np.array([self._rows[row_id].slot for row_id in row_ids.tolist()], np.int64)

    # -- reads

    def next_row_steps(self, row_ids: Int64s) -> Int64s:
        """Returns the steps to which a push takes the rows it touches, by ascending id; none in table step mode."""
        if self.spec.step == "table":
            return np.zeros(0, np.int64)
        distinct = [row_id for row_id in np.unique(row_ids).tolist() if row_id != self.spec.padding_idx]
        return np.array([self._rows[row_id].row_step + 1 if row_id in self._rows else 1 for row_id in distinct], np.int64)

    def weights(self, row_ids: Int64s) -> Float32s:
        """Returns weights as a pull shows them, [N, dim]; a row that does not exist reads as it would start."""
        slots = np.array([self._rows[row_id].slot if row_id in self._rows else -1 for row_id in row_ids.tolist()], np.int64)
        out = np.empty((row_ids.size, self.spec.dim), np.float32)
        reference.gather_weights(self._records, slots, row_ids, self._initial, out)
        return out

    def rows(self) -> TableRows:
        """Returns all rows."""
        row_ids = np.array(sorted(self._rows), np.int64)
        rows = [self._rows[row_id] for row_id in row_ids.tolist()]
        slots = np.array([row.slot for row in rows], np.int64)
        by_row = self.spec.step == "row"
        return TableRows(
            row_ids,
            weight=self._records.read("weight", slots),
            exp_avg=self._records.read("exp_avg", slots),
            exp_avg_sq=self._records.read("exp_avg_sq", slots),
            step=np.array([row.row_step if by_row else self.step for row in rows], np.int64),
            last_touched_step=np.array([row.touched_step for row in rows], np.int64),
            change_number=np.array([row.change_number for row in rows], np.int64),
        )


@dataclasses.dataclass(frozen=True)
class RecordedRows:
    """What rows with steps of their own went through, by ascending id; empty in table step mode."""

    steps: Int64s
    factors: Float32s


@dataclasses.dataclass(frozen=True, eq=False)
class UnscaledGradient:
    """A step's merged gradient of one table, not divided yet.

    Attributes:
        row_ids: int64 [U], distinct, ascending, without the padding row.
        sums: float32 [U, dim], unscaled.
        contributions: what a mean is divided by; 1: a sum.
    """

    row_ids: Int64s
    sums: Float32s
    contributions: int


def read_factors(message: journal_pb2.StepFactors) -> Factors:
    """Returns factors as they were recorded."""
    return Factors(**{field.name: getattr(message, field.name) for field in dataclasses.fields(Factors)})  # the same names


def _check_factors(push: journal_pb2.TablePush, table: str, contributions: int) -> Factors:
    """Returns the factors of a step as they were recorded.

    Raises:
        AssertionError: they are not those of its options.
    """
    recorded = read_factors(push.factors)
    options = _options(push.options)
    expected = factors(options, push.table_step, grad_scale=push.options.grad_scale, contributions=contributions)
    assert recorded == expected, f"table {table}, step {push.table_step}: recorded {recorded}, the options give {expected}"
    return recorded


def _options(message: common_pb2.AdamOptions) -> AdamOptions:
    return AdamOptions(
        message.lr,
        (message.beta1, message.beta2),
        message.eps,
        message.weight_decay,
        message.decoupled_weight_decay,
        message.maximize,
    )


def _fold(spec: TableSpec) -> initializers.FoldedInit:
    match spec.init:
        case Normal(mean, std):
            return initializers.fold_normal(mean, std)
        case Uniform(low, high):
            return initializers.fold_uniform(low, high)
        case Constant(value):
            return initializers.fold_constant(value)
        case XavierUniform() | XavierNormal():
            raise AssertionError("the oracle knows no xavier initializer: no fault test uses one")
