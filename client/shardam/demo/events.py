"""What the demo's processes tell the command line: one JSON object a line on stdout, `event` names its kind.

The command line alone draws for people, so workers behave the same on a terminal, in a pipe and on another machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

Value = str | int | float | None | Sequence["Value"] | Mapping[str, "Value"]
"""What an event may carry."""

PROGRESS_INTERVAL_S = 0.1
"""A bar that moves ten times a second looks smooth; more only costs the training time."""


def emit(event: str, **values: Value) -> None:
    """Writes one event.

    Args:
        event: kind: "data" (what is trained on), "progress", "epoch", "moved" (the row to show), "resumed", "checkpoint",
            "checkpoint_failed", "stopped", "timings" (where the steps' time went), "end" or "error".
        values: what belongs to the kind, JSON-ready; ids of rows are strings.
    """
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class Progress:
    """Emits "progress" events of one epoch, not more often than every 0.1 s.

    Args:
        part: "shardam" or "baseline".
        epoch: counted from 1.
        total: samples of the epoch over all workers.
        enabled: False: says nothing (all ranks but 0).
        done: samples that were trained on before.
    """

    def __init__(self, part: str, epoch: int, total: int, *, enabled: bool = True, done: int = 0) -> None:
        self._part = part
        self._epoch = epoch
        self._total = total
        self._enabled = enabled
        self._done = done
        self._due = 0.0

    def advance(self, samples: int) -> None:
        """Counts samples that were trained on, over all workers."""
        self._done += samples
        now = time.monotonic()
        if self._enabled and (now >= self._due or self._done >= self._total):
            self._due = now + PROGRESS_INTERVAL_S
            emit("progress", part=self._part, epoch=self._epoch, done=self._done, total=self._total)
