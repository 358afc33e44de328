"""What home has to tell one other shard: one thing at a time, so that a shard that is down costs one call now and then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shardam_proto.errors import ShardamError

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")

FIRST_WAIT_S = 0.05
"""Waits between two tries on a shard that fails double from this to the lane's longest."""

ANNOUNCE_EVERY_S = 30.0
"""A shard that is away for long is said to be so this often, however much waits for it."""


class PeerLane(Generic[KeyT]):
    """Attends to one key after the other; one that fails goes behind the others. Used on the event loop.

    Args:
        index: the shard's.
        attend: does what a key asks of the shard next, or raises ShardamError.
        refresh: called after a failure: the shard may be elsewhere now.
        what: says in the log what waits for the shard.
        longest_wait_s: longest wait between two tries.

    Attributes:
        idle: set while there is nothing to attend to.
    """

    def __init__(
        self,
        index: int,
        attend: Callable[[KeyT], Awaitable[None]],
        refresh: Callable[[], Awaitable[None]],
        what: Callable[[KeyT], str],
        longest_wait_s: float,
    ) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._index = index
        self._attend = attend
        self._refresh = refresh
        self._what = what
        self._longest_wait_s = longest_wait_s
        self._waiting: dict[KeyT, None] = {}  # in order
        self._wake = asyncio.Event()

    def add(self, key: KeyT) -> None:
        """Has a key attended to after those before it."""
        self._waiting[key] = None
        self.idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Attends to keys for ever."""
        wait_s, announced = FIRST_WAIT_S, -ANNOUNCE_EVERY_S
        while True:
            await self._wake.wait()
            key = next(iter(self._waiting))
            del self._waiting[key]
            try:
                await self._attend(key)
                wait_s = FIRST_WAIT_S
            except ShardamError as error:
                if time.monotonic() - announced >= ANNOUNCE_EVERY_S:
                    announced = time.monotonic()
                    logger.warning("%s waits for shard %d: %s", self._what(key), self._index, error.message)
                self.add(key)
                await asyncio.sleep(wait_s)
                wait_s = min(self._longest_wait_s, 2 * wait_s)
                await self._refresh()
            if not self._waiting:
                self._wake.clear()
                self.idle.set()
