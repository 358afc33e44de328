"""The answers of one stream on their way out: small ones between the messages of large ones."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence

import grpc.aio

from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.phases import Laps
from shardam_server.shard.turns import Turns

logger = logging.getLogger(__name__)

SMALL_BYTES = 2**17
"""Bytes of an answer up to which it goes before the next message of larger ones; these need 100 us and more each."""


@dataclasses.dataclass(eq=False, slots=True)
class Asked:
    """A request that has to be answered.

    Attributes:
        kind: the field of its message.
        request_id: its id.
        laps: where its time goes, from its arrival on.
        arrived: time.perf_counter() of its first message.
        held_bytes: what it and its answer hold until it is answered, beside what the sequencer counts.
        ended: is set when it is answered, or never will be; None: nobody waits for that.
    """

    kind: str
    request_id: int
    laps: Laps
    arrived: float
    held_bytes: int = 0
    ended: asyncio.Future[None] | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Outgoing:
    asked: Asked
    messages: collections.deque[bytes]
    measured: bool


class AnswerWriter:
    """Writes answers, one message after the other. Used on the event loop.

    Of two large answers the first goes out whole before the second; what is small waits for one message at most.

    Args:
        context: the call.
        turns: of large messages of all streams.
        metrics: counters to feed.
        when_sent: called when an answer is handed to the transport, or cannot be.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext[bytes, bytes],
        turns: Turns,
        metrics: ShardMetrics,
        when_sent: Callable[[Asked], None],
    ) -> None:
        self._context = context
        self._turns = turns
        self._metrics = metrics
        self._when_sent = when_sent
        self._small: collections.deque[_Outgoing] = collections.deque()
        self._large: collections.deque[_Outgoing] = collections.deque()
        self._news = asyncio.Event()

    def put(self, asked: Asked, messages: Sequence[bytes], *, measured: bool) -> None:
        """Sends an answer after others of its size.

        Args:
            asked: the request.
            messages: the answer's messages, in their order.
            measured: whether the request's phases count.
        """
        is_small = len(messages) == 1 and len(messages[0]) <= SMALL_BYTES
        (self._small if is_small else self._large).append(_Outgoing(asked, collections.deque(messages), measured))
        self._news.set()

    async def run(self) -> None:
        """Writes until it is cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._small or self._large:
                for _ in range(
                    len(self._small)
                ):  # those that come meanwhile wait for the next large message, or it might for ever
                    await self._write_next(self._small)
                if self._large:
                    await self._write_next(self._large)

    async def _write_next(self, queue: collections.deque[_Outgoing]) -> None:
        """Writes the next message of the first answer."""
        outgoing = queue[0]
        asked, message = outgoing.asked, outgoing.messages.popleft()
        try:
            await self._turns.take(len(message))
            await self._context.write(message)
        except grpc.aio.BaseError as failure:
            logger.debug("the answer of %s could not be sent: %s", asked.kind, failure, extra={"request_id": asked.request_id})
            outgoing.messages.clear()
        else:
            self._metrics.sent_bytes.inc(len(message))
        if not outgoing.messages:
            queue.popleft()
            if outgoing.measured:
                asked.laps.end("send")
                self._metrics.phases.add(asked.kind, asked.laps.seconds)
            self._when_sent(asked)
