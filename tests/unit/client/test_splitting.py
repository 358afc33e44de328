"""Changes that are split anew for other shards: nothing is lost, nothing is sent that has been applied."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam import _split
from shardam._arrays import Int64s
from shardam._changes import Turn
from shardam._contributions import Contribution, EmptyStep
from shardam._messages import AssignPart, PushPart
from shardam._parts import RowWrite, TableStepGradient, assign_change, delete_change, push_change, push_parts
from shardam.errors import MessageTooLarge, RowLimit
from shardam_kernels.factors import AdamOptions
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import embedding_pb2, group_pb2, row_pb2

COUNTS = st.integers(1, 6)

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30)

APPLIED = embedding_pb2.ExchangeResponse(push=embedding_pb2.PushResponse())


def section(row_ids: Int64s, table_id: int = 7, dim: int = 2, lr: float = 0.1) -> TableStepGradient:
    gradients = np.stack([row_ids.astype(np.float32)] * dim, axis=1).reshape(-1, dim)
    return TableStepGradient(f"t{table_id}", table_id, row_ids, gradients, AdamOptions(lr=lr))


def require_split(parts: list[PushPart], route_map: RouteMap, sections: list[TableStepGradient]) -> None:
    """Each row is in its shard's part, once, with its own gradient, and the tables have their options."""
    assert len(parts) == route_map.num_shards
    for index, expected in enumerate(sections):
        found = np.concatenate([part.row_ids.arrays[index] for part in parts])
        assert sorted(found.tolist()) == sorted(expected.row_ids.tolist())
        for shard, part in enumerate(parts):
            row_ids = part.row_ids.arrays[index]
            assert (route_map.shards_of(np.ascontiguousarray(row_ids)) == shard).all()
            assert part.table_ids[index] == expected.table_id
            assert part.options[part.options_indexes[index]].lr == expected.options.lr
            assert (part.rows.arrays[index] == row_ids.astype(np.float32)[:, None]).all()
            assert part.rows.arrays[index].shape == (row_ids.size, expected.gradients.shape[1])


@pytest.mark.case("C062")
@given(ids=st.tuples(IDS, IDS), counts=st.lists(COUNTS, min_size=2, max_size=4), data=st.data())
def test_no_row_is_lost_or_doubled_whatever_shards_had_answered(
    ids: tuple[list[int], list[int]], counts: list[int], data: st.DataObject
) -> None:
    sections = [section(np.array(row_ids, np.int64), 7 + place, 1 + place) for place, row_ids in enumerate(ids)]
    change = push_change(sections, RouteMap(1, counts[0]))
    change.number = 5
    for epoch, count in enumerate(counts[1:], start=2):
        answered = data.draw(st.sets(st.integers(0, len(change.parts) - 1)), label="answered")
        for shard in answered:
            change.take(shard, APPLIED)
        last = 5 if answered else data.draw(st.sampled_from([4, 5]), label="last")
        route_map = RouteMap(epoch, count)
        had, before = change.parts, change.route_map
        change.fit(route_map, last)
        assert change.route_map == route_map
        assert not change.settled
        assert [change.turn(shard) for shard in range(count)] == [Turn.PART] * count
        if last == 5 and count != before.num_shards:
            assert [part.num_bytes for part in change.parts] == [0] * count  # its end is asked for, nothing is sent again
            assert all(len(part.table_ids) == 2 for part in change.parts)
            return
        if last == 5:
            assert [part.row_ids.read(0, 10**6) for part in change.parts] == [part.row_ids.read(0, 10**6) for part in had]
            return
        require_split(change.parts, route_map, sections)


@given(ids=IDS, counts=st.tuples(COUNTS, COUNTS), moments=st.booleans(), steps=st.booleans())
def test_written_and_deleted_rows_are_split_with_all_their_columns(
    ids: list[int], counts: tuple[int, int], moments: bool, steps: bool
) -> None:
    row_ids = np.array(ids, np.int64)
    values = np.stack([row_ids.astype(np.float32)] * 3, axis=1).reshape(-1, 3)
    write = RowWrite(row_ids, values, values + 1 if moments else None, np.abs(values) if moments else None, if_absent=True)
    former, later = RouteMap(1, counts[0]), RouteMap(2, counts[1])
    change = assign_change("t", 7, write, former)
    if steps:
        for part in change.parts:
            counters = np.frombuffer(part.request.row_ids, "<i8").astype(np.uint32)
            part.request.row_steps = counters.tobytes()
    change.fit(later)
    found: list[int] = []
    for shard, part in enumerate(change.parts):
        request = part.request
        mine = np.frombuffer(request.row_ids, "<i8").astype(np.int64)
        assert (later.shards_of(mine) == shard).all()
        expected = mine.astype(np.float32)[:, None].repeat(3, axis=1)
        assert request.weight == expected.tobytes()
        if moments and ids:
            assert (request.exp_avg, request.exp_avg_sq) == ((expected + 1).tobytes(), np.abs(expected).tobytes())
        if steps:
            assert request.row_steps == mine.astype(np.uint32).tobytes()
        assert (request.table_id, request.if_absent) == (7, True)
        found += mine.tolist()
    assert sorted(found) == sorted(ids)
    deletion = delete_change("t", 7, row_ids, former)
    deletion.fit(later)
    assert sorted(np.concatenate([np.frombuffer(part.request.row_ids, "<i8") for part in deletion.parts]).tolist()) == sorted(
        ids
    )


