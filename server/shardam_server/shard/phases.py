"""Where the time of requests goes: laps of one request, and histograms of them all (the names are in metrics.py)."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

PHASE_BUCKETS_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""From the lookup of a few rows to a wait behind the largest push."""

READ_PHASES = ("wait", "decode", "gather", "send")
"""Of pull and pull_changed: until its rows may be read; taking its ids apart and laying its answer out; reading rows; until the
last message of the answer is handed to the transport."""

PUSH_PHASES = ("wait", "decode", "merge", "lock", "index", "journal", "update", "settle", "send")
"""Of a push: until its turn in the order of changes; digest and checks of its ids; duplicates and the check of their sums;
until reads of its tables have ended; finding and creating rows; writing the journal; sums and Adam; until it is as safe as the
journal promises; until its answer is handed to the transport."""

KERNEL_PHASES = frozenset({"merge", "index", "update", "gather"})
"""Those that are spent in native kernels."""


class Laps:
    """The phases of one request, each from the end of the one before.

    Args:
        start: when the first began, by time.perf_counter().

    Attributes:
        start: when it began.
        seconds: of each phase so far.
    """

    __slots__ = ("_last", "seconds", "start")

    def __init__(self, start: float) -> None:
        self.start = self._last = start
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Notes that a phase ends now."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def kernel_ns(self) -> int:
        """Nanoseconds in native kernels so far."""
        return int(1e9 * sum(self.seconds.get(phase, 0.0) for phase in KERNEL_PHASES))


class PhaseTimes(Collector):
    """Histograms of the phases of all requests; written on the event loop, where a client library's own would cost more than a
    small request may.

    Args:
        labels: names of the labels that all metrics have.
        label_values: their values.
    """

    def __init__(self, labels: tuple[str, ...], label_values: tuple[str, ...]) -> None:
        self._labels = labels
        self._label_values = label_values
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def add(self, kind: str, seconds: Mapping[str, float]) -> None:
        """Adds the phases of one request of a kind."""
        for phase, spent in seconds.items():
            counts = self._counts.get((kind, phase))
            if counts is None:
                counts = self._counts[kind, phase] = [0] * (len(PHASE_BUCKETS_S) + 1)
                self._sums[kind, phase] = 0.0
            counts[bisect.bisect_left(PHASE_BUCKETS_S, spent)] += 1
            self._sums[kind, phase] += spent

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Returns the family."""
        family = HistogramMetricFamily(
            "shardam_phase_seconds", "Seconds of each phase of requests on streams.", labels=(*self._labels, "kind", "phase")
        )
        for (kind, phase), counts in sorted(self._counts.items()):
            total, buckets = 0, []
            for bound, count in zip((*map(str, PHASE_BUCKETS_S), "+Inf"), list(counts), strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric((*self._label_values, kind, phase), buckets, self._sums[kind, phase])
        return [family]
