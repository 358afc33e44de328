"""Steps of a sync group on one shard, held against the NumPy reference bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardam_testing.group_shard import OPTIONS, GroupShard, client_of, groups_seen
from shardam_testing.reference_table import ReferenceTable
from shardam_testing.shard_states import SEED, replayed, seen

from shardam_proto.schema import Normal, TableSpec
from shardam_server.shard.groups.changes import decide
from shardam_server.shard.groups.values import Kind, Reduce
from shardam_server.shard.records import CpuRecords, Float32s, Int64s
from shardam_server.shard.storage import RowStorage

DIM = 3
SPECS = [
    TableSpec("plain", DIM, init=Normal()),
    TableSpec("rows_step", DIM, init=Normal(), step="row", num_embeddings=8, padding_idx=2),
    TableSpec("brain", DIM, init=Normal(), dtype="bfloat16"),
    TableSpec("half", DIM, init=Normal(), dtype="float16", step="row"),
]
ROW_IDS = range(6)

Rows = tuple[Sequence[int], Float32s]


@dataclasses.dataclass(frozen=True)
class Contributed:
    """One rank's part: table id -> row ids, gradients."""

    kind: Kind
    tables: Mapping[int, Rows]


@st.composite
def contributions(draw: st.DrawFn) -> Contributed:
    kind: Kind = draw(st.sampled_from(["gradient", "gradient", "gradient", "empty", "abstain"]))
    tables: dict[int, Rows] = {}
    if kind == "gradient":
        for table_id in draw(st.lists(st.sampled_from(range(1, len(SPECS) + 1)), unique=True)):
            row_ids = draw(st.lists(st.sampled_from(ROW_IDS), max_size=7))
            values = np.random.default_rng(draw(st.integers(0, 2**16)))
            # Magnitudes far apart, so that the order of a sum shows in its bits.
            scales = 10.0 ** values.integers(-4, 4, (len(row_ids), 1))
            tables[table_id] = row_ids, (values.standard_normal((len(row_ids), DIM)) * scales).astype(np.float32)
    return Contributed(kind, tables)


def merged(parts: Sequence[Rows], grad_scale: float, num_contributions: int) -> tuple[list[int], Float32s]:
    """The sum over ranks as CONTRACT.md writes it: a rank's own sum first, then rank order, then the two factors."""
    sums: dict[int, Float32s] = {}
    for row_ids, gradients in parts:
        own: dict[int, Float32s] = {}
        for row_id, gradient in zip(row_ids, gradients, strict=True):
            own[row_id] = own[row_id] + gradient if row_id in own else gradient
        for row_id, total in own.items():
            sums[row_id] = sums[row_id] + total if row_id in sums else total
    factors = np.float32(1 / grad_scale), np.float32(num_contributions)
    rows = [total * factors[0] / factors[1] for total in sums.values()]
    return list(sums), np.array(rows, np.float32).reshape(-1, DIM)


class Reference:
    """The tables in NumPy."""

    def __init__(self) -> None:
        self.tables = {table_id: ReferenceTable(spec, SEED) for table_id, spec in enumerate(SPECS, 1)}

    def step(self, ranks: Sequence[Contributed], grad_scale: float, reduce: Reduce) -> dict[int, int]:
        divisor = len(ranks) if reduce == "mean" else 1
        steps = {}
        for table_id, table in self.tables.items():
            parts = [rank.tables[table_id] for rank in ranks if table_id in rank.tables]
            if not parts:
                continue
            row_ids, gradients = merged(parts, grad_scale, divisor)
            kept = np.array([row_id != table.spec.padding_idx for row_id in row_ids], bool)
            table.push(np.array(row_ids, np.int64)[kept], gradients[kept], OPTIONS)
            steps[table_id] = table.t
        return steps


def rows_of(shard: GroupShard, table_id: int) -> dict[int, bytes]:
    ids = np.array(ROW_IDS, np.int64)
    batch = shard.state.table(table_id).read(ids, include_optimizer=True)
    assert batch.exp_avg is not None
    assert batch.exp_avg_sq is not None
    parts = (batch.weight, batch.exp_avg, batch.exp_avg_sq)
    return {row_id: b"".join(part[row_id].tobytes() for part in parts) for row_id in ROW_IDS if batch.found[row_id]}


@settings(max_examples=60)
@given(
    steps=st.integers(1, 4).flatmap(
        lambda num_ranks: st.lists(st.lists(contributions(), min_size=num_ranks, max_size=num_ranks), min_size=1, max_size=3)
    ),
    grad_scale=st.sampled_from([1.0, 3.0, 65536.0, 0.1]),
    reduce=st.sampled_from(["mean", "sum"]),
    order=st.randoms(use_true_random=False),
)
def test_a_step_of_any_parts_has_the_bits_of_the_reference_whatever_the_order_of_arrival(
    steps: list[list[Contributed]], grad_scale: float, reduce: Reduce, order: np.random.Generator
) -> None:
    num_ranks = len(steps[0])
    shard, reference = GroupShard(SPECS, num_ranks, reduce=reduce), Reference()
    for number, ranks in enumerate(steps, start=1):
        arriving = list(range(num_ranks))
        order.shuffle(arriving)
        for rank in arriving:
            shard.stage(rank, ranks[rank].tables, kind=ranks[rank].kind, grad_scale=grad_scale)
        result = shard.finish_step()
        expected = reference.step(ranks, grad_scale, reduce)
        end = "abstained" if all(rank.kind == "abstain" for rank in ranks) else "applied"
        assert (result.step, result.end, result.num_contributions, result.steps) == (number, end, num_ranks, expected)
        assert all(shard.result(rank) == result for rank in range(num_ranks))
        assert shard.state.groups.parts() == []
    for table_id, table in reference.tables.items():
        assert rows_of(shard, table_id) == table.rows()
    again = replayed(shard.journal.records())
    assert seen(again, ROW_IDS) == seen(shard.state, ROW_IDS)
    assert groups_seen(again) == groups_seen(shard.state)


