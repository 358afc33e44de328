"""Whether this process may still act as its shard (PROTOCOL.md, section 9).

An owner that overslept its lease may have been replaced. It cannot know from its memory, but it can know that it slept: the
gaps between the ticks of its own renewal loop say so, by a clock that runs while the machine is suspended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardam_proto.errors import ShardNotReady

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since the machine started, sleep included where the system counts it."""
    return time.clock_gettime(_CLOCK)


class Tenure:
    """A shard's right to serve, from one confirmation to the next. Any thread may use it.

    Nothing is noticed before the first tick: a process without a name has none to oversleep.

    Args:
        lease_s: how long a name outlives its last renewal.
        now: the clock.
    """

    def __init__(self, lease_s: float, now: Callable[[], float] = boot_seconds) -> None:
        self._longest_gap_s = lease_s / 2
        self._now = now
        self._lock = threading.Lock()
        self._last_tick: float | None = None
        self._suspended = False
        self._woke_at = 0.0
        self._fenced = False

    @property
    def suspended(self) -> bool:
        """True: it overslept, and nobody has confirmed it since."""
        with self._lock:
            self._notice_gap()
            return self._suspended

    @property
    def fenced(self) -> bool:
        """True: another process is this shard now, for good."""
        return self._fenced

    def tick(self) -> float:
        """One round of the renewal loop begins; whether Redis answers does not matter.

        Returns:
            The time, for `confirm`.
        """
        with self._lock:
            self._notice_gap()
            self._last_tick = self._now()
            return self._last_tick

    def confirm(self, asked_at: float | None = None) -> None:
        """Redis says that the name is this process's.

        Args:
            asked_at: what `tick` returned before Redis was asked; an answer to a question from before a pause says nothing
                about what happened in it. None: just now.
        """
        with self._lock:
            self._notice_gap()
            if asked_at is None or asked_at >= self._woke_at:
                self._suspended = False

    def fence(self) -> None:
        """Another process has the name: this one never acts again."""
        self._fenced = True

    def check(self) -> None:
        """Refuses to act while suspended or once fenced.

        Raises:
            ShardNotReady: it overslept (Redis may confirm it), or was replaced (the registry names the other): retryable.
        """
        if self._fenced:
            raise ShardNotReady("another process has taken this shard's place; find it through Redis and try again")
        if self.suspended:
            raise ShardNotReady(
                "the shard was paused beyond half of its lease and waits until Redis confirms that it still owns its name"
            )

    def _notice_gap(self) -> None:
        now = self._now()
        if self._last_tick is not None and now - self._last_tick > self._longest_gap_s:
            self._suspended = True
            self._woke_at = self._last_tick = now
