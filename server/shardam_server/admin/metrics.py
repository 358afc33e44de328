"""Metrics of the admin API and of all shards, in one valid Prometheus text.

Shards name their own metrics (DESIGN.md, section 5); this module merges the families that they send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RestMetrics:
    """Counts and times the requests of the routes.

    Args:
        cluster: value of the label `cluster`.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "shardam_rest_requests",
            "Requests of the admin API.",
            ["cluster", "route", "method", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "shardam_rest_request_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ["cluster", "route"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )

    def observe(self, route: str, method: str, status: int, elapsed_s: float) -> None:
        """Counts one request.

        Args:
            route: the route's path with its parameters' names, so that the number of series stays bounded.
            method: HTTP method.
            status: HTTP status; 0: the connection ended before an answer.
            elapsed_s: seconds.
        """
        # Any word may stand as a method on the wire; only those that a route may have get a series.
        known = method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "OTHER"
        self._requests.labels(self._cluster, route, known, str(status)).inc()
        self._seconds.labels(self._cluster, route).observe(elapsed_s)


class _Merged(Collector):
    """Families to be written as they are."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Returns the families."""
        return self._families


def merge_metrics(rest: RestMetrics, cluster: str, shard_texts: Mapping[int, str | None]) -> bytes:
    """Returns the metrics of the admin API and of all shards as one text.

    Args:
        rest: the admin API's own.
        cluster: value of the label `cluster`.
        shard_texts: what each shard sent, in text format 0.0.4; None: it did not answer.
    """
    families: dict[str, Metric] = {family.name: family for family in rest.registry.collect()}
    up = GaugeMetricFamily("shardam_shard_up", "1: the shard answered this scrape.", labels=["cluster", "shard"])
    for shard, text in sorted(shard_texts.items()):
        up.add_metric([cluster, str(shard)], 0.0 if text is None else 1.0)
        defaults = {"cluster": cluster, "shard": str(shard)}
        for family in text_string_to_metric_families(text or ""):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples.extend(_with_labels(sample, defaults) for sample in family.samples)
    families[up.name] = up
    registry = CollectorRegistry()
    registry.register(_Merged(families.values()))
    return generate_latest(registry)


def _with_labels(sample: Sample, defaults: Mapping[str, str]) -> Sample:
    """Adds the labels that tell one shard's series from another's, where the shard left them out."""
    return sample._replace(labels={**defaults, **sample.labels})
