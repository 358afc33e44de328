"""A shard's tables against a replay in the NumPy reference: every dtype and step mode, the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from shardam_kernels import reference
from shardam_kernels.factors import AdamOptions, factors, row_step_factors
from shardam_kernels.initializers import InitialRows, fold_normal
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_proto.schema import Constant, DtypeName, Normal, StepModeName, TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.records import CpuDevice, Float32s, Int64s
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table, table_from_info

OPTIONS = AdamOptions(lr=0.1, weight_decay=0.01)
SEED = 77
DEVICE = CpuDevice(num_threads=2)


def make_table(spec: TableSpec) -> Table:
    return table_from_info(common_pb2.TableInfo(spec=spec.to_proto(), table_id=1, table_seed=SEED), DEVICE.make_records)


class Replay:
    """The same pushes, applied by the reference to rows kept in a dict of slots."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.records = reference.Records(
            reference.Arena(layout(spec.dim, spec.dtype).stride_bytes), layout(spec.dim, spec.dtype)
        )
        self.initial = InitialRows(fold_normal(0.0, 1.0), SEED, spec.padding_idx)
        self.slots: dict[int, int] = {}
        self.row_steps: dict[int, int] = {}
        self.t = 0

    def push(self, row_ids: Int64s, gradients: Float32s) -> None:
        self.t += 1
        step = factors(OPTIONS, self.t)
        merged = reference.merge_gradients(row_ids, gradients, step)
        for row_id in merged.row_ids.tolist():
            if row_id not in self.slots:
                slot = self.slots[row_id] = len(self.slots)
                self.records.arena.reserve(slot + 1)
                reference.initialize(self.records, np.array([slot]), np.array([row_id]), self.initial)
            self.row_steps[row_id] = self.row_steps.get(row_id, 0) + 1
        own = np.array([self.row_steps[row_id] for row_id in merged.row_ids.tolist()], np.int64)
        steps = own if self.spec.step == "row" else np.full(own.size, self.t, np.int64)
        rounding = None if self.spec.dtype == "float32" else Rounding(SEED, merged.row_ids, steps)
        slots = np.array([self.slots[row_id] for row_id in merged.row_ids.tolist()], np.int64)
        reference.adam_update(self.records, slots, merged.gradients, step, RowSteps(row_step_factors(OPTIONS, steps), rounding))

    def read(self, name: str, row_ids: Int64s) -> Float32s:
        out = np.empty((row_ids.size, self.spec.dim), np.float32)
        slots = np.array([self.slots[row_id] for row_id in row_ids.tolist()], np.int64)
        reference.read_component(self.records, name, slots, out)
        return out


@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_table_holds_the_bits_of_a_replay_in_the_reference(dtype: DtypeName, step: StepModeName) -> None:
    spec = TableSpec("t", 10, dtype=dtype, step=step, init=Normal())
    table, state, replay = make_table(spec), ShardState(DEVICE), Replay(spec)
    state.install([table])
    rng = np.random.default_rng(5)
    for _ in range(12):
        row_ids = rng.integers(-20, 20, 30)
        gradients = rng.standard_normal((30, 10)).astype(np.float32)
        state.push([GradientSection(table, row_ids, gradients, OPTIONS, 1.0)])
        replay.push(row_ids, gradients)
    row_ids = np.array(sorted(replay.slots), np.int64)
    batch = table.read(row_ids, include_optimizer=True)
    assert batch.exp_avg is not None
    assert batch.exp_avg_sq is not None
    for name, values in (("weight", batch.weight), ("exp_avg", batch.exp_avg), ("exp_avg_sq", batch.exp_avg_sq)):
        assert values.tobytes() == replay.read(name, row_ids).tobytes(), name
    expected = [replay.row_steps[row_id] if step == "row" else 12 for row_id in row_ids.tolist()]
    assert batch.step.tolist() == expected


def first_weight(step: StepModeName, table_step: int) -> float:
    table = make_table(TableSpec("t", 1, step=step, init=Constant(0.0)))
    state = ShardState(DEVICE)
    state.install([table])
    table.step = table_step - 1
    one = np.ones((1, 1), np.float32)
    state.push([GradientSection(table, np.array([7]), one, AdamOptions(lr=0.1), 1.0)])
    return float(table.gather(np.array([7]))[0, 0])


@pytest.mark.case("C010")
def test_a_row_first_touched_at_step_1000_takes_a_first_step_only_if_rows_count_for_themselves() -> None:
    assert first_weight("table", 1000) == pytest.approx(-0.2514565917, rel=1e-5)
    assert first_weight("row", 1000) == pytest.approx(-0.0999999684, rel=1e-5)


@pytest.mark.case("C026")
def test_the_step_of_a_table_counts_past_what_a_float32_can() -> None:
    table = make_table(TableSpec("t", 1))
    state = ShardState(DEVICE)
    state.install([table])
    table.step = 16_777_216
    state.push([GradientSection(table, np.array([1]), np.ones((1, 1), np.float32), OPTIONS, 1.0)])
    assert table.step == 16_777_217
    assert table.read(np.array([1]), include_optimizer=False).step.tolist() == [16_777_217]


def test_a_deleted_row_starts_its_own_step_anew() -> None:
    table = make_table(TableSpec("t", 1, step="row"))
    state = ShardState(DEVICE)
    state.install([table])
    one = np.ones((1, 1), np.float32)
    for _ in range(3):
        state.push([GradientSection(table, np.array([1]), one, OPTIONS, 1.0)])
    state.delete(table, np.array([1]))
    state.push([GradientSection(table, np.array([1]), one, OPTIONS, 1.0)])
    assert table.read(np.array([1]), include_optimizer=False).step.tolist() == [1]


def test_assigned_weights_are_rounded_to_nearest_even_and_saturation_is_counted() -> None:
    table = make_table(TableSpec("t", 2, dtype="float16"))
    state = ShardState(DEVICE)
    state.install([table])
    state.assign(table, RowWrite(np.array([1]), np.array([[1 + 2**-11, 1e6]], np.float32)))
    assert table.gather(np.array([1])).tolist() == [[1.0, 65504.0]]
    assert table.storage.saturated_values == 1
