"""What a shard copies: nothing of what it receives, and a pull's rows once, from their records into what is sent."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from shardam_testing.allocations import peak_of
from shardam_testing.raw_client import OPTIONS
from shardam_testing.shard_states import make_tables, shard_context

from shardam_proto import wire
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.phases import Laps
from shardam_server.shard.services.exchange_messages import read_request
from shardam_server.shard.services.pulls import Pulls
from shardam_server.shard.services.pushes import Pushes, PushPart

DIM = 64
NUM_ROWS = 2**20 // DIM
"""A million floats."""

IDS_BYTES = 8 * NUM_ROWS
ROWS_BYTES = 4 * NUM_ROWS * DIM

SMALL = 4 * IDS_BYTES
"""Bytes of what is no payload: slots and positions of rows, an eighth of it."""

CLIENT_ID = b"c" * 16

SECTION = common_pb2.Section(table_id=1, num_rows=NUM_ROWS, dtype=common_pb2.DTYPE_FLOAT32)


def message(kind: str, head: embedding_pb2.PullRequest | embedding_pb2.PushRequest, row_ids: bytes, rows: bytes) -> bytes:
    field = embedding_pb2.ExchangeRequest.DESCRIPTOR.fields_by_name[kind].number
    frame = wire.frame(field, head.SerializeToString(), (len(row_ids), len(rows)))
    payloads = [payload for payload in (row_ids, rows) if payload]
    return b"".join(piece for pair in zip(frame.prefixes, payloads, strict=True) for piece in pair)


def push_message(number: int) -> bytes:
    header = common_pb2.RequestHeader(protocol_version=1, client_id=CLIENT_ID, number=number, request_id=number)
    head = embedding_pb2.PushRequest(header=header, options=[OPTIONS], sections=[SECTION])
    rows = np.full(NUM_ROWS * DIM, 0.5, "<f4").tobytes()
    return message("push", head, np.arange(NUM_ROWS, dtype="<i8").tobytes(), rows)


def pull_message(chunk_bytes: int = 0) -> bytes:
    header = common_pb2.RequestHeader(protocol_version=1, request_id=300)
    head = embedding_pb2.PullRequest(header=header, sections=[SECTION], chunk_bytes=chunk_bytes)
    return message("pull", head, np.arange(NUM_ROWS, dtype="<i8").tobytes(), b"")


def test_a_received_push_is_read_as_views() -> None:
    data = push_message(1)
    peak, request = peak_of(lambda: read_request(data))
    assert request is not None
    assert peak < SMALL
    assert (len(request.row_ids), len(request.rows)) == (IDS_BYTES, ROWS_BYTES)
    assert isinstance(request.rows, memoryview)
    assert request.rows.obj is data


@pytest.mark.parametrize("chunk_bytes", [0, 64 * 1024])
def test_a_pull_s_rows_are_written_once_into_what_is_sent(chunk_bytes: int) -> None:
    data = pull_message(chunk_bytes)

    async def serve() -> None:
        shard = shard_context(0)
        shard.state.install(make_tables([TableSpec("t", DIM)]))
        pulls = Pulls(shard)

        def answer() -> list[bytes]:
            request = read_request(data)
            assert request is not None
            assert isinstance(request.message, embedding_pb2.PullRequest)
            pull = pulls.find(request.message, request.row_ids)
            return pulls._read(pull, Laps(time.perf_counter())).messages

        answer()  # what is made once is not of the answer
        peak, messages = peak_of(answer)
        assert peak < ROWS_BYTES + SMALL
        assert ROWS_BYTES < sum(map(len, messages)) < 1.02 * ROWS_BYTES
        shard.sequencer.close()

    asyncio.run(serve())


def test_a_push_of_distinct_rows_holds_their_sums_and_nothing_else_of_their_size() -> None:
    async def serve() -> None:
        shard = shard_context(0)
        shard.state.install(make_tables([TableSpec("t", DIM)]))
        shard.state.open_client(CLIENT_ID)
        pushes = Pushes(shard)

        def part(number: int) -> PushPart:
            request = read_request(push_message(number))
            assert request is not None
            assert isinstance(request.message, embedding_pb2.PushRequest)
            return PushPart.of_message(request.message, request.row_ids, request.rows)

        pushes.apply(part(1), Laps(time.perf_counter()))  # creates the rows
        second = part(2)
        peak, response = peak_of(lambda: pushes.apply(second, Laps(time.perf_counter())))
        assert response.steps[0].table_step == 2
        assert peak < ROWS_BYTES + SMALL
        shard.sequencer.close()

    asyncio.run(serve())