def test_what_a_write_leaves_out_stays_left_out() -> None:
    row_ids = np.arange(4)
    write = RowWrite(row_ids, np.ones((4, 1), np.float32), None, None, if_absent=False)
    change = assign_change("t", 7, write, RouteMap(1, 2))
    change.fit(RouteMap(2, 3))
    assert not any(part.request.HasField("exp_avg") or part.request.HasField("row_steps") for part in change.parts)
    full = assign_change("t", 7, dataclasses.replace(write, exp_avg=np.zeros((4, 1), np.float32)), RouteMap(1, 4))
    full.fit(RouteMap(2, 1))
    assert full.parts[0].request.HasField("exp_avg")


def test_a_refusal_that_the_former_shards_have_closed_stays_as_it_was() -> None:
    change = push_change([section(np.arange(10))], RouteMap(1, 2))
    change.number = 3
    change.take(0, APPLIED)
    change.refuse(1, RowLimit("no room"))
    change.fit(RouteMap(2, 4), last_number=3)
    assert change.settled
    assert [change.turn(shard) for shard in range(4)] == [None] * 4
    refusal = change.refusal()
    assert isinstance(refusal, RowLimit)
    assert "number 3: shard 0 applied it, shard 1 ROW_LIMIT" in refusal.message


def test_a_refusal_of_all_former_shards_is_tried_on_the_new_ones() -> None:
    change = push_change([section(np.arange(10))], RouteMap(1, 1))
    change.number = 3
    change.refuse(0, RowLimit("no room"))
    change.fit(RouteMap(2, 2), last_number=2)
    assert change.refusal() is None
    assert [change.turn(shard) for shard in range(2)] == [Turn.PART] * 2


def test_a_change_that_no_longer_fits_a_message_is_closed_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_split, "MAX_PART_BYTES", 200)
    change = push_change([section(np.arange(20))], RouteMap(1, 4))
    change.number = 1
    change.fit(RouteMap(2, 1))
    assert change.turn(0) is Turn.CLOSE
    change.fit(RouteMap(3, 4))  # its rows are gone by now
    assert [change.turn(shard) for shard in range(4)] == [Turn.CLOSE] * 4
    for shard in range(4):
        change.take(shard, embedding_pb2.ExchangeResponse())
    assert change.settled
    assert isinstance(change.refusal(), MessageTooLarge)


def test_a_contribution_that_no_longer_fits_is_refused_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_split, "MAX_PART_BYTES", 200)
    former = RouteMap(1, 4)
    change = Contribution(push_parts([section(np.arange(20))], former, group_pb2.CONTRIBUTION_KIND_GRADIENT), former)
    change.number = 1
    change.fit(RouteMap(2, 1))
    assert change.turn(0) is Turn.ARRIVE
    (message,) = change.messages(0, Turn.ARRIVE, embedding_pb2.ArriveRequest().header)
    assert isinstance(message, embedding_pb2.ExchangeRequest)
    assert message.arrive.refusal.reason == "MESSAGE_TOO_LARGE"


def test_a_contribution_whose_step_has_ended_is_over_and_one_that_was_staged_is_sent_again() -> None:
    former = RouteMap(1, 2)
    parts = push_parts([section(np.arange(20))], former, group_pb2.CONTRIBUTION_KIND_GRADIENT)
    ended, staged = Contribution(parts, former), Contribution(parts, former)
    for change in (ended, staged):
        change.number = 4
        change.take(0, APPLIED)
        assert not change.is_decided
    ended.take(1, APPLIED)
    result = group_pb2.StepResult(step=1, end=group_pb2.STEP_END_APPLIED, num_contributions=2)
    arrived = embedding_pb2.ExchangeResponse()
    arrived.arrive.result.CopyFrom(result)
    ended.take(0, arrived)
    assert ended.is_decided
    ended.fit(RouteMap(2, 3), last_number=4)
    assert ended.settled
    assert ended.refusal() is None
    staged.fit(RouteMap(2, 3), last_number=3)
    assert [staged.turn(shard) for shard in range(3)] == [Turn.PART] * 3
    require_split(staged.parts, RouteMap(2, 3), [section(np.arange(20))])
    assert all(part.contribution == group_pb2.CONTRIBUTION_KIND_GRADIENT for part in staged.parts)


def test_an_empty_step_is_told_to_all_new_shards() -> None:
    change = EmptyStep(RouteMap(1, 2), number=1)
    change.take(0, embedding_pb2.ExchangeResponse())
    change.fit(RouteMap(1, 2))
    assert change.closed == {0}
    change.fit(RouteMap(2, 3), last_number=1)
    assert [change.turn(shard) for shard in range(3)] == [Turn.CLOSE] * 3


def test_rows_without_columns_split_to_nothing() -> None:
    parts = [AssignPart(row_pb2.AssignRowsRequest(table_id=7))]
    assert len(_split.split_assign_anew(parts, RouteMap(2, 3))) == 3
