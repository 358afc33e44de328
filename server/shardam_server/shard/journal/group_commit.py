"""One fsync for all changes that were written before it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from shardam_proto.errors import JournalFailed

logger = logging.getLogger(__name__)


class GroupCommit:
    """Makes what is written durable, on a thread of its own, as soon as something is; while one fsync runs, the next gathers.

    An fsync that fails is never repeated: the system may have dropped the pages, and the next one would say that all is well.

    Args:
        sync: waits until all that is written is on the disk.
        fail: told once why that cannot be done any more; returns the message for whoever waits.
    """

    def __init__(self, sync: Callable[[], None], fail: Callable[[Exception], str]) -> None:
        self._sync = sync
        self._fail = fail
        self._changed = threading.Condition()
        self._written = 0  # counts writes and cuts: the position in a file may go back, this never does
        self._synced = 0
        self._failure = ""
        self._ending = False
        self._waiting: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._thread = threading.Thread(target=self._run, name="journal-fsync", daemon=True)
        self._thread.start()

    def note_write(self) -> None:
        """Something was written."""
        with self._changed:
            self._written += 1
            self._changed.notify()

    async def wait(self) -> None:
        """Waits until all that was written before the call is on the disk.

        Raises:
            JournalFailed: it may not be.
        """
        with self._changed:
            if self._synced >= self._written:
                return
            if self._failure:
                raise JournalFailed(self._failure)
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()
            self._waiting.append((self._written, loop, done))
        await done

    def end(self) -> None:
        """Syncs what is written and ends the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._synced < self._written)
                if self._synced == self._written:
                    return
                written = self._written
            try:
                self._sync()
            except Exception as error:  # noqa: BLE001 - a thread's edge: whoever waits is told
                self._give_up(error)
                return
            with self._changed:
                self._synced = written
                self._settle("")

    def _give_up(self, error: Exception) -> None:
        failure = self._fail(error)
        with self._changed:
            self._failure = failure
            self._settle(failure)

    def _settle(self, failure: str) -> None:
        """Answers those whose writes are on the disk, or, with a failure, all; holds the condition."""
        left = []
        for written, loop, done in self._waiting:
            if failure or written <= self._synced:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                    loop.call_soon_threadsafe(_finish, done, failure)
            else:
                left.append((written, loop, done))
        self._waiting = left


def _finish(done: asyncio.Future[None], failure: str) -> None:
    if done.done():
        return  # whoever waited has gone
    if failure:
        done.set_exception(JournalFailed(failure))
    else:
        done.set_result(None)
