"""Pushes above a chunk: cut, put together, and begun again at chunk 0 whatever happens in between."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardam_testing.scripted_client import ScriptedClient, pushed, scripted_client
from shardam_testing.scripted_shards import INFO, LOSE_ANSWER, SWALLOW
from shardam_testing.waiting import wait_for

import shardam
from shardam._messages import Payload, PushPart
from shardam._parts import TableStepGradient, push_change
from shardam._reads import read_weights
from shardam.errors import BadOption, QueueFull, RowLimit, ShardNotReady
from shardam_kernels.factors import AdamOptions
from shardam_proto.v1 import common_pb2, embedding_pb2

CHUNK = 4096
ROWS = 1000
DIM = 8
NUM_CHUNKS = -(-ROWS * (8 + 4 * DIM) // CHUNK)


@pytest.fixture
def client() -> Iterator[ScriptedClient]:
    with scripted_client(2, chunk_bytes=CHUNK) as client:
        yield client


def large(client: ScriptedClient, shard: int, value: float = 1.0) -> None:
    client.pusher.submit(client.push_of(client.ids_of(shard, ROWS), value, DIM))


def test_a_part_of_one_chunk_is_one_message_as_ever(client: ScriptedClient) -> None:
    client.push(1)
    (header,) = client.shards[1].headers
    assert (header.chunk_index, header.num_chunks) == (0, 0)
    assert client.shards[1].num_chunks == 0


@pytest.mark.case("C087")
def test_a_large_part_travels_in_chunks_and_is_one_change(client: ScriptedClient) -> None:
    large(client, 1, value=3.0)
    client.push(0)
    shard = client.shards[1]
    assert shard.num_chunks == NUM_CHUNKS
    assert shard.seen[0] == ("push", 1, client.ids_of(1, ROWS).tolist())
    np.testing.assert_array_equal(np.frombuffer(shard.rows_of[1], "<f4"), np.full(ROWS * DIM, 3.0, np.float32))
    assert client.shards[0].num_chunks == 0
    assert client.endings() == [pushed(1, 2)] * 2


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_stream_cut_at_any_chunk_begins_the_part_again_and_nothing_is_half_applied(
    client: ScriptedClient, chunk: int
) -> None:
    client.shards[1].cuts.append(chunk)
    for value in (1.0, 2.0, 3.0):
        large(client, 1, value)
    client.pusher.flush()
    shard = client.shards[1]
    assert shard.fired == {f"cut at chunk {chunk}": 1}
    assert shard.closed == pushed(1, 2, 3)
    assert shard.num_streams == 2
    for number in (1, 2, 3):
        np.testing.assert_array_equal(np.frombuffer(shard.rows_of[number], "<f4"), np.full(ROWS * DIM, number, np.float32))


@pytest.mark.parametrize("fault", [LOSE_ANSWER, QueueFull("no room to reserve")], ids=str)
def test_a_large_part_is_resent_whole_and_is_a_repeat_to_the_shard(client: ScriptedClient, fault: object) -> None:
    shard = client.shards[1]
    shard.faults.append(fault)  # type: ignore[arg-type]  # a Fault
    large(client, 1)
    large(client, 1, 2.0)
    client.pusher.flush()
    assert sum(shard.fired.values()) == 1
    assert shard.closed == pushed(1, 2)
    assert shard.num_chunks >= 3 * NUM_CHUNKS


def test_a_large_part_refused_for_good_is_closed_without_chunks(client: ScriptedClient) -> None:
    client.shards[1].faults_of[1] = collections.deque([RowLimit("full")])
    large(client, 1)
    large(client, 1)
    with pytest.raises(RowLimit):
        client.pusher.flush()
    client.pusher.flush()
    assert [ending[:2] for ending in client.shards[1].closed] == [(1, "void"), (2, "push")]


def test_an_unanswered_large_part_is_resent_over_the_same_stream() -> None:
    with scripted_client(1, shard_timeout_s=2.0, chunk_bytes=CHUNK) as client:
        client.shards[0].faults.append(SWALLOW)
        large(client, 0)
        client.queue(0)
        client.pusher.flush()
        assert client.shards[0].closed == pushed(1, 2)
        assert client.shards[0].num_chunks == 2 * NUM_CHUNKS


def test_a_push_that_is_sent_on_after_its_caller_gave_up_keeps_the_gradient_as_it_was() -> None:
    with scripted_client(1, shard_timeout_s=0.4, chunk_bytes=CHUNK) as client:
        client.shards[0].faults.extend([ShardNotReady("not yet")] * 1000)
        row_ids = client.ids_of(0, ROWS)
        gradients = np.full((ROWS, DIM), 3.0, np.float32)
        step = TableStepGradient("t", INFO.table_id, row_ids, gradients, AdamOptions())
        with pytest.raises(ShardNotReady):
            client.pusher.run(push_change([step], client.session.route_map))
        gradients[:] = 7.0
        client.shards[0].faults.clear()
        wait_for("the push", lambda: client.shards[0].rows_of.get(1))
        np.testing.assert_array_equal(np.frombuffer(client.shards[0].rows_of[1], "<f4"), np.full(ROWS * DIM, 3.0, np.float32))
        client.pusher.flush()


@pytest.mark.case("C090")
@pytest.mark.parametrize("text", ["63", "4097", "0", "-64", "1e3", "1024.0", "", "large", "64 ", "٦٤", "9" * 30])
def test_a_chunk_size_out_of_range_is_refused_when_a_cluster_is_opened(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_CHUNK_KIB", text)
    with pytest.raises(BadOption, match="SHARDAM_CHUNK_KIB must be a number of KiB from 64 to 4096, got"):
        shardam.connect("redis://127.0.0.1:1/0", shard_timeout_s=0.1)


@pytest.mark.parametrize("text", ["64", "256", "4096"])
def test_the_chunk_size_is_a_setting_of_the_process_and_goes_with_pushes_and_pulls(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDAM_CHUNK_KIB", text)
    chunk_bytes = int(text) * 1024
    with scripted_client(1) as client:
        num_rows = -(-3 * chunk_bytes // (8 + 4 * DIM))
        client.pusher.run(client.push_of(client.ids_of(0, num_rows), 1.0, DIM))
        assert client.shards[0].num_chunks == 4
        read_weights(client.session, [(INFO, client.ids_of(0))])
        assert [asked.chunk_bytes for asked in client.shards[0].pulls] == [chunk_bytes]


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=0, max_size=6), chunk_bytes=st.integers(1, 200))
def test_chunks_put_together_are_the_part_and_ids_come_before_rows(sizes: list[tuple[int, int]], chunk_bytes: int) -> None:
    row_ids = [np.arange(10 * count, 11 * count, dtype=np.int64) for count, _ in sizes]
    rows = [np.arange(count * dim, dtype=np.float32).reshape(count, dim) for count, dim in sizes]
    table_ids = [index + 1 for index in range(len(sizes))]
    part = PushPart([common_pb2.AdamOptions(lr=1.0)], table_ids, [0] * len(sizes), Payload(row_ids), Payload(rows))
    messages = part.messages(common_pb2.RequestHeader(number=7, request_id=9), chunk_bytes)
    pushes = [embedding_pb2.ExchangeRequest.FromString(message).push for message in messages]
    assert b"".join(push.row_ids for push in pushes) == b"".join(ids.tobytes() for ids in row_ids)
    assert b"".join(push.rows for push in pushes) == b"".join(gradients.tobytes() for gradients in rows)
    total = part.row_ids.num_bytes + part.rows.num_bytes
    assert [len(push.row_ids) + len(push.rows) for push in pushes[:-1]] == [chunk_bytes] * (len(pushes) - 1)
    assert [len(push.sections) for push in pushes] == [len(sizes), *[0] * (len(pushes) - 1)]
    assert {push.header.request_id for push in pushes} == {9}
    num_ids = 0
    for index, push in enumerate(pushes):
        num_ids += len(push.row_ids)
        assert not push.rows or num_ids == part.row_ids.num_bytes
        if len(pushes) > 1:
            assert (push.header.chunk_index, push.header.num_chunks) == (index, len(pushes))
            assert push.total_bytes == (total if index == 0 else 0)


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(-5, 60), st.integers(-5, 60))
def test_any_range_of_a_payload_has_the_bytes_of_its_arrays_behind_one_another(sizes: list[int], start: int, stop: int) -> None:
    arrays = [np.arange(2 * size, dtype=np.float32).reshape(size, 2) + index for index, size in enumerate(sizes)]
    expected = b"".join(array.tobytes() for array in arrays)[max(0, start) : max(0, stop)]
    payload = Payload(arrays)
    assert payload.read(start, stop) == expected
    assert sum(piece.nbytes for piece in payload.pieces(start, stop)) == len(expected)
