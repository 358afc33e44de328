"""A lock that many readers or one writer hold."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers, so that pulls cannot starve a push."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._num_readers = 0
        self._num_waiting = 0
        self._num_waiting_writers = 0
        self._writing = False

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Holds the lock with other readers."""
        with self._lock:
            while self._writing or self._num_waiting_writers:
                self._wait()
            self._num_readers += 1
        try:
            yield
        finally:
            self.leave()

    def enter_at_once(self) -> bool:
        """Takes the lock with other readers, until `leave`; False: a writer has it or waits for it."""
        with self._lock:
            free = not self._writing and not self._num_waiting_writers
            self._num_readers += free
        return free

    def leave(self) -> None:
        """Gives the lock back as a reader."""
        with self._lock:
            self._num_readers -= 1
            if self._num_waiting and self._num_readers == 0:
                self._freed.notify_all()

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        """Holds the lock alone."""
        self.enter_alone()
        try:
            yield
        finally:
            self.leave_alone()

    def enter_alone(self) -> None:
        """Takes the lock alone, until `leave_alone`."""
        with self._lock:
            self._num_waiting_writers += 1
            try:
                while self._writing or self._num_readers:
                    self._wait()
            finally:
                self._num_waiting_writers -= 1
            self._writing = True

    def leave_alone(self) -> None:
        """Gives the lock back as the writer."""
        with self._lock:
            self._writing = False
            if self._num_waiting:
                self._freed.notify_all()

    def _wait(self) -> None:
        self._num_waiting += 1
        try:
            self._freed.wait()
        finally:
            self._num_waiting -= 1
