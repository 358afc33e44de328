"""Connections that are cut within a push, and clients that cancel: nothing is applied in part, nothing stays reserved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from shardam_testing.cutting_proxy import cutting_proxy
from shardam_testing.held_shard import HeldShard
from shardam_testing.processes import running_shards
from shardam_testing.raw_client import RawClient, id_bytes, raw_client
from shardam_testing.raw_stream import chunks_of, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.channels import open_channel
from shardam_proto.errors import ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2

NUM_ROWS, DIM = 2000, 16
"""A push of 144 kB: more than one window of HTTP/2, so that the shard has taken a part of it when it is cut."""

Send = Callable[[grpc.Channel, embedding_pb2.PushRequest], embedding_pb2.PushResponse]


def send_unary(channel: grpc.Channel, push: embedding_pb2.PushRequest) -> embedding_pb2.PushResponse:
    answer: embedding_pb2.PushResponse = channel.unary_unary(
        "/shardam.v1.EmbeddingService/Push",
        request_serializer=embedding_pb2.PushRequest.SerializeToString,
        response_deserializer=embedding_pb2.PushResponse.FromString,
    )(push, timeout=30)
    return answer


def send_streamed(channel: grpc.Channel, push: embedding_pb2.PushRequest) -> embedding_pb2.PushResponse:
    with raw_stream(channel) as stream:
        return stream.ask(push).push


def send_chunked(channel: grpc.Channel, push: embedding_pb2.PushRequest) -> embedding_pb2.PushResponse:
    with raw_stream(channel) as stream:
        for chunk in chunks_of(push, 10_000):
            stream.send(chunk)
        return stream.answer(push.header.request_id).push


@pytest.mark.case("C105")
@pytest.mark.parametrize("send", [send_unary, send_streamed, send_chunked])
def test_a_push_cut_in_any_tenth_is_not_applied_and_its_repeat_is(shard: HeldShard, send: Send) -> None:
    table = shard.install(DIM)
    gradients = np.ones((NUM_ROWS, DIM))
    with shard.client() as client, cutting_proxy(shard.address) as proxy:

        def push(number: int) -> embedding_pb2.PushRequest:
            return client.push_request(number, table, list(range(NUM_ROWS)), gradients)

        with open_channel(proxy.address) as channel:
            assert send(channel, push(1)).steps[0].table_step == 1
        whole = proxy.num_bytes
        for tenth in range(1, 10):
            proxy.cut_after = whole * tenth // 10
            with open_channel(proxy.address) as channel, pytest.raises((ShardamError, grpc.RpcError)):
                send(channel, push(tenth + 1))
            wait_for("the shard to see the cut", lambda: _is_idle(shard, client))
            assert client.open().header.last_number == tenth
            assert send(client.channel, push(tenth + 1)).steps[0].table_step == tenth + 1
        assert proxy.num_cuts >= 9


@pytest.mark.parametrize("send", [send_unary, send_streamed, send_chunked])
def test_a_push_whose_answer_is_lost_is_applied_once(shard: HeldShard, send: Send) -> None:
    table = shard.install(DIM)
    with shard.client() as client:
        push = client.push_request(1, table, list(range(NUM_ROWS)), np.ones((NUM_ROWS, DIM)))
        with shard.held_changes(), open_channel(shard.address) as channel:
            failures: list[Exception] = []
            sender = threading.Thread(target=lambda: _send_in_vain(send, channel, push, failures))
            sender.start()
            wait_for("the push to be accepted", lambda: client.status().queue_depth == 2)
            channel.close()
            sender.join(30)
            assert failures
        again = send(client.channel, push)
        assert (again.repeated_number, again.steps[0].table_step) == (True, 1)


def _send_in_vain(send: Send, channel: grpc.Channel, push: embedding_pb2.PushRequest, failures: list[Exception]) -> None:
    try:
        send(channel, push)
    except (ShardamError, grpc.RpcError, ValueError) as error:  # grpc raises ValueError on a closed channel
        failures.append(error)


def _is_idle(shard: HeldShard, client: RawClient) -> bool:
    status = client.status()
    waiting = status.reserved_bytes + status.queue_depth + status.parked_requests
    return shard.shard.streams.num_open == 0 and waiting == 0


@pytest.mark.case("C105")
def test_pulls_that_are_cancelled_before_they_began_are_never_read(shard: HeldShard) -> None:
    table = shard.install()
    lock = shard.shard.state.table(table.table_id).lock
    with shard.client() as client:
        with lock.write():  # as a long change of this table
            calls = [client.embedding.Pull.future(_pull(client, table, 1)) for _ in range(100)]
            with raw_stream(client.channel) as stream:
                for _ in range(50):
                    stream.send(_pull(client, table, 1))
                reads = shard.shard.sequencer
                wait_for("all to wait", lambda: reads._num_reads == 150)
                for call in calls:
                    call.cancel()
            wait_for("their handlers to be free", lambda: reads._num_reads == 0, 10)
        assert client.pull(table, [1]).shape == (1, 2)
        assert shard.shard.metrics.pulls._value.get() <= 10  # those that had a thread, and the last


@pytest.mark.case("C105")
def test_a_hundred_large_pulls_cancelled_midway_leave_no_thread_and_no_memory(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with (
        running_shards(tmp_path, lease_s="60") as shards,  # a busy machine is no reason to suspend
        raw_client(shards.view()) as client,
        raw_client(shards.view()) as other,
    ):
        client.open()
        table = client.create(TableSpec("t", 65_536))[0]
        base = _resident_mib_after_large_pulls(client, table)
        calls = [client.embedding.Pull.future(_pull(client, table, 200)) for _ in range(100)]  # 50 MB
        wait_for("the first to be answered", lambda: any(call.done() for call in calls))
        cancelled = sum(call.cancel() for call in calls)
        start = time.monotonic()
        assert other.pull(table, [1]).shape == (1, 65_536)
        seconds = time.monotonic() - start
        assert cancelled > 50
        assert seconds < 20  # less than one on an idle machine
        wait_for("its memory to be free", lambda: other.status().resident_bytes / 2**20 < base + 300)
        record_property("summary", f"a pull was answered {seconds:.2f} s after {cancelled} large ones were cancelled")


def _resident_mib_after_large_pulls(client: RawClient, table: common_pb2.TableInfo) -> float:
    calls = [client.embedding.Pull.future(_pull(client, table, 200)) for _ in range(8)]
    for call in calls:
        call.result()
    return client.status().resident_bytes / 2**20


def _pull(client: RawClient, table: common_pb2.TableInfo, num_rows: int) -> embedding_pb2.PullRequest:
    section = common_pb2.Section(table_id=table.table_id, num_rows=num_rows, dtype=common_pb2.DTYPE_FLOAT32)
    return embedding_pb2.PullRequest(header=client.header(), sections=[section], row_ids=id_bytes(range(num_rows)))
