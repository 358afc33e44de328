"""Forked children of a test's own process: what they return is handed back, and none outlives its test."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

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
