"""How long a part may take to arrive in chunks: its budget is for the wait between two of them."""

from __future__ import annotations

import asyncio
from typing import cast

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.chunks import Chunk, ChunkedPart, OpenParts, PartSizes
from shardam_server.shard.services.exchange_chunks import StreamChunks
from shardam_server.shard.services.pushes import Pushes

BUDGET_S = 10.0
NUM_CHUNKS = 5
CLIENT_ID = b"c" * 16


class AnySizes:
    """Stands for Pushes: every part has as many ids as it says."""

    def check_first_chunk(self, request: embedding_pb2.PushRequest) -> PartSizes:
        return PartSizes(row_ids_bytes=request.total_bytes, rows_bytes=0)


def chunk(index: int) -> embedding_pb2.PushRequest:
    header = common_pb2.RequestHeader(
        client_id=CLIENT_ID, number=1, request_id=7, budget_s=BUDGET_S, chunk_index=index, num_chunks=NUM_CHUNKS
    )
    return embedding_pb2.PushRequest(header=header, total_bytes=0 if index else 8 * NUM_CHUNKS, row_ids=bytes(8))


async def arrive(pauses: list[float]) -> tuple[ChunkedPart | None, list[str], int]:
    """Takes the part's chunks with pauses before them, by a clock that only this turns.

    Returns:
        The part, if it became whole; the reasons of refusals; and the bytes that are reserved then.
    """
    loop, now = asyncio.get_running_loop(), 0.0
    loop.time = lambda: now  # type: ignore[method-assign]
    refused: list[str] = []

    def note(part: ChunkedPart, error: ShardamError) -> None:
        refused.append(error.reason)

    open_parts = OpenParts()
    chunks = StreamChunks(open_parts, cast(Pushes, AnySizes()), note)
    part = None
    for index, pause in enumerate(pauses):
        now += pause
        for _ in range(3):  # what is due is put in line in one turn of the loop and run in the next
            await asyncio.sleep(0)
        if not chunks.is_refused(chunk(index).header):
            part = chunks.take(Chunk(chunk(index), bytes(8), b""), arrived=now)
    now += 2 * BUDGET_S
    for _ in range(3):
        await asyncio.sleep(0)
    return part, refused, open_parts.reserved_bytes


def test_a_part_may_take_longer_than_its_budget_while_its_chunks_keep_coming() -> None:
    part, refused, reserved = asyncio.run(arrive([0.9 * BUDGET_S] * NUM_CHUNKS))
    assert part is not None
    assert (refused, reserved) == ([], 0)


def test_a_part_whose_next_chunk_stays_away_for_its_budget_is_refused_once_and_for_all_its_chunks() -> None:
    part, refused, reserved = asyncio.run(arrive([0.0, 0.9 * BUDGET_S, 1.1 * BUDGET_S, 0.0, 0.0]))
    assert (part, refused, reserved) == (None, ["SHARD_UNREACHABLE"], 0)


def test_a_part_that_its_client_has_left_unfinished_is_dropped_after_its_budget() -> None:
    part, refused, reserved = asyncio.run(arrive([0.0, 0.0]))
    assert (part, refused, reserved) == (None, ["SHARD_UNREACHABLE"], 0)
