"""When the requests of one stream may be carried out: after the step before their own, and a pull after earlier changes.

What waits takes a place in the shard's parking, keeps to its message's budget, and ends when the shard drains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from shardam_proto.errors import ShardUnreachable
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.waits import Passage, PassageOf, change_passage, pull_passage
from shardam_server.shard.holding import mark_of
from shardam_server.shard.services.row_answers import RowAnswer

Answer = Callable[[], Awaitable[embedding_pb2.ExchangeResponse | RowAnswer]]
"""Waits for a request's answer."""

Apply = Callable[[], embedding_pb2.ExchangeResponse]
"""Applies a change; on the sequencer's thread."""


class StreamOrder:
    """The order of one stream's requests. Used on the event loop.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._last_change: asyncio.Future[embedding_pb2.ExchangeResponse] | asyncio.Future[None] | None = None
        self._last_parked: asyncio.Future[None] | None = None

    def must_park(self, header: common_pb2.RequestHeader) -> bool:
        """Whether a change has to wait before it gets its place in the shard's order; none of a group overtakes another."""
        if not header.step:
            return False
        behind = self._last_parked is not None and not self._last_parked.done()
        return behind or change_passage(self._shard.state, header) is None

    def change(self, header: common_pb2.RequestHeader, apply: Apply, num_bytes: int) -> Answer:
        """Gives a change its place in the order of all; from here on it is applied whatever becomes of the stream.

        Args:
            header: its header.
            apply: the change.
            num_bytes: what it holds in memory.
        """
        applied = self._last_change = self._shard.submit(apply, num_bytes, mark_of(header))
        return lambda: self._shard.settle(applied)

    def parked_change(self, header: common_pb2.RequestHeader, apply: Apply, num_bytes: int) -> Answer:
        """Gives a change its place once it may have one; until then it is not taken, and dies with its stream.

        Args:
            header: its header.
            apply: the change.
            num_bytes: what it holds in memory.
        """
        before, ended = self._last_parked, asyncio.get_running_loop().create_future()
        state = self._shard.state
        self._last_parked = self._last_change = ended

        async def admit_and_settle() -> embedding_pb2.ExchangeResponse:
            try:
                async with within_budget(header, "a change", "was not taken; send it again"):
                    await self._parked(header, change_passage, before)
                    await self._shard.sequencer.wait_for_room()
                self._shard.check_state(state)
                return await self._shard.settle(self._shard.submit(apply, num_bytes, mark_of(header)))
            finally:
                ended.set_result(None)

        return admit_and_settle

    def passage_now(self, header: common_pb2.RequestHeader) -> Passage | None:
        """Lets a pull read at once; None: it has to wait.

        Raises:
            ShardamError: it never will read.
        """
        if self._last_change is not None and not self._last_change.done():
            return None
        return pull_passage(self._shard.state, header)

    def pull(self, header: common_pb2.RequestHeader) -> Callable[[], Awaitable[Passage]]:
        """Notes a pull's place on its stream; what is returned waits until it may read."""
        before, state = self._last_change, self._shard.state

        async def wait() -> Passage:
            if before is not None and not before.done():
                with self._shard.streams.parking.place():
                    await asyncio.wait({before})
                self._shard.tenure.check()  # time has passed
            passage = pull_passage(self._shard.state, header)
            if passage is None:
                passage = await self._parked(header, pull_passage)
                self._shard.tenure.check()
            self._shard.check_state(state)
            return passage

        return wait

    async def _parked(
        self, header: common_pb2.RequestHeader, passage_of: PassageOf, before: asyncio.Future[None] | None = None
    ) -> Passage:
        """Waits for a request's passage, after what was parked before it."""
        with self._shard.streams.parking.place():
            if before is not None and not before.done():
                await asyncio.wait({before})
            return await self._shard.streams.until_drain(self._shard.waits.passed(passage_of, header))


@contextlib.asynccontextmanager
async def within_budget(
    header: common_pb2.RequestHeader, what: str, remedy: str, waits_for: Callable[[], dict[str, str]] = dict
) -> AsyncIterator[None]:
    """Ends a wait after the time that its message has; zero: it has all the time.

    Args:
        header: of the message.
        what: what waits.
        remedy: what became of it, and what to do.
        waits_for: returns for whom it still waits when the time is up, for the error's metadata.

    Raises:
        ShardUnreachable: the time is up.
    """
    try:
        async with asyncio.timeout(header.budget_s or None):
            yield
    except TimeoutError:
        raise ShardUnreachable(
            f"{what} waited for its budget of {header.budget_s:g} s; {remedy}",
            metadata={"budget_s": str(header.budget_s), **waits_for()},
        ) from None
