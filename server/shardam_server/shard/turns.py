"""Large answers leave one at a time, so that the event loop is never busy with several of them in a row."""

from __future__ import annotations

import asyncio

LARGE_BYTES = 2**20
"""gRPC copies an answer on the event loop: a millisecond for this size, and up to 64 for the largest."""


class Turns:
    """Gives each large answer a round of the event loop of its own. Used on the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self, num_bytes: int) -> None:
        """Waits for a turn to send so many bytes; the caller sends before it waits for anything else."""
        if num_bytes >= LARGE_BYTES:
            async with self._turn:
                await asyncio.sleep(0)  # timers and other requests first
