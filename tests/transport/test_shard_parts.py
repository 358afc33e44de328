"""Parts of a sync group on one shard: staged until their step is decided, repeated, late, refused; and changes from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from shardam_testing.held_group import (
    ABSTAIN,
    GRADIENT,
    HeldGroup,
    assign_request,
    part,
    pull_of,
    reason_of,
    refused,
    unary_push,
    without_gradient,
)
from shardam_testing.held_shard import HeldShard
from shardam_testing.raw_client import RawClient, id_bytes
from shardam_testing.raw_stream import RawStream, Request, chunks_of, raw_stream

from shardam_proto.v1 import embedding_pb2, group_pb2, row_pb2


def test_parts_are_staged_with_their_peaks_and_applied_by_the_decision(
    shard: HeldShard, first: RawClient, second: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    before = first.pull(table, [1, 2])
    staged = stream.ask(part(first, 1, 1, 0, table, [1, 2, 1], [[1, 2], [3, -4], [5, 6]])).push
    other = unary_push(second, without_gradient(second, 1, 1, 1))
    assert (staged.staged, list(staged.steps), staged.repeated_number) == (True, [], False)
    assert [(peak.table_id, peak.peak) for peak in staged.peaks] == [(table.table_id, 8.0)]
    assert (other.staged, list(other.peaks), other.HasField("result")) == (True, [], False)
    assert np.array_equal(first.pull(table, [1, 2]), before)
    group.decide(1, [1])
    assert not np.array_equal(first.pull(table, [1, 2]), before)
    assert shard.shard.state.table(table.table_id).step == 1


def test_open_counts_a_staged_number_as_taken(shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream) -> None:
    assert first.open().header.last_number == 0
    stream.ask(without_gradient(first, 1, 1, 0))
    assert first.open().header.last_number == 1
    group.decide(1, [1, 0], kind="empty", end="abstained")
    assert first.open().header.last_number == 1


def test_a_repeat_of_a_staged_or_decided_part_gets_the_former_answer(
    shard: HeldShard, first: RawClient, second: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()

    def request() -> embedding_pb2.PushRequest:
        return part(first, 1, 1, 0, table, [1], [[1, 2]])

    former = stream.ask(request()).push
    again = stream.ask(request()).push
    assert (again.staged, list(again.peaks), again.repeated_number) == (True, list(former.peaks), True)
    unary_push(second, without_gradient(second, 1, 1, 1))
    group.decide(1, [1])
    ended = unary_push(first, request())
    assert (ended.staged, ended.repeated_number, ended.result.step) == (False, True, 1)
    assert (ended.result.end, ended.result.num_contributions) == (group_pb2.STEP_END_APPLIED, 1)
    assert [(step.table_id, step.table_step) for step in ended.steps] == [(table.table_id, 1)]
    assert list(ended.result.steps) == list(ended.steps)
    assert shard.shard.metrics.pushes._value.get() == 2


def spoil_rows(request: embedding_pb2.PushRequest) -> None:
    request.rows = np.zeros(2, "<f4").tobytes()


def spoil_step(request: embedding_pb2.PushRequest) -> None:
    request.header.step = 2


def spoil_kind(request: embedding_pb2.PushRequest) -> None:
    request.contribution = ABSTAIN
    request.sections.pop()
    request.options.pop()
    request.row_ids = request.rows = b""


@pytest.mark.parametrize("spoil", [spoil_rows, spoil_step, spoil_kind])
@pytest.mark.parametrize("decided", [False, True])
def test_a_staged_number_with_another_content_step_or_kind_is_refused(
    shard: HeldShard, first: RawClient, group: HeldGroup, spoil: Callable[[embedding_pb2.PushRequest], None], decided: bool
) -> None:
    table = shard.install()
    unary_push(first, part(first, 1, 1, 0, table, [1], [[1, 2]]))
    if decided:
        group.decide(1, [1])
    other = part(first, 1, 1, 0, table, [1], [[1, 2]])
    spoil(other)
    assert reason_of(lambda: unary_push(first, other)) == "SEQUENCE_REUSED"


def test_a_staged_number_is_no_other_changes_number(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    stream.ask(without_gradient(first, 1, 1, 0))
    close = embedding_pb2.CloseNumberRequest(header=first.header(1, step=1), kind=embedding_pb2.CLOSE_KIND_SKIP)
    for request in (close, assign_request(first, 1, table, step=1), assign_request(first, 1, table)):
        assert refused(stream, request) == "SEQUENCE_REUSED"
    assert refused(stream, assign_request(first, 2, table)) == "SEQUENCE_GAP"
    group.decide(1, [1], end="abstained", kind="empty")
    assert stream.ask(assign_request(first, 2, table, step=2)).assign_rows.num_assigned == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda request: request.ClearField("contribution"), "BAD_OPTION"),
        (lambda request: setattr(request, "contribution", ABSTAIN), "BAD_OPTION"),
        (lambda request: setattr(request.header, "rank", 1), "GROUP_MISMATCH"),
        (lambda request: setattr(request, "rows", np.full(2, np.inf, "<f4").tobytes()), "NON_FINITE_GRADIENT"),
        (lambda request: setattr(request.sections[0], "table_id", 99), "UNKNOWN_TABLE"),
        (lambda request: setattr(request.header, "epoch", 9), "STALE_ROUTE"),
    ],
)
def test_a_part_that_is_refused_leaves_its_number_open(
    shard: HeldShard,
    first: RawClient,
    group: HeldGroup,
    stream: RawStream,
    spoil: Callable[[embedding_pb2.PushRequest], None],
    reason: str,
) -> None:
    table = shard.install()
    request = part(first, 1, 1, 0, table, [1], [[1, 2]])
    spoil(request)
    assert refused(stream, request) == reason
    assert stream.ask(part(first, 1, 1, 0, table, [1], [[1, 2]])).push.staged


def test_a_contribution_outside_a_sync_group_is_refused(shard: HeldShard, first: RawClient) -> None:
    table = shard.install()
    request = first.push_request(1, table, [1], [[1, 1]])
    request.contribution = GRADIENT
    assert reason_of(lambda: unary_push(first, request)) == "BAD_OPTION"
    assert first.push(1, table, [1], [[1, 1]]).steps[0].table_step == 1


def test_a_step_without_a_membership_is_refused_and_its_number_stays_free(
    shard: HeldShard, first: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    close = embedding_pb2.CloseNumberRequest(header=first.header(1, step=1), kind=embedding_pb2.CLOSE_KIND_SKIP)
    requests: list[Request] = [
        first.push_request(1, table, [1], [[1, 1]], step=1),
        part(first, 1, 1, 0, table, [1], [[1, 1]]),
        pull_of(first, [table], [1], step=1),
        assign_request(first, 1, table, step=1),
        close,
    ]
    for request in requests:
        assert refused(stream, request) == "NOT_A_MEMBER"
    assert first.push(1, table, [1], [[1, 1]]).steps[0].table_step == 1


def test_changes_from_outside_a_sync_group_are_refused_until_it_is_empty_and_keep_their_number(
    shard: HeldShard, first: RawClient, second: RawClient, group: HeldGroup
) -> None:
    table = shard.install()
    with shard.client() as outsider, raw_stream(outsider.channel) as stream:
        assert reason_of(lambda: outsider.push(1, table, [1], [[1, 1]])) == "NOT_A_MEMBER"
        assert refused(stream, outsider.push_request(1, table, [1], [[1, 1]])) == "NOT_A_MEMBER"
        assign = assign_request(outsider, 1, table)
        delete = row_pb2.DeleteRowsRequest(header=outsider.header(1), table_id=table.table_id, row_ids=id_bytes([1]))
        clear = row_pb2.ClearMomentsRequest(header=outsider.header(1), table_id=table.table_id, row_ids=id_bytes([1]))
        changes: list[Request] = [assign, delete, clear]
        assert [refused(stream, request) for request in changes] == ["NOT_A_MEMBER"] * 3
        calls: list[Callable[[], object]] = [
            partial(outsider.call, outsider.row.AssignRows, assign),
            partial(outsider.call, outsider.row.DeleteRows, delete),
            partial(outsider.call, outsider.row.ClearMoments, clear),
        ]
        assert [reason_of(call) for call in calls] == ["NOT_A_MEMBER"] * 3
        assert (outsider.open().header.last_number, outsider.read(table, [4]).rows.found) == (0, b"\x00")
        assert outsider.pull(table, [1]).shape == (1, 2)  # reads go on
        assert reason_of(lambda: unary_push(first, first.push_request(1, table, [1], [[1, 1]]))) == "NOT_A_MEMBER"
        for member in (first, second):
            group.leave(member)
        assert outsider.call(outsider.row.AssignRows, assign_request(outsider, 1, table)).num_assigned == 1


def test_a_part_that_comes_after_its_step_was_decided_is_closed_with_the_reason(
    shard: HeldShard, first: RawClient, second: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    unary_push(second, without_gradient(second, 1, 1, 1))
    group.decide(1, [], end="refused")
    late = stream.ask(part(first, 1, 1, 0, table, [1], [[1, 1]])).push
    assert (late.staged, late.result.end, late.result.num_contributions) == (False, group_pb2.STEP_END_REFUSED, 0)
    assert late.result.refusal.reason == "NON_FINITE_GRADIENT"
    assert (first.open().header.last_number, shard.shard.state.table(table.table_id).step) == (1, 0)
    again = stream.ask(part(first, 1, 1, 0, table, [1], [[1, 1]])).push
    assert (again.repeated_number, again.result) == (True, late.result)
    assert shard.shard.metrics.pushes._value.get() == 1  # the one that was staged


@pytest.mark.parametrize("chunk_bytes", [1, 8, 11, 10_000])
def test_a_part_in_chunks_is_staged_after_its_last_one_as_one_message_is(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream, chunk_bytes: int
) -> None:
    table = shard.install()
    chunks = chunks_of(part(first, 1, 1, 0, table, [1, 2, 1], [[1, 2], [3, 4], [5, 6]]), chunk_bytes)
    for chunk in chunks:
        chunk.contribution = GRADIENT if chunk.header.chunk_index == 0 else group_pb2.CONTRIBUTION_KIND_UNSPECIFIED
        stream.send(chunk)
    staged = stream.answer(chunks[0].header.request_id).push
    assert (staged.staged, staged.peaks[0].peak) == (True, 8.0)
    whole = stream.ask(part(first, 1, 1, 0, table, [1, 2, 1], [[1, 2], [3, 4], [5, 6]])).push
    assert whole.repeated_number
    group.decide(1, [1])
    assert shard.shard.state.table(table.table_id).step == 1
