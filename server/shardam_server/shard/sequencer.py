"""One order for all changes of a shard, and a pool for reads; neither runs on the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_NUM_READERS = 4
"""Pulls that run at once; they spend their time in native code without the GIL, so a few fill the cores."""


class Sequencer:
    """Runs changes one after the other in the order they came, on a thread of its own, and reads beside them."""

    def __init__(self) -> None:
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="apply")
        self._readers = concurrent.futures.ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read")
        self._queue_depth = 0

    @property
    def queue_depth(self) -> int:
        """Changes that have come and are not finished."""
        return self._queue_depth

    async def change(self, apply: Callable[[], T]) -> T:
        """Runs a change after all that came before it.

        A caller that is cancelled while the change waits takes it back; one that has begun is finished.
        """
        self._queue_depth += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, apply)
        finally:
            self._queue_depth -= 1

    async def read(self, action: Callable[[], T]) -> T:
        """Runs a read beside changes and other reads; tables guard themselves by their locks."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, action)

    def close(self) -> None:
        """Finishes what has been accepted and ends the threads."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
