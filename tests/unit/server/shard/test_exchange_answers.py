"""The order in which one stream's answers go out."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc.aio

from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.phases import Laps
from shardam_server.shard.services.exchange_answers import SMALL_BYTES, AnswerWriter, Asked
from shardam_server.shard.turns import Turns

LARGE = SMALL_BYTES + 1


class Wire:
    """Stands for the call: takes one message in each turn that it is given."""

    def __init__(self, *, fails: bool = False) -> None:
        self.written: list[bytes] = []
        self.turns = asyncio.Semaphore(0)
        self._fails = fails

    async def write(self, message: bytes) -> None:
        await self.turns.acquire()
        if self._fails:
            raise grpc.aio.UsageError("the call has ended")
        self.written.append(message[:2])


def asked(request_id: int) -> Asked:
    return Asked("pull", request_id, Laps(0.0), 0.0)


def large(name: str, num_messages: int) -> list[bytes]:
    return [f"{name}{index}".encode().ljust(LARGE) for index in range(num_messages)]


async def write_all(wire: Wire, answers: list[list[list[bytes]]]) -> tuple[list[bytes], list[int], str]:
    """Puts answers, some more before each turn, and gives turns until all are sent.

    Returns:
        The messages in the order in which they were written, the requests in that in which they ended, and the metrics.
    """
    sent: list[int] = []
    metrics = ShardMetrics("test", 0)
    context = cast("grpc.aio.ServicerContext[bytes, bytes]", wire)
    writer = AnswerWriter(context, Turns(), metrics, lambda done: sent.append(done.request_id))
    writing = asyncio.create_task(writer.run())
    count = 0
    for step in answers:
        for messages in step:
            count += 1
            writer.put(asked(count), messages, measured=True)
        wire.turns.release()
        for _ in range(10):
            await asyncio.sleep(0)
    while len(sent) < count:
        wire.turns.release()
        await asyncio.sleep(0)
    writing.cancel()
    return wire.written, sent, metrics.text()


def test_a_small_answer_waits_for_one_message_of_a_large_one_at_most() -> None:
    async def run() -> tuple[list[bytes], list[int], str]:
        return await write_all(Wire(), [[large("a", 3)], [large("b", 2), [b"s1"], [b"s2"]], [[b"s3"]]])

    written, sent, metrics = asyncio.run(run())
    assert written == [b"a0", b"a1", b"s1", b"s2", b"a2", b"s3", b"b0", b"b1"]
    assert sent == [3, 4, 1, 5, 2]
    assert 'shardam_phase_seconds_count{cluster="test",kind="pull",phase="send",shard="0"} 5.0' in metrics


def test_small_answers_that_keep_coming_do_not_hold_up_a_large_one() -> None:
    async def run() -> tuple[list[bytes], list[int], str]:
        return await write_all(Wire(), [[large("a", 2), [b"s0"]], *([[b"s1"]] for _ in range(6))])

    written, _, _ = asyncio.run(run())
    assert written.index(b"a1") <= 3


def test_an_answer_that_cannot_be_sent_ends_all_the_same() -> None:
    async def run() -> tuple[list[bytes], list[int], str]:
        return await write_all(Wire(fails=True), [[large("a", 3), [b"s0"]]])

    written, sent, _ = asyncio.run(run())
    assert (written, sorted(sent)) == ([], [1, 2])
