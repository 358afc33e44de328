"""How long the phases of a worker's steps take: counted as they end, for `cluster.timings()` and for Prometheus.

Knows nothing of what a phase is; whoever does a phase's work says how long it took.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal[
    "unique", "flush", "foreseen", "split", "encode", "wait", "wire", "shard", "kernel", "decode", "backward", "step"
]

PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order in which a step meets them; docs/training.md says what each one is. A phase that never was is not shown."""

BUCKET_BOUNDS_S = tuple(1e-6 * 2.0**exponent for exponent in range(27))
"""From a microsecond, below which nothing is worth a look, to a minute, after which a shard counts as unreachable. Each is
twice the one before, so that an estimated quantile is off by a factor of two at most."""


@dataclasses.dataclass(frozen=True)
class PhaseTimes:
    """How long a phase has taken.

    Attributes:
        count: how often it was.
        total_s: seconds in all.
        p50_s: median, estimated to a factor of two.
        p99_s: 99th percentile, likewise.
        max_s: the longest.
    """

    count: int
    total_s: float
    p50_s: float
    p99_s: float
    max_s: float

    @property
    def mean_s(self) -> float:
        """Mean seconds."""
        return self.total_s / self.count


class _Histogram:
    """Counts of one phase; not thread-safe."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self.total_s = 0.0
        self.max_s = 0.0

    def times(self) -> PhaseTimes:
        return PhaseTimes(sum(self.counts), self.total_s, self._quantile(0.5), self._quantile(0.99), self.max_s)

    def _quantile(self, share: float) -> float:
        """Estimates a quantile as if the times within a bucket lay evenly."""
        rank, below, lower = share * sum(self.counts), 0, 0.0
        for upper, count in zip((*BUCKET_BOUNDS_S, self.max_s), self.counts, strict=True):
            if count and below + count >= rank:
                return min(self.max_s, lower + (upper - lower) * (rank - below) / count)
            below, lower = below + count, upper
        return self.max_s


class Timings:
    """One client's times by phase. Thread-safe."""

    def __init__(self) -> None:
        self._phases: dict[Phase, _Histogram] = {}
        self._lock = threading.Lock()

    def add(self, phase: Phase, seconds: float) -> None:
        """Counts that a phase has ended.

        Args:
            phase: which one.
            seconds: how long it took; a clock that differs between two machines may make it negative, which counts as none.
        """
        seconds = max(0.0, seconds)
        bucket = bisect.bisect_left(BUCKET_BOUNDS_S, seconds)
        with self._lock:
            histogram = self._phases.get(phase)
            if histogram is None:
                histogram = self._phases[phase] = _Histogram()
            histogram.counts[bucket] += 1
            histogram.total_s += seconds
            histogram.max_s = max(histogram.max_s, seconds)

    @contextmanager
    def measured(self, phase: Phase) -> Iterator[None]:
        """Counts what is done inside, if it does not fail."""
        started = time.perf_counter()
        yield
        self.add(phase, time.perf_counter() - started)

    def by_phase(self, *, reset: bool = False) -> dict[str, PhaseTimes]:
        """Returns the times so far, in the order of PHASES.

        Args:
            reset: count from zero again.
        """
        with self._lock:
            found = self._phases if reset else dict(self._phases)
            times: dict[str, PhaseTimes] = {phase: found[phase].times() for phase in sorted(found, key=PHASES.index)}
            if reset:
                self._phases = {}
        return times

    def buckets(self) -> dict[str, tuple[list[int], float]]:
        """Returns for each phase how many times were at or below each of BUCKET_BOUNDS_S, then of all, and their sum."""
        with self._lock:
            return {
                phase: (list(itertools.accumulate(histogram.counts)), histogram.total_s)
                for phase, histogram in self._phases.items()
            }
