"""Whether this process may still act as its shard (PROTOCOL.md, section 9).

An owner that overslept its lease may have been replaced. It cannot know from its memory, but it can know that it slept: the
gaps between the ticks of its own renewal loop say so, by a clock that runs while the machine is suspended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardam_proto.errors import ShardNotReady

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since the machine started, sleep included where the system counts it."""
    return time.clock_gettime(_CLOCK)


class Tenure:
    """A shard's right to serve, from one confirmation to the next. Thread-safe: fields are replaced whole.

    Args:
        lease_s: how long a name outlives its last renewal.
        now: the clock.
    """

    def __init__(self, lease_s: float, now: Callable[[], float] = boot_seconds) -> None:
        self._longest_gap_s = lease_s / 2
        self._now = now
        self._last_tick = now()
        self._suspended = False

    @property
    def suspended(self) -> bool:
        """True: it overslept, and nobody has confirmed it since."""
        self._notice_gap()
        return self._suspended

    def tick(self) -> None:
        """One round of the renewal loop begins; whether Redis answers does not matter."""
        self._notice_gap()
        self._last_tick = self._now()

    def confirm(self) -> None:
        """Redis says that the name is this process's, at or after the last tick."""
        self._suspended = False

    def check(self) -> None:
        """Refuses to act while suspended.

        Raises:
            ShardNotReady: it overslept; retryable, because Redis may confirm it.
        """
        if self.suspended:
            raise ShardNotReady(
                "the shard was paused beyond half of its lease and waits until Redis confirms that it still owns its name"
            )

    def _notice_gap(self) -> None:
        if self._now() - self._last_tick > self._longest_gap_s:
            self._suspended = True
