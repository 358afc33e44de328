"""Tasks that run beside a shard's calls until they are stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger(__name__)


class Background:
    """Tasks of one owner. Used on the event loop."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        """True between the first start and stop."""
        return bool(self._tasks)

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Starts a task that should not end by itself; what ends it is logged."""
        task = asyncio.create_task(work)
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def stop(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a background task has ended: %r", error, exc_info=error)
