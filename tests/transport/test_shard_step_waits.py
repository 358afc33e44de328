"""What is ahead of its sync group waits on a shard, as arrivals do for their decision: within what bounds, to which end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from shardam_testing.held_group import (
    GRADIENT,
    SYNC,
    HeldGroup,
    assign_request,
    parked,
    part,
    pull_of,
    reason_of,
    refused,
    unary_push,
    without_gradient,
)
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import RawClient
from shardam_testing.raw_stream import RawStream, Request, chunks_of, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, shard_pb2
from shardam_server.shard.groups.values import GroupTerms


def wait_seconds(shard: HeldShard) -> tuple[float, float]:
    """Returns how many requests have waited for a step, and how long."""
    text = shard.shard.metrics.text()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if "{" in line}
    return values["shardam_step_wait_seconds_count"], values["shardam_step_wait_seconds_sum"]


def test_what_is_ahead_of_its_group_waits_for_the_step_before_and_is_taken_in_its_order(
    shard: HeldShard, first: RawClient, second: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    for rank, client in enumerate((first, second)):
        unary_push(client, part(client, 1, 1, rank, table, [1], [[1, 1]]))
    assign = stream.send(assign_request(first, 2, table, step=2))
    push = stream.send(part(first, 3, 2, 0, table, [1], [[1, 1]]))
    pull = stream.send(pull_of(first, [table], [4], step=2))
    parked(first, 3)
    with raw_stream(first.channel) as other:
        evaluation = other.ask(pull_of(first, [table], [4]))  # no step: never waits
        assert evaluation.pull.steps[0].table_step == 0
    bad = stream.send(pull_of(first, [common_pb2.TableInfo(table_id=99)], [1]))
    assert reason_of(lambda: stream.answer(bad)) == "UNKNOWN_TABLE"  # later messages pass
    assert stream.order == [bad]
    group.decide(1, [1, 1])
    assert stream.answer(assign).assign_rows.num_assigned == 1
    assert stream.answer(push).push.staged
    answer = stream.answer(pull).pull
    assert answer.steps[0].table_step == 1
    assert np.frombuffer(answer.rows, "<f4").tolist() == [7, 7]  # its own stream's change is seen
    assert first.status().parked_requests == 0
    count, seconds = wait_seconds(shard)
    assert count >= 2
    assert seconds > 0


def test_a_parked_part_in_chunks_is_staged_once_its_step_is_due(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    stream.ask(part(first, 1, 1, 0, table, [1], [[1, 1]]))
    chunks = chunks_of(part(first, 2, 2, 0, table, [1, 2], [[1, 1], [2, 2]]), 8)
    for chunk in chunks:
        chunk.contribution = GRADIENT
        stream.send(chunk)
    parked(first, 1)
    assert first.status().reserved_bytes == 0
    group.decide(1, [1])
    assert stream.answer(chunks[0].header.request_id).push.staged


def test_unary_calls_ahead_of_their_group_are_refused_to_be_sent_again(
    shard: HeldShard, first: RawClient, group: HeldGroup
) -> None:
    table = shard.install()
    pull, push = pull_of(first, [table], [1], step=2), part(first, 1, 2, 0, table, [1], [[1, 1]])
    close = embedding_pb2.CloseNumberRequest(header=first.header(1, step=2), kind=embedding_pb2.CLOSE_KIND_SKIP)
    calls: list[Callable[[], object]] = [
        partial(first.call, first.embedding.Pull, pull),
        partial(first.call, first.embedding.Push, push),
        partial(first.call, first.embedding.CloseNumber, close),
        partial(first.call, first.row.AssignRows, assign_request(first, 1, table, step=2)),
    ]
    for call in calls:
        with pytest.raises(ShardamError) as error:
            call()
        assert (error.value.reason, error.value.rule.retryable) == ("NOT_READY", True)
    assert first.status().parked_requests == 0
    group.decide(1, [], end="abstained")
    assert first.call(first.embedding.Pull, pull).rows
    assert unary_push(first, push).staged


def test_what_waits_beyond_its_budget_is_refused_and_was_not_taken(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    requests: list[Request] = [
        part(first, 1, 2, 0, table, [1], [[1, 1]], budget_s=0.01),
        pull_of(first, [table], [1], step=2, budget_s=0.01),
        assign_request(first, 1, table, step=2, budget_s=0.01),
    ]
    for request in requests:
        assert refused(stream, request) == "SHARD_UNREACHABLE"
    assert first.status().parked_requests == 0
    group.decide(1, [], end="abstained")
    assert first.open().header.last_number == 0
    assert stream.ask(part(first, 1, 2, 0, table, [1], [[1, 1]])).push.staged


def test_a_change_behind_one_that_gave_up_goes_on(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    lost = stream.send(assign_request(first, 1, table, step=3, budget_s=0.2))
    waiting = stream.send(part(first, 1, 2, 0, table, [1], [[1, 1]]))
    parked(first, 2)
    group.decide(1, [], end="abstained")
    assert reason_of(lambda: stream.answer(lost)) == "SHARD_UNREACHABLE"
    assert stream.answer(waiting).push.staged


def test_a_drain_refuses_what_waits_and_the_stream_ends(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install()
    waiting = [
        stream.send(part(first, 1, 2, 0, table, [1], [[1, 1]])),
        stream.send(pull_of(first, [table], [1], step=2)),
        stream.send(embedding_pb2.ArriveRequest(header=first.header(1, step=1), refusal=group_pb2.StepRefusal(reason="X"))),
    ]
    parked(first, 3)
    shard.shard.serving = shard_pb2.SERVING_STATE_DRAINING
    shard.on_loop(shard.shard.streams.drain)
    for request_id in waiting:
        assert reason_of(partial(stream.answer, request_id)) == "NOT_READY"
    assert stream.ended.wait(30)
    assert stream.error is None
    shard.stop_server(60)  # nothing holds it up


def test_a_cancelled_stream_takes_what_waits_with_it(shard: HeldShard, first: RawClient, group: HeldGroup) -> None:
    table = shard.install()
    with raw_stream(first.channel) as stream:
        stream.send(part(first, 1, 2, 0, table, [1], [[1, 1]]))
        stream.send(pull_of(first, [table], [1], step=2))
        parked(first, 2)
    wait_for("the stream's handler to end", lambda: shard.shard.streams.num_open == 0)
    parked(first, 0)
    group.decide(1, [], end="abstained")
    assert first.open().header.last_number == 0


@pytest.mark.parametrize(("closed", "reason"), [(True, "CLIENT_CLOSED"), (False, "NOT_A_MEMBER")])
def test_a_client_that_is_dropped_while_it_waits_is_told_at_once(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream, closed: bool, reason: str
) -> None:
    table = shard.install()
    waiting = [
        stream.send(part(first, 1, 2, 0, table, [1], [[1, 1]], budget_s=0)),
        stream.send(assign_request(first, 2, table, step=2, budget_s=0)),
    ]
    with raw_stream(first.channel) as other:
        pull = other.send(pull_of(first, [table], [1], step=2, budget_s=0))
        parked(first, 3)
        if closed:
            group.end_client(first)
        else:
            group.leave(first)
        assert reason_of(lambda: other.answer(pull)) == reason
    assert reason_of(lambda: stream.answer(waiting[0])) == reason
    assert reason_of(lambda: stream.answer(waiting[1])) == ("CLIENT_CLOSED" if closed else "SEQUENCE_GAP")


def test_a_repeat_of_a_staged_part_is_answered_after_its_client_left_the_group(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    stream.ask(without_gradient(first, 1, 1, 0))
    group.leave(first)
    assert stream.ask(without_gradient(first, 1, 1, 0)).push.repeated_number


def test_more_waiting_requests_than_places_are_refused_with_a_hint_and_take_nothing() -> None:
    with held_shard(max_parked=2) as shard, shard.client() as first, shard.client() as second:
        group, table = HeldGroup(shard, SYNC, [first, second]), shard.install()
        with raw_stream(first.channel) as stream, raw_stream(second.channel) as other:
            waiting = stream.send(part(first, 1, 2, 0, table, [1], [[1, 1]]))
            other.send(pull_of(second, [table], [1], step=2))
            parked(first, 2)
            for request in (
                part(second, 1, 2, 1, table, [1], [[1, 1]]),
                pull_of(second, [table], [1], step=2),
                embedding_pb2.ArriveRequest(header=second.header(1, step=1, rank=1)),
            ):
                with pytest.raises(ShardamError, match="at most 2 may") as error:
                    other.ask(request)
                assert (error.value.reason, float(error.value.metadata["retry_after_s"]) > 0) == ("QUEUE_FULL", True)
            group.decide(1, [], end="abstained")
            assert stream.answer(waiting).push.staged
            assert other.ask(part(second, 1, 2, 1, table, [1], [[1, 1]])).push.staged


def test_parked_parts_hold_their_stream_at_its_bound_of_bytes(
    shard: HeldShard, first: RawClient, group: HeldGroup, stream: RawStream
) -> None:
    table = shard.install(1024)
    rows = np.ones((4000, 1024), "<f4")  # 16 MB each; 64 MiB may be held
    sent = [stream.send(part(first, 1, 2, 0, table, range(4000), rows, budget_s=0)) for _ in range(6)]
    parked(first, 5)
    assert first.status().queue_bytes == 0
    with raw_stream(first.channel) as other:
        assert other.ask(pull_of(first, [table], [1])).pull.rows
    group.decide(1, [], end="abstained")
    answers = [stream.answer(request_id).push for request_id in sent]
    assert [answer.repeated_number for answer in answers] == [False, *[True] * 5]


def test_an_arrival_waits_in_parking_while_later_messages_pass_it_until_its_step_is_decided() -> None:
    with held_shard() as shard, shard.client() as client, raw_stream(client.channel) as stream:
        table = shard.install()
        HeldGroup(shard, GroupTerms("sync", 2), [client])
        stream.ask(without_gradient(client, 1, 1, 0))
        arrive = stream.send(embedding_pb2.ArriveRequest(header=client.header(1, step=1, budget_s=60)))
        parked(client, 1)
        assert stream.ask(pull_of(client, [table], [1])).pull.rows
        assert not stream.answers.get(arrive)
        again = stream.ask(embedding_pb2.ArriveRequest(header=client.header(1, step=1, budget_s=0.05))).arrive
        assert not again.HasField("result")  # rank 1 is not there yet, and this one's time is up
        assert client.status().parked_requests == 1


def test_a_group_of_one_steps_by_its_part_and_its_arrival() -> None:
    with held_shard() as shard, shard.client() as client, raw_stream(client.channel) as stream:
        table = shard.install()
        HeldGroup(shard, GroupTerms("sync", 1), [client])
        for step in (1, 2, 3):
            staged = stream.ask(part(client, step, step, 0, table, [1], [[1, 1]])).push
            arrive = embedding_pb2.ArriveRequest(header=client.header(step, step=step), peaks=staged.peaks)
            result = stream.ask(arrive).arrive.result
            assert (result.step, result.end, result.steps[0].table_step) == (step, group_pb2.STEP_END_APPLIED, step)
            assert stream.ask(pull_of(client, [table], [1], step=step + 1)).pull.steps[0].table_step == step


def test_an_arrival_elsewhere_than_on_home_is_refused(shard: HeldShard, first: RawClient, stream: RawStream) -> None:
    shard.identity.index = 1
    arrive = embedding_pb2.ArriveRequest(header=first.header(1, step=1))
    assert refused(stream, arrive) == "WRONG_ROLE"
    assert first.status().parked_requests == 0


def test_an_arrival_is_given_up_with_its_stream() -> None:
    with held_shard() as shard, shard.client() as client:
        HeldGroup(shard, GroupTerms("sync", 2), [client])
        with raw_stream(client.channel) as stream:
            stream.ask(without_gradient(client, 1, 1, 0))
            stream.send(embedding_pb2.ArriveRequest(header=client.header(1, step=1, budget_s=60)))
            parked(client, 1)
        parked(client, 0)
        wait_for("the stream's handler to end", lambda: shard.shard.streams.num_open == 0)
