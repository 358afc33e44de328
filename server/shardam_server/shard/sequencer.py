"""One order for all changes of a shard, and a pool for reads; neither runs on the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from shardam_proto.errors import QueueFull

T = TypeVar("T")

_NUM_READERS = 4
"""Pulls that run at once; they spend their time in native code without the GIL, so a few fill the cores."""

MAX_QUEUE_BYTES = 256 * 2**20
"""Bytes of changes that wait by default; four of the largest messages."""

MAX_READS = 1024
"""Reads that have not ended: what 16 streams may have unanswered. Beyond, a caller is told to come back instead of queueing."""

RETRY_AFTER_S = 0.1
"""A full queue of 256 MiB has room again after about this long."""


class Sequencer:
    """Runs changes one after the other in the order they came, on a thread of its own, and reads beside them.

    Used from the event loop's thread.

    Args:
        max_queue_bytes: bytes of changes that may wait; beyond, no more are taken in.

    Attributes:
        queue_depth: changes that have not ended.
        queue_bytes: bytes that they hold.
        held_bytes: bytes of changes that have no place in the order yet, because they are held back; so many may wait, too.
    """

    def __init__(self, max_queue_bytes: int = MAX_QUEUE_BYTES) -> None:
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="apply")
        self._readers = concurrent.futures.ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read")
        self._waiting_readers = concurrent.futures.ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="wait-and-read")
        self._num_reads = 0
        self._max_queue_bytes = max_queue_bytes
        self._room = asyncio.Event()
        self._room.set()
        self.queue_depth = 0
        self.queue_bytes = 0
        self.held_bytes = 0

    def submit(self, apply: Callable[[], T], num_bytes: int = 0) -> asyncio.Future[T]:
        """Puts a change behind all that came before it; it runs whatever becomes of the future.

        Args:
            apply: the change.
            num_bytes: what it holds in memory until it has run.
        """
        self.queue_depth += 1
        self.queue_bytes += num_bytes
        self._note_room()
        work = asyncio.get_running_loop().run_in_executor(self._writer, apply)

        def leave(done: asyncio.Future[T]) -> None:
            if not done.cancelled():
                done.exception()  # counts as seen: whoever asked for the change may be gone
            self.queue_depth -= 1
            self.queue_bytes -= num_bytes
            self._note_room()

        work.add_done_callback(leave)
        return work

    def count_held(self, num_bytes: int) -> None:
        """Counts bytes of changes that are held back before they come here; below zero: that are not any more."""
        self.held_bytes += num_bytes
        self._note_room()

    def _note_room(self) -> None:
        if max(self.queue_bytes, self.held_bytes) < self._max_queue_bytes:
            self._room.set()
        else:
            self._room.clear()

    async def change(self, apply: Callable[[], T], num_bytes: int = 0) -> T:
        """Runs a change after all that came before it; one that is taken in is finished, whoever waits for it."""
        return await asyncio.shield(self.submit(apply, num_bytes))

    def check_room(self) -> None:
        """Refuses a change of a unary call while the queue is full.

        Raises:
            QueueFull: too many bytes wait; the metadata says after how many seconds to try again.
        """
        if not self._room.is_set():
            raise QueueFull(
                f"{max(self.queue_bytes, self.held_bytes)} bytes of changes wait to be applied, at most "
                f"{self._max_queue_bytes} may; try again",
                metadata={"retry_after_s": str(RETRY_AFTER_S), "queue_bytes": str(max(self.queue_bytes, self.held_bytes))},
            )

    async def wait_for_room(self) -> None:
        """Waits until the queue takes more; a stream is not read meanwhile."""
        await self._room.wait()

    async def read(self, action: Callable[[], T]) -> T:
        """Runs a read that never waits, beside changes and other reads.

        Raises:
            QueueFull: too many reads wait; the metadata says after how many seconds to try again.
        """
        return await self._read(self._readers, action)

    async def wait_and_read(self, action: Callable[[], T]) -> T:
        """Runs a read that first waits for the end of a change, on a thread that others do not need.

        Raises:
            QueueFull: as read.
        """
        return await self._read(self._waiting_readers, action)

    async def _read(self, readers: concurrent.futures.Executor, action: Callable[[], T]) -> T:
        if self._num_reads >= MAX_READS:
            raise QueueFull(
                f"{self._num_reads} reads wait, at most {MAX_READS} may; try again",
                metadata={"retry_after_s": str(RETRY_AFTER_S)},
            )
        self._num_reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(readers, action)
        finally:
            self._num_reads -= 1

    def close(self) -> None:
        """Finishes what has been accepted and ends the threads."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._waiting_readers.shutdown(wait=True)
