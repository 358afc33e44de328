"""What a worker copies: a push's rows once into their message, and a pull's into its result only if they come in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from shardam_testing.allocations import peak_of

from shardam._answers import Piece, read_answer
from shardam._messages import Payload, PushPart
from shardam._pull_plan import PullQuestion, TableRead, plan_reads
from shardam._shards import Shards
from shardam._values import TableInfo
from shardam_proto import wire
from shardam_proto.errors import ShardUnreachable
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2

DIM = 64
NUM_ROWS = 2**20 // DIM
"""A million floats."""

PAYLOAD = NUM_ROWS * (8 + 4 * DIM)

SMALL = 100_000
"""Bytes of objects that are no payload: a fortieth of it."""

CHUNKS = [64 * 1024, 2**20, 4 * 2**20]


def part() -> PushPart:
    row_ids, rows = np.arange(NUM_ROWS), np.ones((NUM_ROWS, DIM), np.float32)
    return PushPart([common_pb2.AdamOptions(lr=0.1)], [1], [0], Payload([row_ids]), Payload([rows]))


def header() -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(client_id=b"c" * 16, number=7, request_id=300, budget_s=30.0)


@pytest.mark.case("C089")
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_million_floats_travel_as_they_are_with_less_than_two_percent_beside_them(chunk_bytes: int) -> None:
    messages = list(part().messages(header(), chunk_bytes))
    assert len(messages) == -(-PAYLOAD // chunk_bytes)
    assert PAYLOAD < sum(map(len, messages)) < 1.02 * PAYLOAD
    pushes = [embedding_pb2.ExchangeRequest.FromString(message).push for message in messages]
    assert b"".join(push.row_ids for push in pushes) == np.arange(NUM_ROWS, dtype="<i8").tobytes()
    assert b"".join(push.rows for push in pushes) == np.ones(NUM_ROWS * DIM, "<f4").tobytes()


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_push_is_copied_once_into_messages_of_which_one_at_a_time_is_in_memory(chunk_bytes: int) -> None:
    whole = part()

    def send() -> None:
        for message in whole.messages(header(), chunk_bytes):
            del message

    peak, _ = peak_of(send)
    assert peak < min(chunk_bytes, PAYLOAD) + SMALL


def answer(start: int, stop: int, index: int, num_chunks: int) -> bytes:
    """One message of the answer to a pull of all rows."""
    head = embedding_pb2.PullResponse(header=common_pb2.ResponseHeader(chunk_index=index, num_chunks=num_chunks))
    rows = np.arange(start * DIM, stop * DIM, dtype="<f4").tobytes()
    kind = embedding_pb2.ExchangeResponse.PULL_FIELD_NUMBER
    frame = wire.frame(kind, head.SerializeToString(), (0, len(rows)), request_id=300)
    return frame.prefixes[0] + rows


def read(data: bytes) -> Piece:
    piece = read_answer(data)
    assert isinstance(piece, Piece)
    return piece


def question_of(*sizes: int) -> tuple[list[TableRead], PullQuestion]:
    """A read of so many rows of tables of one shard."""
    infos = [TableInfo(TableSpec(f"t{index}", DIM), table_id=index + 1, table_seed=1) for index in range(len(sizes))]
    tables = [TableRead(info, np.arange(size), num_shards=1) for info, size in zip(infos, sizes, strict=True)]
    (read,) = plan_reads(cast("Shards", SimpleNamespace(links=[SimpleNamespace(index=0)])), tables, 2**28)
    return tables, PullQuestion(read, chunk_bytes=0)


@pytest.mark.parametrize("sizes", [(NUM_ROWS,), (0, 3, NUM_ROWS - 3), (1,) * 20 + (NUM_ROWS - 20,)])
def test_rows_that_come_in_one_message_are_the_result_without_a_copy(sizes: tuple[int, ...]) -> None:
    data, (tables, question) = answer(0, NUM_ROWS, 0, 1), question_of(*sizes)

    def take() -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        question.take(read(data))
        return [table.result() for table in tables]

    peak, results = peak_of(take)
    assert peak < SMALL
    assert [result.shape for result in results] == [(size, DIM) for size in sizes]
    assert all(result.flags.writeable for result in results)
    assert (np.concatenate(results).ravel() == np.arange(NUM_ROWS * DIM)).all()


@pytest.mark.parametrize("sizes", [(NUM_ROWS,), (0, 3, NUM_ROWS - 3), (1,) * 20 + (NUM_ROWS - 20,)])
def test_rows_that_come_in_chunks_are_copied_once_into_the_result(sizes: tuple[int, ...]) -> None:
    half, (tables, question) = NUM_ROWS // 2, question_of(*sizes)
    messages = [answer(0, half, 0, 2), answer(half, NUM_ROWS, 1, 2)]

    def take() -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        for message in messages:
            question.take(read(message))
        return [table.result() for table in tables]

    peak, results = peak_of(take)
    assert peak < 4 * NUM_ROWS * DIM + SMALL
    assert (np.concatenate(results).ravel() == np.arange(NUM_ROWS * DIM)).all()


def test_of_a_try_in_chunks_and_one_in_one_message_the_later_one_is_the_result() -> None:
    zeros = answer(0, 5, 0, 1)[: -4 * 5 * DIM] + bytes(4 * 5 * DIM)
    whole, halves = [answer(0, 5, 0, 1)], [answer(0, 2, 0, 2), answer(2, 5, 1, 2)]
    for tries in (
        [halves, [zeros], halves],
        [[zeros], halves],
        [halves[:1], [zeros], whole],
        [halves, [zeros], halves[:1], whole],
    ):
        tables, question = question_of(2, 3)
        for messages in tries:
            question.begin()
            for message in messages:
                question.take(read(message))
        assert np.concatenate([table.result() for table in tables]).ravel().tolist() == list(range(5 * DIM))


def test_a_chunk_that_would_be_a_whole_answer_is_refused_behind_another() -> None:
    _, question = question_of(2, 3)
    question.take(read(answer(0, 2, 0, 3)))
    with pytest.raises(ShardUnreachable, match="more bytes"):
        question.take(read(answer(0, 5, 1, 3)))
