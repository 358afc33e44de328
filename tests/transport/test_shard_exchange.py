"""The Exchange stream of a shard: order, answers by id, refusals, bounds, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import numpy as np
import pytest
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import RawClient, id_bytes
from shardam_testing.raw_stream import RawStream, Request, chunks_of, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.channels import open_channel
from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2, shard_pb2


def reason_of(action: Callable[[], object]) -> str:
    with pytest.raises(ShardamError) as error:
        action()
    return error.value.reason


def pull_request(
    client: RawClient, table: common_pb2.TableInfo, row_ids: list[int], **changes: float | str
) -> embedding_pb2.PullRequest:
    section = common_pb2.Section(table_id=table.table_id, num_rows=len(row_ids), dtype=common_pb2.DTYPE_FLOAT32)
    return embedding_pb2.PullRequest(header=client.header(0, **changes), sections=[section], row_ids=id_bytes(row_ids))


def requests_of_every_kind(client: RawClient, table: common_pb2.TableInfo) -> Iterator[Request]:
    """Yields good and bad requests, in an order in which each has one right answer."""
    yield client.push_request(1, table, [1, 2, 1], [[1, 2], [3, 4], [5, 6]])
    yield client.push_request(1, table, [1, 2, 1], [[1, 2], [3, 4], [5, 6]])
    yield client.push_request(1, table, [1], [[9, 9]])
    yield client.push_request(3, table, [1], [[1, 1]])
    yield client.push_request(2, table, [1], [[np.inf, 1]])
    yield client.push_request(2, table, [1], [[1, 1, 1]])
    yield client.push_request(2, table, [1], [[1, 1]], epoch=9)
    yield pull_request(client, table, [1, 2, 3])
    yield pull_request(client, common_pb2.TableInfo(table_id=99), [1])
    yield embedding_pb2.CloseNumberRequest(
        header=client.header(2), kind=embedding_pb2.CLOSE_KIND_VOID, table_ids=[table.table_id]
    )
    yield embedding_pb2.CloseNumberRequest(header=client.header(3), kind=embedding_pb2.CLOSE_KIND_UNSPECIFIED)
    yield row_pb2.AssignRowsRequest(
        header=client.header(3), table_id=table.table_id, row_ids=id_bytes([4]), weight=np.ones(2, "<f4").tobytes()
    )
    yield row_pb2.ClearMomentsRequest(header=client.header(4), table_id=table.table_id, row_ids=id_bytes([1, 9]))
    yield row_pb2.DeleteRowsRequest(header=client.header(5), table_id=table.table_id, row_ids=id_bytes([2, 9]))
    yield row_pb2.DeleteRowsRequest(header=client.header(5), table_id=table.table_id, row_ids=id_bytes([2, 9]))
    yield pull_request(client, table, [1, 2, 3, 4])


def call_unary(client: RawClient, request: Request) -> object:
    methods = {
        embedding_pb2.PullRequest: client.embedding.Pull,
        embedding_pb2.PushRequest: client.embedding.Push,
        embedding_pb2.CloseNumberRequest: client.embedding.CloseNumber,
        row_pb2.AssignRowsRequest: client.row.AssignRows,
        row_pb2.DeleteRowsRequest: client.row.DeleteRows,
        row_pb2.ClearMomentsRequest: client.row.ClearMoments,
    }
    return client.call(methods[type(request)], request)  # type: ignore[arg-type]  # its own request


def ask_stream(stream: RawStream, request: Request) -> object:
    answer = stream.ask(request)
    return getattr(answer, answer.WhichOneof("response") or "")


def bare_answer(answer: object) -> object:
    """Returns an answer without what is random or measured in each process, and without its padding."""
    for name in ("incarnation", "lineage", "shard_ns", "kernel_ns"):
        answer.header.ClearField(name)  # type: ignore[attr-defined]  # every answer has one
    if isinstance(answer, embedding_pb2.PullResponse):
        answer.ClearField("padding")
    return answer


def test_a_stream_and_unary_calls_give_the_same_answers_and_bits() -> None:
    seen: list[list[str]] = []
    for streamed in (False, True):
        with held_shard() as shard, shard.client() as client, raw_stream(client.channel) as stream:
            client.client_id = b"the same client."
            client.open()
            shard.identity.incarnation = client.entry.incarnation
            table = shard.install()
            answers = []
            for request in requests_of_every_kind(client, table):
                try:
                    answer = ask_stream(stream, request) if streamed else call_unary(client, request)
                    answer = bare_answer(answer)
                    answers.append(str(answer))
                except ShardamError as error:
                    answers.append(f"{error.reason} {error.message} {sorted(error.metadata.items())}")
            answers.append(str(client.read(table, [1, 2, 3, 4]).rows))
            seen.append(answers)
    assert seen[0] == seen[1]
    assert sum(answer.startswith(("SEQUENCE", "NON_FINITE", "WRONG", "STALE", "BAD", "UNKNOWN")) for answer in seen[0]) == 7


def test_a_pull_waits_for_the_changes_before_it_while_later_requests_pass_it(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    with shard.held_changes():
        pushes = [stream.send(client.push_request(number, table, [1], [[1, 1]])) for number in (1, 2)]
        waiting = stream.send(pull_request(client, table, [1]))
        bad = stream.send(pull_request(client, common_pb2.TableInfo(table_id=99), [1]))
        assert reason_of(lambda: stream.answer(bad)) == "UNKNOWN_TABLE"
        wait_for("the pull to be parked", lambda: client.status().parked_requests == 1)
        assert stream.order == [bad]
        later = stream.send(client.push_request(3, table, [1], [[1, 1]]))
        with raw_stream(client.channel) as other:  # another stream's pull has no change to wait for
            early = other.ask(pull_request(client, table, [1])).pull
            assert (early.steps[0].table_step, early.header.last_number) == (0, 0)
    late = stream.answer(waiting).pull
    assert late.steps[0].table_step == late.header.last_number >= 2  # what it says to have seen is what it read
    assert [stream.answer(push).push.steps[0].table_step for push in (*pushes, later)] == [1, 2, 3]
    assert client.status().parked_requests == 0


def test_many_pushes_in_flight_are_applied_in_their_order_and_a_gap_is_resent(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    with shard.held_changes():
        early = [stream.send(client.push_request(number, table, [1], [[1, 1]])) for number in (2, 3)]
        sent = [stream.send(client.push_request(number, table, [number], [[1, 1]])) for number in range(1, 33)]
    for request_id in early:
        assert reason_of(lambda request_id=request_id: stream.answer(request_id)) == "SEQUENCE_GAP"  # type: ignore[misc]  # bound at once
    assert [stream.answer(request_id).push.steps[0].table_step for request_id in sent] == list(range(1, 33))
    again = stream.ask(client.push_request(32, table, [32], [[1, 1]]))
    assert again.push.repeated_number


def test_a_retryable_refusal_leaves_the_number_open_and_the_next_one_waits(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    with shard.held_changes():
        refused = stream.send(client.push_request(1, table, [1], [[1, 1]], epoch=7))
        following = stream.send(client.push_request(2, table, [1], [[1, 1]]))
    assert reason_of(lambda: stream.answer(refused)) == "STALE_ROUTE"
    assert reason_of(lambda: stream.answer(following)) == "SEQUENCE_GAP"
    for number in (1, 2):
        assert stream.ask(client.push_request(number, table, [1], [[1, 1]])).push.steps[0].table_step == number


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": 0}, "BAD_OPTION"),
        ({"protocol_version": 9}, "VERSION_MISMATCH"),
        ({"cluster_id": "other"}, "WRONG_CLUSTER"),
        ({"timeline": 2}, "NOT_READY"),  # of a restore that this shard has not taken over yet
        ({"incarnation": 7}, "NEW_INCARNATION"),
        ({"epoch": 7}, "STALE_ROUTE"),
        ({"rank": 1}, "BAD_OPTION"),
        ({"budget_s": float("nan")}, "BAD_OPTION"),
        ({"budget_s": -1.0}, "BAD_OPTION"),
        ({"num_chunks": 2}, "BAD_OPTION"),
    ],
)
def test_a_wrong_header_is_refused_and_the_stream_goes_on(
    shard: HeldShard, client: RawClient, stream: RawStream, changes: dict[str, float | str], reason: str
) -> None:
    table = shard.install()
    assert reason_of(lambda: stream.ask(pull_request(client, table, [1], **changes))) == reason
    assert stream.ask(pull_request(client, table, [1])).pull.rows


def test_a_client_of_the_timeline_before_a_restore_is_told_so(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    table = shard.install()
    shard.identity.timeline = 2
    assert reason_of(lambda: stream.ask(pull_request(client, table, [1], timeline=1))) == "STALE_TIMELINE"
    assert stream.ask(pull_request(client, table, [1], timeline=2)).pull.rows


def test_a_message_without_a_request_is_refused_and_the_stream_goes_on(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    stream.send_message(embedding_pb2.ExchangeRequest())
    assert reason_of(lambda: stream.answer(0)) == "BAD_OPTION"
    assert stream.ask(pull_request(client, shard.install(), [1])).pull.rows
    assert 'reason="BAD_OPTION",shard="0"} 1.0' in shard.shard.metrics.text()


@pytest.mark.case("C088")
@pytest.mark.parametrize("method", ["Exchange", "Push"])
def test_bytes_that_are_no_request_end_the_call_with_a_reason(shard: HeldShard, method: str) -> None:
    def send(channel: grpc.Channel, data: bytes) -> None:
        path = f"/shardam.v1.EmbeddingService/{method}"
        if method == "Push":
            channel.unary_unary(path)(data, timeout=30)  # type: ignore[arg-type]  # the stubs know no bytes
        else:
            list(channel.stream_stream(path)(iter([data]), timeout=30))  # type: ignore[arg-type]  # the stubs know no bytes

    with open_channel(shard.address) as channel, pytest.raises(grpc.RpcError, match="matching shardam packages") as error:
        send(channel, b"\xff\xff\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_state_that_does_not_serve_refuses_each_request(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    table = shard.install()
    for state, reason in ((shard_pb2.SERVING_STATE_LOST, "SHARD_LOST"), (shard_pb2.SERVING_STATE_STARTING, "NOT_READY")):
        shard.shard.serving = state
        assert reason_of(lambda: stream.ask(pull_request(client, table, [1]))) == reason
    shard.shard.serving = shard_pb2.SERVING_STATE_SERVING
    assert stream.ask(pull_request(client, table, [1])).pull.rows


def test_an_accepted_change_is_applied_though_its_stream_is_gone(shard: HeldShard, client: RawClient) -> None:
    table = shard.install()
    with shard.held_changes(), raw_stream(client.channel) as stream:
        for number in (1, 2):
            stream.send(client.push_request(number, table, [1], [[1, 1]]))
        wait_for("both to be accepted", lambda: client.status().queue_depth == 3)
        stream.cancel()
        wait_for("the stream's handler to end", lambda: shard.shard.streams.num_open == 0)
    assert client.push(3, table, [1], [[1, 1]]).steps[0].table_step == 3


def test_a_pull_that_waits_beyond_its_budget_is_refused_and_a_push_is_not(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    with shard.held_changes():
        push = stream.send(client.push_request(1, table, [1], [[1, 1]], budget_s=0.01))
        pull = stream.send(pull_request(client, table, [1], budget_s=0.01))
        assert reason_of(lambda: stream.answer(pull)) == "SHARD_UNREACHABLE"
        assert client.status().parked_requests == 0
    assert stream.answer(push).push.steps[0].table_step == 1


def test_more_parked_requests_than_allowed_are_refused_with_a_hint() -> None:
    with held_shard(max_parked=2) as shard, shard.client() as client:
        table = shard.install()
        with shard.held_changes(), raw_stream(client.channel) as one, raw_stream(client.channel) as other:
            one.send(client.push_request(1, table, [1], [[1, 1]]))
            other.send(client.push_request(2, table, [1], [[1, 1]]))
            parked = [stream.send(pull_request(client, table, [1])) for stream in (one, other)]
            wait_for("both to be parked", lambda: client.status().parked_requests == 2)
            with pytest.raises(ShardamError, match="at most 2 may") as error:
                one.ask(pull_request(client, table, [1]))
            assert (error.value.reason, float(error.value.metadata["retry_after_s"]) > 0) == ("QUEUE_FULL", True)
            one.cancel()
            wait_for("its place to be free", lambda: client.status().parked_requests == 1)
        assert parked


def test_a_full_queue_holds_streams_by_flow_control_and_refuses_unary_calls_with_a_hint() -> None:
    limit = 2**20
    with held_shard(max_queue_bytes=limit) as shard, shard.client() as client, raw_stream(client.channel) as stream:
        table = shard.install(64)
        gradients = np.ones((1000, 64))  # a quarter of the limit
        with shard.held_changes():
            sent = [stream.send(client.push_request(number, table, list(range(1000)), gradients)) for number in range(1, 21)]
            wait_for("the queue to be full", lambda: client.status().queue_bytes >= limit)
            with pytest.raises(ShardamError) as error:
                client.push(1, table, [1], np.ones((1, 64)))
            assert (error.value.reason, float(error.value.metadata["retry_after_s"]) > 0) == ("QUEUE_FULL", True)
            assert reason_of(lambda: client.close_number(1, embedding_pb2.CLOSE_KIND_SKIP)) == "QUEUE_FULL"
            status = client.status()
            assert (status.queue_depth, status.queue_bytes < 2 * limit) == (5, True)  # four pushes, and what holds them
        assert [stream.answer(request_id).push.steps[0].table_step for request_id in sent] == list(range(1, 21))
        assert client.status().queue_bytes == 0


def test_a_client_that_reads_no_answers_holds_a_bounded_number_of_them(shard: HeldShard, client: RawClient) -> None:
    table = shard.install(1024)
    rows = list(range(1000))  # 4 MB an answer; 64 MiB may be unanswered
    with raw_stream(client.channel, read=False) as stream:
        for _ in range(200):
            stream.send(pull_request(client, table, rows))
        pulls = shard.shard.metrics.pulls._value.get
        wait_for("the stream to be held", lambda: pulls() >= 15)
        with raw_stream(client.channel) as other:
            for _ in range(20):
                assert other.ask(pull_request(client, table, [1])).pull.rows
        assert pulls() < 100  # the window is 16 of them; gRPC and the sockets hold a few more
    wait_for("the stream's handler to end", lambda: shard.shard.streams.num_open == 0)


def test_an_answer_larger_than_a_message_is_refused_and_the_stream_goes_on(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install(65_536)
    assert reason_of(lambda: stream.ask(pull_request(client, table, [1] * 256))) == "MESSAGE_TOO_LARGE"
    assert len(stream.ask(pull_request(client, table, [1] * 8)).pull.rows) == 8 * 65_536 * 4


def test_a_draining_stream_answers_what_it_accepted_refuses_the_rest_and_ends(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    idle = RawStream(client.channel)
    with shard.held_changes():
        push = stream.send(client.push_request(1, table, [1], [[1, 1]]))
        pull = stream.send(pull_request(client, table, [1]))
        chunk = stream.send(chunks_of(client.push_request(2, table, [1], [[1, 1]]), 8)[0])
        wait_for("all to be accepted", lambda: client.status().parked_requests == 1 and client.status().reserved_bytes > 0)
        shard.shard.serving = shard_pb2.SERVING_STATE_DRAINING
        shard.on_loop(shard.shard.streams.drain)
        assert idle.ended.wait(30)
        assert reason_of(lambda: stream.answer(chunk)) == "NOT_READY"
        assert reason_of(lambda: stream.ask(client.push_request(2, table, [1], [[1, 1]]))) == "NOT_READY"
        assert client.status().reserved_bytes == 0
        late = RawStream(client.channel)
        assert late.ended.wait(30)
        assert late.error is not None
        assert late.error.reason == "NOT_READY"
    assert stream.answer(push).push.steps[0].table_step == 1
    assert stream.answer(pull).pull.steps[0].table_step == 1
    assert stream.ended.wait(30)
    assert (stream.error, idle.error) == (None, None)
    shard.stop_server(60)  # nothing holds it up


@pytest.mark.case("C105")
@pytest.mark.parametrize("failure", [RuntimeError("no such luck"), asyncio.CancelledError()])
def test_a_handler_that_raises_gives_the_client_a_status_with_the_request_id(
    shard: HeldShard, client: RawClient, stream: RawStream, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    table = shard.install()

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(type(shard.shard.state), "push", fail)
        patch.setattr("shardam_server.shard.services.pulls.decode_sections", fail)
        asks: list[Callable[[Request], object]] = [partial(ask_stream, stream), partial(call_unary, client)]
        for ask in asks:
            for request in (client.push_request(1, table, [1], [[1, 1]]), pull_request(client, table, [1])):
                with pytest.raises(ShardamError, match=rf"under request id {request.header.request_id}$") as error:
                    ask(request)
                assert error.value.reason == "INTERNAL"
    assert stream.ask(client.push_request(1, table, [1], [[1, 1]])).push.steps[0].table_step == 1


@pytest.mark.case("C105")
@pytest.mark.parametrize("failure", [RuntimeError("no such luck"), asyncio.CancelledError()])
def test_a_stream_whose_handler_raises_ends_with_a_status(
    shard: HeldShard, client: RawClient, stream: RawStream, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("shardam_server.shard.services.exchange.ExchangeStream._take", fail)
    stream.send(pull_request(client, shard.install(), [1]))
    assert stream.ended.wait(30)
    assert stream.error is not None
    assert stream.error.reason == "INTERNAL"
    wait_for("its handler to end", lambda: shard.shard.streams.num_open == 0)


def test_a_stream_needs_the_token() -> None:
    with held_shard(token="s3cret") as shard, shard.client() as client:
        stranger = RawStream(client.channel)
        assert stranger.ended.wait(30)
        assert stranger.error is not None
        assert stranger.error.reason == "BAD_TOKEN"
        with raw_stream(client.channel, "s3cret") as stream:
            assert stream.ask(pull_request(client, shard.install(), [1])).pull.rows
