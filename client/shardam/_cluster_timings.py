"""Where a client's time went, as a program and as Prometheus ask for it: a part of Cluster."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardam._arrays import check_flag
from shardam._session_options import SessionOptions
from shardam._timings import BUCKET_BOUNDS_S, PhaseTimes, Timings
from shardam_proto.errors import BadOption

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

METRIC = "shardam_client_phase_seconds"


class ClusterTimings(abc.ABC):
    """What a cluster's client tells of its times."""

    _options: SessionOptions

    @property
    def _timings(self) -> Timings:
        return self._options.timings

    def timings(self, *, reset: bool = False) -> dict[str, PhaseTimes]:
        """Returns where this client's time went, by phase: unique, flush, foreseen, split, encode, wait, wire, shard, kernel,
        decode, backward, step. Phases overlap, and some run beside the training thread; docs/training.md says what each one is.

        Args:
            reset: count from zero again; what a timings_collector shows, too.

        Raises:
            BadOption: reset is no bool.
        """
        return self._timings.by_phase(reset=check_flag(reset, "timings: reset"))


def timings_collector(*clusters: ClusterTimings) -> Collector:
    """Returns what shows clients' times to Prometheus: `prometheus_client.REGISTRY.register(timings_collector(cluster))`.

    A registry takes one of these, so name all clusters of a program at once. The histogram is
    shardam_client_phase_seconds{cluster, phase}; a fork's child shows its own times.

    Args:
        clusters: from connect, or LocalClusters; no two of the same name.

    Raises:
        BadOption: no clusters, two of one name, or something else.
    """
    from prometheus_client.core import HistogramMetricFamily  # 50 ms that only a program with metrics spends
    from prometheus_client.registry import Collector

    for cluster in clusters:
        if not isinstance(cluster, ClusterTimings):
            raise BadOption(f"timings_collector takes clusters, such as connect() returns, got {cluster!r}")
    names = [cluster._options.cluster for cluster in clusters]
    if not names or len(set(names)) < len(names):
        raise BadOption(f"timings_collector takes at least one cluster, and each name once, got {names}")

    class Timed(Collector):
        def collect(self) -> Iterator[Metric]:
            family = HistogramMetricFamily(METRIC, "Time of a phase of a worker's step.", labels=["cluster", "phase"])
            for name, cluster in zip(names, clusters, strict=True):
                for phase, (counts, total_s) in cluster._timings.buckets().items():
                    bounds = [*(f"{bound:.9g}" for bound in BUCKET_BOUNDS_S), "+Inf"]
                    family.add_metric([name, phase], list(zip(bounds, map(float, counts), strict=True)), total_s)
            yield family

    return Timed()
