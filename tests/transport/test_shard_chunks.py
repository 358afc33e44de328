"""Pushes that arrive in chunks: whatever their sizes one push, and nothing at all until the last chunk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import OPTIONS, RawClient, id_bytes
from shardam_testing.raw_stream import RawStream, chunks_of, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, embedding_pb2

SIZES = [1, 3, 8, 11, 64, 10_000]
"""Bytes of a chunk: single ones, off every boundary, on one, and more than there are."""


def reason_of(action: Callable[[], object]) -> str:
    with pytest.raises(ShardamError) as error:
        action()
    return error.value.reason


def send_chunks(stream: RawStream, chunks: list[embedding_pb2.PushRequest]) -> int:
    for chunk in chunks:
        stream.send(chunk)
    return int(chunks[0].header.request_id)


def two_tables(
    client: RawClient, number: int, tables: list[common_pb2.TableInfo], **changes: float
) -> embedding_pb2.PushRequest:
    """A push of 15 ids to a table of dim 2 and of none to another of dim 3."""
    sizes = [15, 0]
    generator = np.random.default_rng(number)
    return embedding_pb2.PushRequest(
        header=client.header(number, **changes),
        options=[OPTIONS],
        sections=[
            common_pb2.Section(table_id=table.table_id, num_rows=size, dtype=common_pb2.DTYPE_FLOAT32)
            for table, size in zip(tables, sizes, strict=True)
        ],
        row_ids=id_bytes(generator.integers(0, 10, 15).tolist()),
        rows=generator.normal(size=(15, 2)).astype("<f4").tobytes(),
    )


def test_any_chunk_size_gives_the_bits_of_one_message(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    tables = [shard.install(2), shard.install(3)]
    others = [shard.install(2), shard.install(3)]
    for number, size in enumerate(SIZES, 1):
        chunked = two_tables(client, 2 * number - 1, tables)
        plain = two_tables(client, 2 * number - 1, others)
        plain.header.number = 2 * number
        answer = stream.answer(send_chunks(stream, chunks_of(chunked, size))).push
        assert answer.header.last_number == 2 * number - 1
        assert [step.table_step for step in answer.steps] == [number, number]
        stream.ask(plain)
        ours, theirs = (client.read(table, list(range(10))) for table in (tables[0], others[0]))
        for field in ("found", "weight", "exp_avg", "exp_avg_sq", "step"):
            assert getattr(ours.rows, field) == getattr(theirs.rows, field), (size, field)
    assert client.status().reserved_bytes == 0


def test_a_repeat_in_another_chunking_gets_the_former_answer(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    tables = [shard.install(2), shard.install(3)]
    first = stream.answer(send_chunks(stream, chunks_of(two_tables(client, 1, tables), 7))).push
    before = client.read(tables[0], list(range(10))).rows
    for size in SIZES:
        again = stream.answer(send_chunks(stream, chunks_of(two_tables(client, 1, tables), size))).push
        assert (again.repeated_number, again.steps) == (True, first.steps)
    for request in (two_tables(client, 1, tables), two_tables(client, 1, tables, budget_s=3)):
        assert stream.ask(request).push.repeated_number
    assert client.call(client.embedding.Push, two_tables(client, 1, tables)).repeated_number
    other = two_tables(client, 1, tables)
    other.rows = bytes(len(other.rows))
    assert reason_of(lambda: stream.answer(send_chunks(stream, chunks_of(other, 7)))) == "SEQUENCE_REUSED"
    assert client.read(tables[0], list(range(10))).rows == before


def test_other_requests_pass_between_the_chunks(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    table = shard.install()
    section = common_pb2.Section(table_id=table.table_id, num_rows=1, dtype=common_pb2.DTYPE_FLOAT32)
    first, *rest = chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8)
    stream.send(first)
    pull = embedding_pb2.PullRequest(header=client.header(), sections=[section], row_ids=id_bytes([1]))
    assert stream.ask(pull).pull.steps[0].table_step == 0
    assert client.status().reserved_bytes == 16
    assert stream.answer(send_chunks(stream, rest)).push.steps[0].table_step == 1


Chunks = list[embedding_pb2.PushRequest]


def swap(chunks: Chunks) -> None:
    chunks[1], chunks[2] = chunks[2], chunks[1]


def leave_one_out(chunks: Chunks) -> None:
    del chunks[1]


def rows_before_ids(chunks: Chunks) -> None:
    chunks[0].rows = b"1234"


def one_byte_more(chunks: Chunks) -> None:
    chunks[-1].rows += b"1"


def one_byte_less(chunks: Chunks) -> None:
    chunks[-1].rows = chunks[-1].rows[:-1]


def another_total(chunks: Chunks) -> None:
    chunks[0].total_bytes += 1


def another_number(chunks: Chunks) -> None:
    chunks[1].header.number = 2


def options_twice(chunks: Chunks) -> None:
    chunks[1].options.append(OPTIONS)


def no_options(chunks: Chunks) -> None:
    del chunks[0].options[:]


def unknown_table(chunks: Chunks) -> None:
    chunks[0].sections[0].table_id = 77


def stale_in_the_middle(chunks: Chunks) -> None:
    chunks[1].header.epoch = 9


def other_count(chunks: Chunks) -> None:
    chunks[1].header.num_chunks += 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (swap, "BAD_OPTION"),
        (leave_one_out, "BAD_OPTION"),
        (rows_before_ids, "WRONG_SHAPE"),
        (one_byte_more, "WRONG_SHAPE"),
        (one_byte_less, "WRONG_SHAPE"),
        (another_total, "WRONG_SHAPE"),
        (another_number, "BAD_OPTION"),
        (options_twice, "BAD_OPTION"),
        (no_options, "BAD_OPTION"),
        (unknown_table, "UNKNOWN_TABLE"),
        (stale_in_the_middle, "STALE_ROUTE"),
        (other_count, "BAD_OPTION"),
    ],
)
def test_a_malformed_part_is_refused_once_whole_and_may_be_sent_again(
    shard: HeldShard, client: RawClient, stream: RawStream, spoil: Callable[[Chunks], None], reason: str
) -> None:
    table = shard.install()
    chunks = chunks_of(client.push_request(1, table, [1, 2], [[1, 1], [2, 2]]), 8)
    spoil(chunks)
    assert reason_of(lambda: stream.answer(send_chunks(stream, chunks))) == reason
    again = chunks_of(client.push_request(1, table, [1, 2], [[1, 1], [2, 2]]), 8)
    assert stream.answer(send_chunks(stream, again)).push.steps[0].table_step == 1
    assert stream.order == [chunks[0].header.request_id, again[0].header.request_id]
    assert client.status().reserved_bytes == 0


def test_chunks_are_refused_in_a_unary_call_and_a_total_without_chunks_everywhere(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    chunk = chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8)[0]
    assert reason_of(lambda: client.call(client.embedding.Push, chunk)) == "BAD_OPTION"
    whole = client.push_request(1, table, [1], [[1, 1]])
    whole.total_bytes = 16
    assert reason_of(lambda: client.call(client.embedding.Push, whole)) == "BAD_OPTION"
    assert reason_of(lambda: stream.ask(whole)) == "BAD_OPTION"


def test_a_part_takes_the_place_of_one_that_its_client_has_not_finished_and_that_one_may_be_sent_again(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    first = chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8)
    second = chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8)
    stream.send(first[0])
    stream.send(second[0])
    assert reason_of(lambda: stream.answer(first[0].header.request_id)) == "SHARD_UNREACHABLE"
    assert client.status().reserved_bytes == 16
    send_chunks(stream, first[1:])  # too late: passed over, since the part has its answer
    assert stream.answer(send_chunks(stream, second[1:])).push.steps[0].table_step == 1
    assert stream.order == [first[0].header.request_id, second[0].header.request_id]
    assert client.status().reserved_bytes == 0


def test_a_part_gives_way_also_to_one_that_is_refused_itself(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    table = shard.install()
    first, refused, last = (chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8) for _ in range(3))
    unknown_table(refused)
    stream.send(first[0])
    assert reason_of(lambda: stream.answer(send_chunks(stream, refused))) == "UNKNOWN_TABLE"
    assert stream.order == [first[0].header.request_id, refused[0].header.request_id]
    assert client.status().reserved_bytes == 0
    assert stream.answer(send_chunks(stream, last)).push.steps[0].table_step == 1


def test_any_other_change_of_its_client_frees_what_an_unfinished_part_reserved(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    first = chunks_of(client.push_request(1, table, [1], [[1, 1]], budget_s=0), 8)  # waits for its next chunk without end
    stream.send(first[0])
    assert stream.ask(client.push_request(1, table, [2], [[2, 2]])).push.steps[0].table_step == 1
    assert reason_of(lambda: stream.answer(first[0].header.request_id)) == "SHARD_UNREACHABLE"
    assert client.status().reserved_bytes == 0
    with shard.client() as other:
        second = chunks_of(client.push_request(2, table, [1], [[1, 1]]), 8)
        stream.send(second[0])
        others = other.push_request(1, table, [2], [[2, 2]])
        others.header.request_id = 1000
        assert stream.ask(others).push.steps[0].table_step == 2  # another client's passes
        assert stream.answer(send_chunks(stream, second[1:])).push.steps[0].table_step == 3


def test_a_part_on_a_new_stream_replaces_the_one_of_the_old(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    table = shard.install()
    old = chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8)
    stream.send(old[0])
    wait_for("the first part to be open", lambda: client.status().reserved_bytes == 16)
    with raw_stream(client.channel) as new:
        replacing = chunks_of(client.push_request(1, table, [1], [[1, 1]]), 4)
        new.send(replacing[0])
        assert reason_of(lambda: stream.answer(old[0].header.request_id)) == "SHARD_UNREACHABLE"
        assert client.status().reserved_bytes == 16
        assert new.answer(send_chunks(new, replacing[1:])).push.steps[0].table_step == 1


@pytest.mark.parametrize("end", ["cancel", "finish_sending"])
def test_the_end_of_a_stream_frees_what_its_open_part_reserved(shard: HeldShard, client: RawClient, end: str) -> None:
    table = shard.install()
    stream = RawStream(client.channel)
    send_chunks(stream, chunks_of(client.push_request(1, table, [1], [[1, 1]]), 1)[:-1])
    wait_for("the part to be open", lambda: client.status().reserved_bytes == 16)
    getattr(stream, end)()
    wait_for("the reservation to be free", lambda: client.status().reserved_bytes == 0)
    assert shard.shard.state.table(table.table_id).step == 0
    assert client.push(1, table, [1], [[1, 1]]).steps[0].table_step == 1


def test_a_part_whose_chunks_stay_away_is_refused_after_its_budget(
    shard: HeldShard, client: RawClient, stream: RawStream
) -> None:
    table = shard.install()
    first, second, *rest = chunks_of(client.push_request(1, table, [1, 2], [[1, 1], [2, 2]], budget_s=0.05), 8)
    send_chunks(stream, [first, second])
    assert reason_of(lambda: stream.answer(first.header.request_id)) == "SHARD_UNREACHABLE"
    assert client.status().reserved_bytes == 0
    send_chunks(stream, rest)  # too late: passed over, since the part has its answer
    again = chunks_of(client.push_request(1, table, [1, 2], [[1, 1], [2, 2]]), 8)
    assert stream.answer(send_chunks(stream, again)).push.steps[0].table_step == 1


def test_a_part_that_does_not_fit_the_reservations_is_refused_with_a_hint_and_its_chunks_are_passed_over() -> None:
    with held_shard(max_reserved_bytes=100) as shard, shard.client() as one, shard.client() as other:
        table = shard.install()
        with raw_stream(one.channel) as first, raw_stream(other.channel) as second:
            held = chunks_of(one.push_request(1, table, [1, 2, 3, 4], np.ones((4, 2))), 8)  # 64 bytes
            first.send(held[0])
            wait_for("the part to be open", lambda: one.status().reserved_bytes == 64)
            refused = chunks_of(other.push_request(1, table, [1, 2, 3], np.ones((3, 2))), 8)
            with pytest.raises(ShardamError, match="max-reserved-mib") as error:
                second.answer(send_chunks(second, refused))
            assert (error.value.reason, float(error.value.metadata["retry_after_s"]) > 0) == ("QUEUE_FULL", True)
            first.answer(send_chunks(first, held[1:]))
            again = chunks_of(other.push_request(1, table, [1, 2, 3], np.ones((3, 2))), 8)
            assert second.answer(send_chunks(second, again)).push.steps[0].table_step == 2
            assert second.order == [refused[0].header.request_id, again[0].header.request_id]
            larger = chunks_of(other.push_request(2, table, list(range(7)), np.ones((7, 2))), 8)
            assert reason_of(lambda: second.answer(send_chunks(second, larger))) == "MESSAGE_TOO_LARGE"


def test_a_whole_part_counts_in_the_apply_queue(shard: HeldShard, client: RawClient, stream: RawStream) -> None:
    table = shard.install()
    with shard.held_changes():
        request_id = send_chunks(stream, chunks_of(client.push_request(1, table, [1], [[1, 1]]), 8))
        wait_for("the part to be accepted", lambda: client.status().queue_bytes == 16)
        assert client.status().reserved_bytes == 0
    assert stream.answer(request_id).push.steps[0].table_step == 1
