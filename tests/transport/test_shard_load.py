"""One shard under load: large messages, busy threads, many clients, long silence, a drain with everything in flight."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shardam_testing.held_group import part
from shardam_testing.held_shard import held_shard
from shardam_testing.processes import Shards, running_shards
from shardam_testing.raw_client import RawClient, id_bytes, raw_client
from shardam_testing.raw_stream import RawStream, chunks_of, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.channels import open_channel
from shardam_proto.errors import ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, shard_pb2
from shardam_server.shard.http_listener import HttpListener

Record = Callable[[str, object], None]

LIVE_S = 1.0
"""A shard that is alive says so within this time, whatever it has to do."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    with running_shards(tmp_path_factory.mktemp("shards"), lease_s="60") as shards:
        yield shards


@pytest.fixture
def client(shards: Shards) -> Iterator[RawClient]:
    with raw_client(shards.view()) as client:
        client.open()
        yield client


def pull_request(client: RawClient, table: common_pb2.TableInfo, row_ids: range) -> embedding_pb2.PullRequest:
    section = common_pb2.Section(table_id=table.table_id, num_rows=len(row_ids), dtype=common_pb2.DTYPE_FLOAT32)
    return embedding_pb2.PullRequest(header=client.header(), sections=[section], row_ids=id_bytes(row_ids))


def check_health(channel: grpc.Channel, timeout_s: float = LIVE_S) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)  # type: ignore[attr-defined]  # not in the stubs
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.case("C087")
def test_a_push_and_a_pull_of_20_mb_work_with_default_settings_whole_and_in_chunks(client: RawClient) -> None:
    num_rows = 20_000
    table = client.create(TableSpec("large", 256))[0]
    gradients = np.random.default_rng(1).normal(size=(num_rows, 256)).astype("<f4")

    def push(number: int) -> embedding_pb2.PushRequest:
        return client.push_request(number, table, range(num_rows), gradients)

    with raw_stream(client.channel) as stream:
        assert client.call(client.embedding.Push, push(1)).steps[0].table_step == 1
        assert stream.ask(push(2)).push.steps[0].table_step == 2
        chunks = chunks_of(push(3), 2**20)
        for chunk in chunks:
            stream.send(chunk)
        assert stream.answer(chunks[0].header.request_id).push.steps[0].table_step == 3
        assert client.call(client.embedding.Push, push(3)).repeated_number
        assert stream.ask(client.push_request(4, table, [0], gradients[:1])).push.steps[0].table_step == 4
        pulled = stream.ask(pull_request(client, table, range(num_rows))).pull
        assert pulled.rows == client.call(client.embedding.Pull, pull_request(client, table, range(num_rows))).rows
        assert len(pulled.rows) == num_rows * 256 * 4
        assert stream.ask(pull_request(client, table, range(1))).pull.rows == pulled.rows[: 256 * 4]


@pytest.mark.case("C088")
def test_a_message_of_600_mb_is_refused_under_the_cap_and_its_memory_comes_back(client: RawClient) -> None:
    def send_unary(channel: grpc.Channel) -> None:
        channel.unary_unary("/shardam.v1.EmbeddingService/Push")(bytes(size), timeout=60)  # type: ignore[arg-type]  # the stubs know no bytes

    def send_streamed(channel: grpc.Channel) -> None:
        list(channel.stream_stream("/shardam.v1.EmbeddingService/Exchange")(iter([bytes(size)]), timeout=60))  # type: ignore[arg-type]

    size = 600 * 10**6
    base = client.status().resident_bytes
    unlimited = [("grpc.max_send_message_length", -1)]
    for send in (send_unary, send_streamed):
        with open_channel(client.entry.address, unlimited) as channel, pytest.raises(grpc.RpcError) as error:
            send(channel)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.status().resident_bytes < base + 100 * 2**20
    check_health(client.channel, 10)


