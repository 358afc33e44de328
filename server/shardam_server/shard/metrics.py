"""Metrics of a shard; the names are final (DESIGN.md, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

LABELS = ("cluster", "shard")

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""From the cost of an empty message to a push that waits behind a large one."""


class ShardMetrics:
    """Counters of one shard, with its labels bound.

    Args:
        cluster: cluster name.
        shard: shard index.
    """

    def __init__(self, cluster: str, shard: int) -> None:
        self.registry = CollectorRegistry()
        values = (cluster, str(shard))
        self._label_values = values

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=self.registry).labels(*values)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, LABELS, registry=self.registry, buckets=LATENCY_BUCKETS_S).labels(*values)

        self.pulls = counter("shardam_pulls_total", "Pull messages answered.")
        self.pushes = counter("shardam_pushes_total", "Push messages applied; repeats not counted.")
        self.rows_pulled = counter("shardam_rows_pulled_total", "Rows sent to pulls.")
        self.rows_pushed = counter("shardam_rows_pushed_total", "Gradient rows received in applied pushes.")
        self.clients_dropped = counter("shardam_clients_dropped_total", "Clients closed because they were silent.")
        self.received_bytes = counter("shardam_received_bytes_total", "Bytes of request messages.")
        self.sent_bytes = counter("shardam_sent_bytes_total", "Bytes of response messages.")
        self.pull_seconds = histogram("shardam_pull_seconds", "Seconds from a pull's arrival to its answer.")
        self.push_seconds = histogram("shardam_push_seconds", "Seconds from a push's arrival to its answer.")
        self._errors = Counter(
            "shardam_errors_total", "Requests refused or failed.", (*LABELS, "reason"), registry=self.registry
        )

    def count_error(self, reason: str) -> None:
        """Counts a refused or failed request."""
        self._errors.labels(*self._label_values, reason).inc()

    def observe(self, method: str, seconds: float) -> None:
        """Records how long an answered call took."""
        if method == "Pull":
            self.pull_seconds.observe(seconds)
        elif method == "Push":
            self.push_seconds.observe(seconds)

    def watch(self, read: Callable[[], ShardGauges]) -> None:
        """Adds gauges that are read at each scrape."""
        self.registry.register(_GaugeCollector(read, self._label_values))

    def text(self) -> str:
        """Returns all metrics in Prometheus text exposition format."""
        return generate_latest(self.registry).decode()


class ShardGauges:
    """Values of one moment.

    Args:
        tables: table name -> (rows, step).
        queue_depth: changes waiting.
        memory: bytes by kind: records, index, resident (of the process), device (of the device's own memory).
        clients: clients by state: open, closed (and still remembered).
        queue_bytes: bytes of changes waiting.
        reserved_bytes: bytes reserved for parts that arrive in chunks.
        parked_requests: requests on streams that wait.
        streams: open streams.
    """

    def __init__(
        self,
        tables: dict[str, tuple[int, int]],
        *,
        queue_depth: int,
        memory: dict[str, int],
        clients: dict[str, int],
        queue_bytes: int = 0,
        reserved_bytes: int = 0,
        parked_requests: int = 0,
        streams: int = 0,
    ) -> None:
        self.tables = tables
        self.queue_depth = queue_depth
        self.memory = memory
        self.clients = clients
        self.queue_bytes = queue_bytes
        self.reserved_bytes = reserved_bytes
        self.parked_requests = parked_requests
        self.streams = streams


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


class _GaugeCollector(Collector):
    def __init__(self, read: Callable[[], ShardGauges], label_values: tuple[str, str]) -> None:
        self._read = read
        self._label_values = label_values

    def collect(self) -> Iterable[GaugeMetricFamily]:
        gauges = self._read()
        rows = GaugeMetricFamily("shardam_rows", "Rows of a table on this shard.", labels=(*LABELS, "table"))
        steps = GaugeMetricFamily("shardam_table_step", "Step t of a table.", labels=(*LABELS, "table"))
        for table, (num_rows, step) in gauges.tables.items():
            rows.add_metric((*self._label_values, table), num_rows)
            steps.add_metric((*self._label_values, table), step)
        memory = GaugeMetricFamily(
            "shardam_memory_bytes", "Memory by kind: records, index, resident, device.", labels=(*LABELS, "kind")
        )
        for kind, size_bytes in gauges.memory.items():
            memory.add_metric((*self._label_values, kind), size_bytes)
        clients = GaugeMetricFamily("shardam_clients", "Clients remembered, by state: open, closed.", labels=(*LABELS, "state"))
        for state, count in gauges.clients.items():
            clients.add_metric((*self._label_values, state), count)
        return [
            rows,
            steps,
            memory,
            clients,
            self._gauge("shardam_queue_depth", "Changes that wait to be applied.", gauges.queue_depth),
            self._gauge("shardam_queue_bytes", "Bytes of changes that wait to be applied.", gauges.queue_bytes),
            self._gauge("shardam_reserved_bytes", "Bytes reserved for pushes that arrive in chunks.", gauges.reserved_bytes),
            self._gauge("shardam_parked_requests", "Requests on streams that wait for something.", gauges.parked_requests),
            self._gauge("shardam_streams", "Open Exchange streams.", gauges.streams),
        ]

    def _gauge(self, name: str, text: str, value: int) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._label_values, value)
        return gauge
