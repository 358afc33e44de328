"""Requests of streams that wait for something: how many may, and how much one stream may have unanswered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from shardam_proto.errors import QueueFull
from shardam_proto.limits import MAX_MESSAGE_BYTES

MAX_PARKED = 1024
"""Requests that wait by default: a few of each of some hundred workers."""

RETRY_AFTER_S = 0.1
"""What waits here waits for changes that are in the queue; a full one is applied within about this time."""

MAX_UNANSWERED = 64
"""Requests of one stream that are unanswered before it is read again: twice the pushes that a client may have in flight, so
that its pulls fit, too. The answers of a client that does not read them pile up to this and no further."""

MAX_HELD_BYTES = MAX_MESSAGE_BYTES
"""Bytes of one stream's pulls and their answers before it is read again: the largest answer, or several smaller ones."""


class Parking:
    """Places for requests that wait, over all streams. Used on the event loop.

    Args:
        max_parked: how many may wait.

    Attributes:
        num_parked: how many do.
    """

    def __init__(self, max_parked: int = MAX_PARKED) -> None:
        self._max_parked = max_parked
        self.num_parked = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Takes a place while a request waits.

        Raises:
            QueueFull: all are taken; the metadata says after how many seconds to try again.
        """
        if self.num_parked >= self._max_parked:
            raise QueueFull(
                f"{self.num_parked} requests wait on streams, at most {self._max_parked} may; try again, or start the shard "
                "with a larger --max-parked",
                metadata={"retry_after_s": str(RETRY_AFTER_S), "parked_requests": str(self.num_parked)},
            )
        self.num_parked += 1
        try:
            yield
        finally:
            self.num_parked -= 1


class Window:
    """What one stream has unanswered. Used on the event loop.

    Args:
        max_unanswered: requests beyond which the stream is not read.
        max_held_bytes: bytes beyond which it is not.
    """

    def __init__(self, max_unanswered: int = MAX_UNANSWERED, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_unanswered = max_unanswered
        self._max_held_bytes = max_held_bytes
        self._num_unanswered = 0
        self._held_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def enter(self, held_bytes: int) -> None:
        """Notes a request that will be answered."""
        self._change(1, held_bytes)

    def leave(self, held_bytes: int) -> None:
        """Notes that it is answered, or never will be."""
        self._change(-1, -held_bytes)

    async def wait_for_room(self) -> None:
        """Waits until the stream may be read."""
        await self._room.wait()

    def _change(self, requests: int, held_bytes: int) -> None:
        self._num_unanswered += requests
        self._held_bytes += held_bytes
        if self._num_unanswered < self._max_unanswered and self._held_bytes < self._max_held_bytes:
            self._room.set()
        else:
            self._room.clear()
