"""What a worker says while its group keeps it waiting: whom it waits for, less and less often."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from shardam._group import GroupOptions

logger = logging.getLogger(__name__)

FIRST_WARNING_S = 5.0
"""A wait is said after this time: longer than a step as a rule, short enough that a user still looks at the screen."""


class StepWait:
    """How long a member has waited at its step, and what it has said of it. Thread-safe.

    Args:
        options: the member's place in its group.
    """

    def __init__(self, options: GroupOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._due_s = FIRST_WARNING_S

    def begin(self) -> None:
        """Notes that a wait begins."""
        with self._lock:
            self._since, self._due_s = time.monotonic(), FIRST_WARNING_S

    def note(self, step: int, missing: Sequence[int], absent: Sequence[int]) -> None:
        """Notes that the wait goes on; a warning says it when it is due, each time after twice the time.

        Args:
            step: the step that waits.
            missing: the ranks that it waits for; empty: not known.
            absent: of these, the ones that nobody has joined as.
        """
        with self._lock:
            waited_s = time.monotonic() - self._since
            if not missing or waited_s < self._due_s:
                return
            self._due_s = 2 * waited_s
        logger.warning(
            "%s has waited %.0f s at step %d for %s; `shardam status` shows where each worker is",
            self._options,
            waited_s,
            step,
            _ranks(missing, absent),
        )


def ranks_of(metadata: Mapping[str, str], name: str) -> list[int]:
    """Returns ranks out of an error's metadata; empty: it names none."""
    return [int(rank) for rank in metadata.get(name, "").split(",") if rank]


def _ranks(missing: Sequence[int], absent: Sequence[int]) -> str:
    kinds = [
        ("has not joined", "have not joined", [rank for rank in missing if rank in set(absent)]),
        ("is behind", "are behind", [rank for rank in missing if rank not in set(absent)]),
    ]
    return " and ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}, which {one if len(ranks) == 1 else many}"
        for one, many, ranks in kinds
        if ranks
    )