@pytest.mark.case("C088")
@pytest.mark.parametrize(
    "data",
    [
        np.random.default_rng(7).bytes(100_000),
        b"GET / HTTP/1.1\r\nHost: shard\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
    ],
    ids=["random", "http", "broken http/2"],
)
def test_alien_bytes_at_the_port_end_that_connection_alone(client: RawClient, data: bytes) -> None:
    host, _, port = client.entry.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.settimeout(30)
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            while connection.recv(4096):
                pass
    check_health(client.channel, 10)


@pytest.mark.case("C095")
def test_health_status_and_http_answer_while_every_thread_is_busy_and_what_is_too_much_is_refused_with_a_hint() -> None:
    with held_shard(max_queue_bytes=2**20) as shard, contextlib.ExitStack() as stack:
        table = shard.install(1024)
        lock = shard.shard.state.table(table.table_id).lock
        http = HttpListener(shard.shard, "127.0.0.1", 0, None)
        http.start()
        stack.callback(http.close)
        clients = [stack.enter_context(shard.client()) for _ in range(50)]
        stack.enter_context(lock.write())  # every reader that takes up a pull waits
        stack.enter_context(shard.held_changes())
        for client in clients:
            stream = stack.enter_context(raw_stream(client.channel))
            stream.send(client.push_request(1, table, range(20), np.ones((20, 1024))))
            stream.send(pull_request(client, table, range(1)))
            client.embedding.Pull.future(pull_request(client, table, range(1)))
        probe = stack.enter_context(shard.client(opened=False))
        wait_for("the queue to be full", lambda: probe.status().queue_bytes >= 2**20)
        start = time.monotonic()
        status = probe.status()
        assert time.monotonic() - start < LIVE_S
        assert status.queue_depth > 10
        assert status.parked_requests > 0
        check_health(probe.channel)
        with urllib.request.urlopen(f"http://127.0.0.1:{http.port}/healthz", timeout=LIVE_S) as answer:
            assert answer.read() == b"live\n"
        with pytest.raises(ShardamError) as error:
            probe.push(1, table, [1], np.ones((1, 1024)))
        assert (error.value.reason, float(error.value.metadata["retry_after_s"]) > 0) == ("QUEUE_FULL", True)


@pytest.mark.case("C095")
def test_reads_beyond_what_may_wait_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardam_server.shard.sequencer.MAX_READS", 3)
    with held_shard() as shard, shard.client() as client:
        table = shard.install()
        with shard.shard.state.table(table.table_id).lock.write():
            waiting = [client.embedding.Pull.future(pull_request(client, table, range(1))) for _ in range(3)]
            wait_for("them to wait", lambda: shard.shard.sequencer._num_reads == 3)
            with pytest.raises(ShardamError) as error:
                client.pull(table, [1])
            assert (error.value.reason, float(error.value.metadata["retry_after_s"]) > 0) == ("QUEUE_FULL", True)
        assert all(call.result(30).rows for call in waiting)


def test_the_bounds_are_metrics_and_in_the_status(client: RawClient) -> None:
    table = client.create(TableSpec("bounds", 2))[0]
    with raw_stream(client.channel) as stream:
        stream.send(chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8)[0])
        wait_for("the part to be open", lambda: client.status().reserved_bytes == 16)
        values = gauges(client)
    named = ("shardam_queue_bytes", "shardam_reserved_bytes", "shardam_parked_requests", "shardam_streams")
    assert [values[name] for name in named] == [0, 16, 0, 1]


def gauges(client: RawClient) -> dict[str, float]:
    """Returns the metrics that have no other labels than the shard's."""
    text = client.call(client.shard.GetMetrics, shard_pb2.GetMetricsRequest(header=client.header())).text
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if "{" in line}


def test_staged_parts_are_metrics_until_their_client_is_gone(client: RawClient) -> None:
    client = RawClient(client.channel, client.entry, client.cluster_id, client.epoch)
    client.open(heartbeats=True)
    table = client.create(TableSpec("staged", 2))[0]
    terms = group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_SYNC, reduce=group_pb2.REDUCE_SUM, world_size=2)
    join = embedding_pb2.JoinGroupRequest(header=client.header(), group="workers", terms=terms)
    assert client.call(client.embedding.JoinGroup, join).first_step == 1
    client.call(client.embedding.Push, part(client, 1, 1, 0, table, [1, 2, 1], np.ones((3, 2))))
    values = gauges(client)
    assert (values["shardam_staged_parts"], values["shardam_staged_bytes"]) == (1, 2 * (8 + 8))  # summed by row
    client.leave()
    values = gauges(client)
    assert (values["shardam_staged_parts"], values["shardam_staged_bytes"]) == (0, 0)


