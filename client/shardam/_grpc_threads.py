"""gRPC's own threads as the system shows them: a moment after the last channel was closed none is left.

A process that is copied within that moment has locks that nobody will release, and gRPC offers nothing to wait on.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from shardam._backoff import Deadline

NAMES = ("grpc", "event_engine", "lifeguard")
"""What the names of gRPC's threads begin with, in version 1.85, once they have named themselves."""

POLL_S = 0.001
"""Their end takes some milliseconds."""

UNCHANGED_S = 1.0
"""After a hundred times as long without one thread less, something else in this process has a channel or a server."""

UNNAMED_S = 0.05
"""A thread of gRPC names itself at once; one that has not after this long is none, but of a library that computes."""

BLIND_S = 0.05
"""Waited where the system shows no threads."""

_TASKS = Path("/proc/self/task")


class GrpcThreads:
    """The threads of gRPC in this process, but for those that something else keeps."""

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def wait_until_gone(self, deadline: Deadline) -> bool:
        """Waits until gRPC has ended its threads; False: it has not at the deadline.

        Threads that do not end because they are something else's are not waited for again.
        """
        if not _TASKS.is_dir():
            time.sleep(min(BLIND_S, deadline.remaining_s))
            return True
        found, unchanged_since = self._found(), time.monotonic()
        while found is None or found:
            if deadline.passed:
                return False
            unchanged_s = time.monotonic() - unchanged_since
            if found and unchanged_s >= (UNCHANGED_S if any(map(_is_grpc, found.values())) else UNNAMED_S):
                self._kept.update(found)
                return True
            time.sleep(POLL_S)
            before, found = found, self._found()
            if found != before:
                unchanged_since = time.monotonic()
        return True

    def _found(self) -> dict[int, str] | None:
        """Returns ids and names of threads that are neither Python's nor kept; None: one has ended meanwhile.

        That one may have started another, which this look missed.
        """
        known = {thread.native_id for thread in threading.enumerate()} | self._kept
        try:
            names = {int(task.name): (task / "comm").read_text() for task in _TASKS.iterdir()}
        except OSError:
            return None
        return {task: name for task, name in names.items() if task not in known}


def _is_grpc(name: str) -> bool:
    return name.startswith(NAMES)
