"""gRPC's own threads as the system shows them: a moment after the last channel was closed none is left.

A process that is copied within that moment has locks that nobody will release, and gRPC offers nothing to wait on.
"""

from __future__ import annotations

import time
from pathlib import Path

from shardam._backoff import Deadline

NAMES = ("grpc", "event_engine", "lifeguard")
"""What the names of gRPC's threads begin with, in version 1.85."""

POLL_S = 0.001
"""Their end takes some milliseconds."""

UNCHANGED_S = 1.0
"""After a hundred times as long without one thread less, something else in this process has a channel or a server."""

BLIND_S = 0.05
"""Waited where the system shows no threads."""

_TASKS = Path("/proc/self/task")


class GrpcThreads:
    """The threads of gRPC in this process, but for those that something else keeps."""

    def __init__(self) -> None:
        self._kept: set[str] = set()

    def wait_until_gone(self, deadline: Deadline) -> bool:
        """Waits until gRPC has ended its threads; False: it has not at the deadline.

        Threads that do not end because something else in this process uses gRPC are not waited for again.
        """
        if not _TASKS.is_dir():
            time.sleep(min(BLIND_S, deadline.remaining_s))
            return True
        running, unchanged = _running(), Deadline(UNCHANGED_S)
        while not running <= self._kept:
            if deadline.passed:
                return False
            if unchanged.passed:
                self._kept = running
                break
            time.sleep(POLL_S)
            before, running = running, _running()
            if running != before:
                unchanged = Deadline(UNCHANGED_S)
        return True


def _running() -> set[str]:
    """Returns the ids of gRPC's threads."""
    found = set()
    for task in _TASKS.iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:
            continue  # it has ended
        if name.startswith(NAMES):
            found.add(task.name)
    return found