@pytest.mark.case("C097")
def test_pulls_of_other_tables_pass_those_that_wait_for_a_change() -> None:
    with held_shard() as shard, shard.client() as client:
        busy, free = shard.install(), shard.install()
        with shard.shard.state.table(busy.table_id).lock.write():  # as a large change of this table
            waiting = [client.embedding.Pull.future(pull_request(client, busy, range(1))) for _ in range(100)]
            wait_for("them to wait", lambda: shard.shard.sequencer._num_reads == 100)
            for _ in range(100):
                assert client.pull(free, [1]).shape == (1, 2)
            assert not any(call.done() for call in waiting)
        assert all(call.result(30).rows for call in waiting)


@pytest.mark.case("C097")
def test_small_pulls_are_quick_while_large_updates_run(client: RawClient, record_property: Record) -> None:
    large, small = client.create(TableSpec("updated", 256), TableSpec("small", 8))
    gradients = np.ones((15_000, 256), "<f4")
    with raw_stream(client.channel) as stream, open_channel(client.entry.address) as channel, ThreadPoolExecutor(1) as pool:
        reader = RawClient(channel, client.entry, client.cluster_id, client.epoch)

        def timed_pulls() -> list[float]:
            times = [time.monotonic()]
            for _ in range(200):
                reader.pull(small, [1, 2, 3])
                times.append(time.monotonic())
            return np.diff(times).tolist()

        sent = [stream.send(client.push_request(number, large, range(15_000), gradients)) for number in range(1, 5)]
        pulls = pool.submit(timed_pulls)
        while not pulls.done():  # as many updates as the pulls take, four in flight
            stream.answer(sent[-4])
            sent.append(stream.send(client.push_request(len(sent) + 1, large, range(15_000), gradients)))
        assert [stream.answer(request_id).push.steps[0].table_step for request_id in sent] == list(range(1, len(sent) + 1))
    p99 = float(np.quantile(pulls.result(), 0.99))
    record_property("summary", f"200 small pulls during {len(sent)} large updates: 99 % within {p99 * 1000:.0f} ms")
    assert p99 < 1.0  # 0.05 on an idle machine; the test before this one shows that none waits for an update


@pytest.mark.case("C096")
def test_calls_between_shards_succeed_while_both_are_loaded(tmp_path: Path) -> None:
    stop = threading.Event()
    with running_shards(tmp_path, 2, lease_s="60") as shards, contextlib.ExitStack() as stack:
        view = shards.view()
        homes = stack.enter_context(raw_client(view, 0))
        table = homes.create(TableSpec("t", 64))[0]
        assert view.route_map is not None
        owners = view.route_map.shards_of(np.arange(2000, dtype=np.int64))

        def load(client: RawClient, row_ids: list[int]) -> None:
            gradients = np.ones((len(row_ids), 64))
            with raw_stream(client.channel) as stream:
                number = 0
                while not stop.is_set():
                    sent = [
                        stream.send(client.push_request(number + ahead, table, row_ids, gradients)) for ahead in range(1, 17)
                    ]
                    stream.answer(sent[-1])
                    number += len(sent)

        threads = []
        for index in (0, 1):
            for _ in range(3):
                client = stack.enter_context(raw_client(view, index))
                client.open()
                threads.append(threading.Thread(target=load, args=(client, np.flatnonzero(owners == index).tolist())))
        for thread in threads:
            thread.start()
        try:
            for number in range(10):
                homes.create(TableSpec(f"created under load {number}".replace(" ", "-"), 4))
        finally:
            stop.set()
        for thread in threads:
            thread.join(60)
        with raw_client(view, 1) as other:
            assert other.info("created-under-load-9").table_id


