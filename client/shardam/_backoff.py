"""Waiting between tries: exponential with jitter, never longer than 1 s, never past a deadline."""

from __future__ import annotations

import random
import threading
import time

FIRST_WAIT_S = 0.05
MAX_WAIT_S = 1.0
"""A shard that came back is to be used within 5 s. Two such waits, and gRPC's own on a broken connection, leave half of it."""

MAX_HURRIES = 3
"""Tries without a wait one after the other: on a new connection, once more for what was under way on the old one, and when the
process there has been told of this client. More would be two processes that contend for one shard: no reason to hurry."""


class Deadline:
    """A point in time by this process's monotonic clock.

    Args:
        after_s: seconds from now.
    """

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._at = time.monotonic() + after_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """True: no time is left."""
        return self.remaining_s <= 0.0


class Backoff:
    """Waits between the tries of one call."""

    def __init__(self) -> None:
        self._wait_s = FIRST_WAIT_S
        self._num_hurries = 0
        self.num_waits = 0

    def next_s(self, *, hurry: bool = False) -> float:
        """Returns half to all of the present wait (so that many clients do not come back as one), then doubles it.

        Args:
            hurry: the next try has a reason to succeed; returns 0, MAX_HURRIES times in a row at most.
        """
        if hurry and self._num_hurries < MAX_HURRIES:
            self._num_hurries += 1
            return 0.0
        self._num_hurries = 0
        wait_s = self._wait_s * random.uniform(0.5, 1.0)
        self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)
        self.num_waits += 1
        return wait_s

    def wait(self, deadline: Deadline, over: threading.Event | None = None, *, hurry: bool = False) -> None:
        """Sleeps for the next wait, or until the deadline.

        Args:
            deadline: until when at most.
            over: ends the sleep when it is set.
            hurry: as for next_s.
        """
        wait_s = min(self.next_s(hurry=hurry), deadline.remaining_s)
        if over is None:
            time.sleep(wait_s)
        else:
            over.wait(wait_s)
