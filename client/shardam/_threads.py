"""Threads that make blocking calls to shards side by side.

They are started at connect and live as long as the client: gRPC's own futures and executors start threads when they are
used, which Python 3.12 and later refuse while the interpreter exits, and queued pushes are flushed exactly then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class CallThreads(Generic[T]):
    """A number of daemon threads.

    Args:
        num_threads: calls that run at once.
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._name = name
        self._threads: list[threading.Thread] = []
        self.grow(num_threads)

    def grow(self, num_threads: int) -> None:
        """Starts more threads until there are so many; fewer it never becomes."""
        with self._lock:
            while len(self._threads) < num_threads and not self._closed:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def run_all(self, tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Starts all tasks, then waits for all; once the threads have ended the tasks run in the caller's.

        Returns:
            Each task's result, or the exception it raised, in order.
        """
        work: list[tuple[Callable[[], T], Future[T]]] = [(task, Future()) for task in tasks]
        futures = [future for _, future in work]
        with self._lock:
            closed = self._closed
            if not closed:
                for item in work:
                    self._tasks.put(item)
        if closed:
            for task, future in work:
                _run_into(future, task)
        return [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads after what they have been given, and waits for them."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            item = self._tasks.get()
            if item is None:
                return
            task, future = item
            _run_into(future, task)
            del item, task, future  # an idle thread keeps no message alive


def _run_into(future: Future[T], task: Callable[[], T]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:  # noqa: BLE001 - the thread's edge: whoever waits gets the error
        future.set_exception(error)