def test_a_rank_s_own_sum_comes_before_the_sum_over_the_ranks() -> None:
    """1 + (2**-24 + 2**-24) is more than 1 in float32; (1 + 2**-24) + 2**-24 is not."""
    shard, tiny = GroupShard([TableSpec("plain", 1)], 2, reduce="sum"), 2.0**-24
    shard.stage(0, {1: ([5], [[1.0]])})
    shard.stage(1, {1: ([5, 5], [[tiny], [tiny]])})
    shard.finish_step()
    batch = shard.state.table(1).read(np.array([5]), include_optimizer=True)
    one_push = GroupShard([TableSpec("plain", 1)], 1, reduce="sum")
    one_push.stage(0, {1: ([5], [[np.nextafter(np.float32(1), np.float32(2))]])})
    one_push.finish_step()
    assert batch.exp_avg == one_push.state.table(1).read(np.array([5]), include_optimizer=True).exp_avg


@pytest.mark.case("C004")
@pytest.mark.case("C005")
def test_a_table_with_an_empty_gradient_steps_and_one_that_nobody_names_does_not() -> None:
    shard = GroupShard(SPECS[:2], 2)
    shard.stage(0, {1: ([], [])})
    shard.stage(1, kind="empty")
    assert shard.finish_step().steps == {1: 1}
    assert [table.step for table in shard.state.tables()] == [1, 0]


def test_an_empty_and_an_abstaining_rank_count_in_a_mean() -> None:
    shard, alone = GroupShard(SPECS[:1], 3), GroupShard(SPECS[:1], 1)
    shard.stage(0, kind="abstain")
    shard.stage(1, {1: ([4], [[3.0, 6.0, -9.0]])})
    shard.stage(2, kind="empty")
    assert shard.finish_step().num_contributions == 3
    alone.stage(0, {1: ([4], [[1.0, 2.0, -3.0]])})
    alone.finish_step()
    assert rows_of(shard, 1) == rows_of(alone, 1)


def test_if_all_abstain_no_table_steps_and_the_group_goes_on() -> None:
    shard = GroupShard(SPECS[:1], 2)
    for rank in range(2):
        shard.stage(rank, kind="abstain")
    before = seen(shard.state, ROW_IDS)
    result = shard.finish_step()
    assert (result.end, result.steps, result.num_contributions) == ("abstained", {}, 2)
    assert (seen(shard.state, ROW_IDS)["rows"], shard.entry.step) == (before["rows"], 1)


def test_a_step_that_is_carried_out_already_is_passed_over() -> None:
    shard = GroupShard(SPECS[:1], 1)
    shard.stage(0, {1: ([1], [[1.0, 1.0, 1.0]])})
    decision = shard.decision("applied", 0)
    decide(shard.state, decision)
    before = seen(shard.state, ROW_IDS)
    decide(shard.state, decision)
    assert seen(shard.state, ROW_IDS) == before


def test_the_gradient_of_a_single_rank_is_not_copied_before_it_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, met = GroupShard(SPECS[:1], 2), []
    shard.stage(0, {1: ([1, 2], np.ones((2, DIM)))})
    shard.stage(1, kind="empty")
    part = shard.state.groups.part(client_of(0))
    assert part is not None
    prepare = CpuRecords.prepare

    def note(records: CpuRecords, row_ids: object, gradients: Float32s, factors: object) -> object:
        met.append(gradients)
        return prepare(records, row_ids, gradients, factors)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuRecords, "prepare", note)
    shard.finish_step()
    assert [gradients is part.tables[1].gradients for gradients in met] == [True]


def test_a_part_is_looked_up_as_often_with_many_ranks_as_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_looked_up(num_ranks: int) -> int:
        shard, looked_up = GroupShard(SPECS[:1], num_ranks), list[int]()
        lookup = RowStorage.lookup

        def note(storage: RowStorage, row_ids: Int64s) -> Int64s:
            looked_up.append(row_ids.size)
            return lookup(storage, row_ids)

        with monkeypatch.context() as patch:
            patch.setattr(RowStorage, "lookup", note)
            for rank in range(num_ranks):
                shard.stage(rank, {1: ([rank, rank + 1], np.ones((2, DIM)))})
            shard.finish_step()
        return sum(looked_up)

    assert num_looked_up(40) == 40 * num_looked_up(1)
