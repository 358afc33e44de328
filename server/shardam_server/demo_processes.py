"""The demo's child processes: started in sessions of their own, watched, heard line by line, and always stopped.

A child holds the read end of a pipe as its stdin and ends when the pipe does, so that none outlives this process even if it
is killed. Ctrl-C reaches this process alone, which then stops the children in order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

TAIL_LINES = 40
"""Last lines of a child's stderr that are kept for an error message."""

READ_REST_S = 5.0
"""A reader may wait that long for the rest of a dead child's output; a grandchild may still hold the pipe."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a child's stdout."""

    child: str
    text: str


@dataclasses.dataclass(frozen=True)
class Exited:
    """A child's end; all its lines came before."""

    child: str
    status: int


Happening = Line | Exited


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without SHARDAM_*, so that a user's own cluster does not get in, and with `extra`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SHARDAM_")} | dict(extra)


class Child:
    """One child process.

    Args:
        name: what messages call it.
        command: program and arguments.
        environment: all of it.
        happenings: where its lines and its end are put.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], happenings: queue.SimpleQueue[Happening]
    ) -> None:
        self.name = name
        self._happenings = happenings
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self._watcher = threading.Thread(target=self._watch, name=f"watch {name}", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self._put_line), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, self._tail.append), daemon=True),
        ]
        for reader in readers:
            reader.start()
        status = self._process.wait()
        for reader in readers:
            reader.join(READ_REST_S)
        self._happenings.put(Exited(self.name, status))

    def _put_line(self, text: str) -> None:
        self._happenings.put(Line(self.name, text))

    @staticmethod
    def _read(pipe: IO[bytes] | None, take: Callable[[str], None]) -> None:
        if pipe is None:  # both are pipes; only the type says otherwise
            return
        with pipe:
            for line in pipe:
                take(line.decode(errors="replace").rstrip())

    def add_to_tail(self, text: str) -> None:
        """Keeps a line of its stdout that nobody understood beside those of its stderr."""
        self._tail.append(text)

    def tail(self) -> list[str]:
        """Returns the last lines of its stderr."""
        return list(self._tail)

    def tell(self, message: bytes) -> None:
        """Writes to its stdin; one that has ended hears nothing."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(message)
                self._process.stdin.flush()

    def stop(self, grace_s: float) -> None:
        """Ends it: by the end of its stdin, after half the grace by SIGTERM, after all of it by SIGKILL."""
        self._close_stdin()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.wait(grace_s / 2)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)
        self._process.wait()
        self._watcher.join(READ_REST_S)

    def kill(self) -> None:
        """Ends it at once."""
        self._close_stdin()
        self._process.kill()
        self._process.wait()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