@pytest.mark.case("C098")
def test_memory_stays_flat_over_pushes_failing_requests_and_connections(client: RawClient, shards: Shards) -> None:
    table = client.create(TableSpec("flat", 256))[0]
    gradients = np.ones((1000, 256), "<f4")  # a push of 1 MB
    numbers = iter(range(1, 10_000))

    def rounds(count: int) -> int:
        with raw_stream(client.channel) as stream:
            for _ in range(count):
                number = next(numbers)
                stream.ask(client.push_request(number, table, range(1000), gradients))
                stream.ask(pull_request(client, table, range(1000)))
                chunks = chunks_of(client.push_request(number, table, range(1000), gradients), 400_000)
                for chunk in chunks:
                    stream.send(chunk)
                assert stream.answer(chunks[0].header.request_id).push.repeated_number
                with pytest.raises(ShardamError):
                    stream.ask(client.push_request(number, table, range(500), gradients[:500]))
        for _ in range(count // 5):
            with raw_client(shards.view()) as passer_by, raw_stream(passer_by.channel) as other:
                other.ask(pull_request(passer_by, table, range(1)))
        return int(client.status().resident_bytes)

    rounds(40)
    before = rounds(40)
    grown = rounds(120) - before
    assert grown < 24 * 2**20  # 120 pushes kept would be 120 MB


@pytest.mark.case("C060")
def test_a_stream_that_was_idle_for_many_renewals_and_keepalives_works_at_once(tmp_path: Path) -> None:
    with running_shards(tmp_path, lease_s="2") as shards:
        view = shards.view()
        quick = [("grpc.keepalive_time_ms", 100), ("grpc.keepalive_timeout_ms", 20_000)]
        with open_channel(view.shards[0].address, quick) as channel, raw_client(view) as other:
            client = RawClient(channel, view.shards[0], other.cluster_id, other.epoch)
            client.open()
            table = client.create(TableSpec("t", 2))[0]
            with raw_stream(channel) as stream:
                assert stream.ask(client.push_request(1, table, [1], [[1, 1]])).push.steps[0].table_step == 1
                start = other.status().uptime_s
                wait_for("two leases to pass", lambda: other.status().uptime_s > start + 4)
                assert stream.ask(client.push_request(2, table, [1], [[1, 1]])).push.steps[0].table_step == 2


@pytest.mark.case("C099")
def test_a_drain_answers_every_accepted_push_and_ends_every_stream(tmp_path: Path) -> None:
    with running_shards(tmp_path, lease_s="60", drain_s="60") as shards, contextlib.ExitStack() as stack:
        view = shards.view()
        clients = [stack.enter_context(raw_client(view)) for _ in range(5)]
        table = clients[0].create(TableSpec("t", 64))[0]
        gradients = np.ones((10_000, 64), "<f4")
        idle = RawStream(clients[0].channel)
        streams = []
        for client in clients:
            client.open()
            stream = stack.enter_context(raw_stream(client.channel))
            sent = [stream.send(client.push_request(number, table, range(10_000), gradients)) for number in range(1, 11)]
            streams.append((stream, sent))
        wait_for("some to be answered", lambda: sum(len(stream.order) for stream, _ in streams) >= 3)
        start = time.monotonic()
        assert shards.processes[0].terminate(60) == 0
        assert time.monotonic() - start < 30  # no stream held it for drain_s
        assert idle.ended.wait(30)
        assert idle.error is None
        steps = []
        for stream, sent in streams:
            assert stream.ended.wait(30)
            applied = [request_id in stream.answers and stream.answers[request_id].HasField("push") for request_id in sent]
            assert applied == sorted(applied, reverse=True)  # the first ones, without a hole
            steps += [
                stream.answers[request_id].push.steps[0].table_step
                for request_id, done in zip(sent, applied, strict=True)
                if done
            ]
        assert sorted(steps) == list(range(1, len(steps) + 1))  # every change that was applied was answered
        assert "Traceback" not in shards.processes[0].log_text()
