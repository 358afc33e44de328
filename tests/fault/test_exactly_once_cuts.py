"""One shard behind the proxy and one raw client: where a connection breaks decides nothing but when a push is applied.

The outcomes are those of PROTOCOL.md, section 4; each test asserts how often its fault fired.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.live import read_table
from shardam_testing.faults.network_faults import Cut, Direction, Swallow
from shardam_testing.faults.state_files import read_oracle
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.raw_stream import RawStream, chunks_of, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2

HANG_S = 120.0
"""What takes seconds on an idle machine."""

pytestmark = pytest.mark.timeout(3 * HANG_S)

DIM = 16
NUM_ROWS = 8_000
"""Rows of a push of about 576 KB: many times what HTTP/2 lets leave unasked."""

NUM_CHUNKS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    with running_fault_cluster(tmp_path_factory.mktemp("cut"), 1, client_lease_s="600", max_reserved_mib="1") as cluster:
        yield cluster


class Pusher:
    """One client that pushes to one table, over as many connections as it takes."""

    def __init__(self, cluster: FaultCluster, name: str) -> None:
        self.cluster = cluster
        self.proxy = cluster.proxies[0]
        with raw_client(cluster.view()) as client:
            self.client_id = client.client_id
            client.open()
            self.table = client.create(TableSpec(name, DIM))[0]

    @contextlib.contextmanager
    def connected(self) -> Iterator[tuple[RawClient, RawStream]]:
        """Opens a connection of its own, past the handshake, with a stream that has answered once."""
        with raw_client(self.cluster.view()) as client:
            client.client_id = self.client_id
            client.open()
            with raw_stream(client.channel) as stream:
                stream.ask(self.pull_request(client))
                yield client, stream

    def pull_request(self, client: RawClient) -> embedding_pb2.PullRequest:
        section = common_pb2.Section(table_id=self.table.table_id, num_rows=0, dtype=common_pb2.DTYPE_FLOAT32)
        return embedding_pb2.PullRequest(header=client.header(), sections=[section])

    def request(self, client: RawClient, number: int, num_rows: int = NUM_ROWS, seed: int = 0) -> embedding_pb2.PushRequest:
        """Returns the push of a number; the same number and seed give the same content."""
        rng = np.random.default_rng([seed, number])
        row_ids = rng.integers(0, 10 * num_rows, num_rows)
        gradients = rng.standard_normal((num_rows, DIM)).astype(np.float32)
        return client.push_request(number, self.table, row_ids.tolist(), gradients)

    def push(self, number: int, num_rows: int = NUM_ROWS) -> embedding_pb2.PushResponse:
        """Pushes over a connection of its own, in one message."""
        with self.connected() as (client, stream):
            return stream.ask(self.request(client, number, num_rows)).push

    def last_number(self) -> int:
        """Returns the client's last closed number."""
        with raw_client(self.cluster.view()) as client:
            client.client_id = self.client_id
            return client.open().header.last_number

    def bytes_of(self, number: int, *, chunked: bool) -> int:
        """Pushes a number without a fault; returns how many bytes that took."""
        with self.connected() as (client, stream):
            before = self.proxy.bytes_seen(Direction.REQUESTS)
            answer = self.send(stream, self.request(client, number), chunked=chunked)
            assert stream.answer(answer).push.steps[0].table_step == number
            return self.proxy.bytes_seen(Direction.REQUESTS) - before

    def send(self, stream: RawStream, request: embedding_pb2.PushRequest, *, chunked: bool) -> int:
        if not chunked:
            return stream.send(request)
        size = -(-(len(request.row_ids) + len(request.rows)) // NUM_CHUNKS)
        for chunk in chunks_of(request, size):
            stream.send(chunk)
        return request.header.request_id

    def cut_at(self, number: int, after_bytes: int, *, chunked: bool) -> None:
        """Pushes a number over a connection that ends after so many bytes of it."""
        with self.connected() as (client, stream):
            armed = self.proxy.arm(Cut(after_bytes))
            request_id = self.send(stream, self.request(client, number), chunked=chunked)
            armed.wait(HANG_S)
            with pytest.raises(ShardamError):
                stream.answer(request_id, HANG_S)

    def check_bits(self) -> None:
        """Compares the table with its journal."""
        with raw_client(self.cluster.view()) as client:
            oracle = read_oracle(Path(client.status().data_folder))
            live, expected = read_table(client, self.table), oracle.tables[self.table.table_id].rows()
            assert np.array_equal(live.row_ids, expected.row_ids)
            for name in ("weight", "exp_avg", "exp_avg_sq"):
                assert np.array_equal(getattr(live, name).view(np.uint32), getattr(expected, name).view(np.uint32))
            numbers = oracle.numbers_of(self.client_id)
            assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.case("C105")
def test_a_push_cut_in_any_tenth_is_not_applied_and_its_retry_is_applied_once(cluster: FaultCluster) -> None:
    pusher = Pusher(cluster, "tenths")
    size, cuts = pusher.bytes_of(1, chunked=False), pusher.proxy.count("cut")
    for tenth in range(10):
        number = 2 + tenth
        pusher.cut_at(number, size * (2 * tenth + 1) // 20, chunked=False)
        assert pusher.last_number() == number - 1
        answer = pusher.push(number)
        assert (answer.repeated_number, answer.steps[0].table_step) == (False, number)
    assert pusher.proxy.count("cut") - cuts == 10
    pusher.check_bits()


def test_a_push_cut_in_any_tenth_of_any_chunk_leaves_no_reservation_and_its_retry_starts_anew(cluster: FaultCluster) -> None:
    pusher = Pusher(cluster, "chunks")
    size, cuts = pusher.bytes_of(1, chunked=True), pusher.proxy.count("cut")
    pieces = 10 * NUM_CHUNKS
    for piece in range(pieces):
        pusher.cut_at(2, size * (2 * piece + 1) // (2 * pieces), chunked=True)
        wait_for("the reservation to be given back", functools.partial(_reserves_nothing, cluster), HANG_S)
        assert pusher.last_number() == 1
    assert pusher.proxy.count("cut") - cuts == pieces
    with pusher.connected() as (client, stream):
        answer = stream.answer(pusher.send(stream, pusher.request(client, 2), chunked=True)).push
        assert (answer.repeated_number, answer.steps[0].table_step) == (False, 2)
    assert pusher.push(2).repeated_number, "a chunked push and the same in one message are the same content"
    pusher.check_bits()


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_a_push_whose_answer_is_swallowed_is_applied_and_its_retry_gets_the_former_answer(
    cluster: FaultCluster, chunked: bool
) -> None:
    pusher = Pusher(cluster, f"swallowed_{chunked}")
    swallowed = pusher.proxy.count("swallow")
    with pusher.connected() as (client, stream):
        armed = pusher.proxy.arm(Swallow())
        request_id = pusher.send(stream, pusher.request(client, 1), chunked=chunked)
        armed.wait(HANG_S)
        with pytest.raises(ShardamError):
            stream.answer(request_id, HANG_S)
    assert pusher.proxy.count("swallow") - swallowed == 1
    assert pusher.last_number() == 1
    answer = pusher.push(1)
    assert (answer.repeated_number, answer.steps[0].table_step) == (True, 1)
    pusher.check_bits()


def test_while_a_number_is_refused_for_now_the_next_one_waits_and_both_are_applied_in_order(cluster: FaultCluster) -> None:
    """Another client's reservation takes the room that the chunked push of number 1 needs; number 2 is behind it already."""
    holder, pusher = Pusher(cluster, "holder"), Pusher(cluster, "refused")
    with holder.connected() as (client, held):
        first = chunks_of(holder.request(client, 1), 1000)[0]
        held.send(first)
        wait_for("the reservation", lambda: not _reserves_nothing(cluster), HANG_S)
        with pusher.connected() as (other, stream):
            refused = pusher.send(stream, pusher.request(other, 1), chunked=True)
            gap = pusher.send(stream, pusher.request(other, 2, num_rows=10), chunked=False)
            with pytest.raises(ShardamError) as for_now:
                stream.answer(refused, HANG_S)
            with pytest.raises(ShardamError) as too_early:
                stream.answer(gap, HANG_S)
            assert (for_now.value.reason, for_now.value.rule.retryable) == ("QUEUE_FULL", True)
            assert (too_early.value.reason, too_early.value.metadata["last"]) == ("SEQUENCE_GAP", "0")
    wait_for("the reservation to end with its stream", lambda: _reserves_nothing(cluster), HANG_S)
    with pusher.connected() as (other, stream):
        sent = [
            pusher.send(stream, pusher.request(other, 1), chunked=True),
            pusher.send(stream, pusher.request(other, 2, num_rows=10), chunked=False),
        ]
        assert [stream.answer(request_id).push.steps[0].table_step for request_id in sent] == [1, 2]
    pusher.check_bits()


def test_a_used_number_with_another_content_and_one_older_than_the_window_are_refused_and_change_nothing(
    cluster: FaultCluster,
) -> None:
    pusher = Pusher(cluster, "window")
    last = 70
    with pusher.connected() as (client, stream):
        for number in range(1, last + 1):
            stream.ask(pusher.request(client, number, num_rows=2))
        outcomes = {}
        for number, seed in ((last, 1), (last - 63, 0), (last - 64, 0), (last + 2, 0)):
            request = pusher.request(client, number, num_rows=2, seed=seed)
            try:
                outcomes[number] = f"repeated {stream.ask(request).push.steps[0].table_step}"
            except ShardamError as error:
                outcomes[number] = error.reason
    assert outcomes == {
        last: "SEQUENCE_REUSED",
        last - 63: f"repeated {last - 63}",
        last - 64: "SEQUENCE_EXPIRED",
        last + 2: "SEQUENCE_GAP",
    }
    assert pusher.last_number() == last
    pusher.check_bits()


def test_a_retry_that_comes_after_the_window_is_told_that_its_outcome_is_no_longer_kept(cluster: FaultCluster) -> None:
    """Number 1's answer is swallowed; a second connection of the same client goes on; the retry of number 1 comes late."""
    pusher = Pusher(cluster, "late")
    with pusher.connected() as (client, stream):
        armed = pusher.proxy.arm(Swallow())
        stream.send(pusher.request(client, 1, num_rows=2))
        armed.wait(HANG_S)
    with pusher.connected() as (client, stream):
        for number in range(2, 67):
            stream.ask(pusher.request(client, number, num_rows=2))
        with pytest.raises(ShardamError) as late:
            stream.ask(pusher.request(client, 1, num_rows=2))
    assert (late.value.reason, late.value.metadata["last"]) == ("SEQUENCE_EXPIRED", "66")
    pusher.check_bits()


def _reserves_nothing(cluster: FaultCluster) -> bool:
    return cluster.statuses()[0].reserved_bytes == 0
