"""What the open Exchange streams of a shard share: bounds, counts, and the moment at which they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from shardam_proto.errors import ShardNotReady
from shardam_server.shard.chunks import MAX_RESERVED_BYTES, OpenParts
from shardam_server.shard.parking import MAX_PARKED, Parking
from shardam_server.shard.turns import Turns

T = TypeVar("T")


class Streams:
    """The open streams. Used on the event loop.

    Args:
        max_parked: requests that may wait, over all streams.
        max_reserved_bytes: bytes that parts may reserve which arrive in chunks.

    Attributes:
        parking: places for requests that wait.
        open_parts: parts that arrive in chunks.
        turns: of their large answers.
        num_open: how many streams are open.
    """

    def __init__(self, max_parked: int = MAX_PARKED, max_reserved_bytes: int = MAX_RESERVED_BYTES) -> None:
        self.parking = Parking(max_parked)
        self.open_parts = OpenParts(max_reserved_bytes)
        self.turns = Turns()
        self.num_open = 0
        self._draining = asyncio.Event()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Counts a stream while it is open."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def drain(self) -> None:
        """Lets every stream end once it has answered what it accepted; the shard must refuse requests by now."""
        self._draining.set()

    def end_all(self) -> None:
        """Lets every stream that is open now end as drain does; those that are opened later stay."""
        self._draining.set()
        self._draining = asyncio.Event()

    async def wait_for_drain(self) -> None:
        """Waits until the streams are to end."""
        await self._draining.wait()

    async def until_drain(self, waiting: Awaitable[T]) -> T:
        """Waits for what may take long, unless the streams are to end.

        Raises:
            ShardNotReady: they are.
        """
        wait, drain = asyncio.ensure_future(waiting), asyncio.ensure_future(self.wait_for_drain())
        try:
            await asyncio.wait({wait, drain}, return_when=asyncio.FIRST_COMPLETED)
            if not wait.done():
                raise ShardNotReady("the shard is draining and lets nothing wait any longer; try again")
            return wait.result()
        finally:
            wait.cancel()
            drain.cancel()
