"""Forked children of a test's own process, none of which outlives its test, and threads that are busy meanwhile."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar, cast

from shardam_testing.waiting import wait_for

HANG_S = 60
"""Far beyond what a child takes on a busy machine."""

T = TypeVar("T")


class Child(Generic[T]):
    """A forked child that runs an action and ends without this process's exit hooks.

    Args:
        action: what it does; its result is pickled.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._answers, answer_to = os.pipe()
        self._reaped = False
        self.pid = os.fork()
        if self.pid == 0:
            _run(action, answer_to)
        os.close(answer_to)

    def result(self) -> T:
        """Waits for the child's end and returns its result; an error of the child is raised with its traceback."""
        data = b""
        while True:
            assert select.select([self._answers], [], [], HANG_S)[0], f"child {self.pid} hangs"
            part = os.read(self._answers, 65_536)
            if not part:
                break
            data += part
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._reaped = True
        assert data, f"child {self.pid} ended with {status} and no answer"
        succeeded, value = pickle.loads(data)
        assert succeeded, f"child {self.pid}: {value}"
        return cast("T", value)

    def end(self) -> None:
        """Kills it if it still runs."""
        os.close(self._answers)
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _run(action: Callable[[], object], answer_to: int) -> None:
    try:
        signal.alarm(HANG_S)
        try:
            answer = pickle.dumps((True, action()))
        except BaseException:  # noqa: BLE001 - the process's edge: the parent is told
            answer = pickle.dumps((False, traceback.format_exc()))
        os.write(answer_to, answer)
    finally:
        os._exit(0)


@contextlib.contextmanager
def forked(action: Callable[[], T]) -> Iterator[Child[T]]:
    """Forks a child, and ends it with the context."""
    child = Child(action)
    try:
        yield child
    finally:
        child.end()


def in_child(action: Callable[[], T]) -> T:
    """Runs an action in a forked child and returns its result."""
    with forked(action) as child:
        return child.result()


class Busy:
    """Threads that do something over and over; an error of theirs is raised at the end."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.counts = [0] * len(actions)
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(len(actions))
        self._runs = [self._threads.submit(self._run, index, action) for index, action in enumerate(actions)]

    def _run(self, index: int, action: Callable[[], object]) -> None:
        while not self._over.is_set():
            action()
            self.counts[index] += 1

    def wait(self, count: int) -> None:
        """Waits until each has done it so many times, or one has failed."""

        def done() -> bool:
            return min(self.counts) >= count or any(run.done() for run in self._runs)

        wait_for(f"all threads to work {count} times", done, HANG_S)

    def __enter__(self) -> Busy:
        self.wait(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for run in self._runs:
            run.result(HANG_S)
        self._threads.shutdown()
