"""Metrics of a shard; the names are final (DESIGN.md, section 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shardam_server.shard.phases import PhaseTimes
from shardam_server.shard_words import JOURNAL_STATES

LABELS = ("cluster", "shard")

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""From the cost of an empty message to a push that waits behind a large one."""

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Steps: each bound that groups are likely to set, and beyond them those of one that is as good as async."""


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

        def histogram(name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(*values)

        self.pulls = counter("shardam_pulls_total", "Pull messages answered.")
        self.pushes = counter("shardam_pushes_total", "Push messages applied or staged; repeats not counted.")
        self.rows_pulled = counter("shardam_rows_pulled_total", "Rows sent to pulls.")
        self.rows_pushed = counter("shardam_rows_pushed_total", "Gradient rows received in applied or staged pushes.")
        self.clients_dropped = counter("shardam_clients_dropped_total", "Clients closed because they were silent.")
        self.received_bytes = counter("shardam_received_bytes_total", "Bytes of request messages.")
        self.sent_bytes = counter("shardam_sent_bytes_total", "Bytes of response messages.")
        self.pull_seconds = histogram("shardam_pull_seconds", "Seconds from a pull's arrival to its answer.")
        self.push_seconds = histogram("shardam_push_seconds", "Seconds from a push's arrival to its answer.")
        self.pull_staleness = histogram(
            "shardam_pull_staleness_steps",
            "Of a training pull in a bounded group: steps that the slowest member was behind its client.",
            STALENESS_BUCKETS,
        )
        self.step_wait_seconds = histogram(
            "shardam_step_wait_seconds", "Seconds that a request of a sync group's member waited for the step before its own."
        )
        self.group_step_seconds = histogram(
            "shardam_group_step_seconds", "Seconds from the first rank's arrival at a step of a sync group to its decision."
        )
        self._group_steps = Counter(
            "shardam_group_steps_total",
            "Steps of sync groups decided, by end: applied, abstained, refused.",
            (*LABELS, "end"),
            registry=self.registry,
        )
        self.phases = PhaseTimes(LABELS, values)
        self.registry.register(self.phases)
        self._errors = Counter(
            "shardam_errors_total", "Requests refused or failed.", (*LABELS, "reason"), registry=self.registry
        )

    def count_error(self, reason: str) -> None:
        """Counts a refused or failed request."""
        self._errors.labels(*self._label_values, reason).inc()

    def count_step(self, end: str) -> None:
        """Counts a decided step of a sync group."""
        self._group_steps.labels(*self._label_values, end).inc()

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


@dataclasses.dataclass(frozen=True)
class ShardGauges:
    """Values of one moment.

    Attributes:
        tables: table name -> (rows, step).
        queue_depth: changes waiting.
        memory: bytes by kind: records, index, resident (of the process), device (of the device's own memory).
        clients: clients by state: open, closed (and still remembered).
        journal_state: how the journal is, in one word; see JOURNAL_STATES.
        journal_bytes: bytes of the journal since its base.
        base_seconds: seconds of the last base by part: held (changes waited), whole; empty: this process has written none.
        base_bytes: size of the last base.
        queue_bytes: bytes of changes waiting.
        reserved_bytes: bytes reserved for parts that arrive in chunks.
        parked_requests: requests on streams that wait.
        streams: open streams.
        staged_parts: parts that wait for their step's decision.
        staged_bytes: bytes of their ids and gradients.
        pre_image_bytes: bytes of rows that are kept as they were at a cut.
        pre_image_wait_s: seconds that changes have waited so far for such rows to be written.
    """

    tables: dict[str, tuple[int, int]]
    queue_depth: int
    memory: dict[str, int]
    clients: dict[str, int]
    journal_state: str = "ok"
    journal_bytes: int = 0
    base_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    base_bytes: int = 0
    queue_bytes: int = 0
    reserved_bytes: int = 0
    parked_requests: int = 0
    streams: int = 0
    staged_parts: int = 0
    staged_bytes: int = 0
    pre_image_bytes: int = 0
    pre_image_wait_s: float = 0.0


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


class _GaugeCollector(Collector):
    def __init__(self, read: Callable[[], ShardGauges], label_values: tuple[str, str]) -> None:
        self._read = read
        self._label_values = label_values

    def collect(self) -> Iterable[GaugeMetricFamily]:
        gauges = self._read()
        journal = {word: float(word == gauges.journal_state) for word in JOURNAL_STATES.values()}
        rows = {table: float(num_rows) for table, (num_rows, _) in gauges.tables.items()}
        steps = {table: float(step) for table, (_, step) in gauges.tables.items()}
        return [
            self._family("shardam_rows", "Rows of a table on this shard.", "table", rows),
            self._family("shardam_table_step", "Step t of a table.", "table", steps),
            self._family("shardam_memory_bytes", "Memory by kind: records, index, resident, device.", "kind", gauges.memory),
            self._family("shardam_clients", "Clients remembered, by state: open, closed.", "state", gauges.clients),
            self._family("shardam_journal_state", "1 for the state that the journal is in, else 0.", "state", journal),
            self._family(
                "shardam_base_seconds", "Of the last base: held (changes waited), whole.", "part", gauges.base_seconds
            ),
            self._gauge("shardam_base_bytes", "Size of the last base.", gauges.base_bytes),
            self._gauge("shardam_journal_bytes", "Bytes of the journal since its base.", gauges.journal_bytes),
            self._gauge("shardam_queue_depth", "Changes that wait to be applied.", gauges.queue_depth),
            self._gauge("shardam_queue_bytes", "Bytes of changes that wait to be applied.", gauges.queue_bytes),
            self._gauge("shardam_reserved_bytes", "Bytes reserved for pushes that arrive in chunks.", gauges.reserved_bytes),
            self._gauge("shardam_parked_requests", "Requests on streams that wait for something.", gauges.parked_requests),
            self._gauge("shardam_streams", "Open Exchange streams.", gauges.streams),
            self._gauge("shardam_staged_parts", "Parts of sync groups' steps that are not decided yet.", gauges.staged_parts),
            self._gauge("shardam_staged_bytes", "Bytes of such parts' ids and gradients.", gauges.staged_bytes),
            self._gauge(
                "shardam_pre_image_bytes",
                "Bytes of rows kept as they were when a base or checkpoint was begun.",
                gauges.pre_image_bytes,
            ),
            self._gauge(
                "shardam_pre_image_wait_seconds",
                "Seconds that changes have waited so far because too many such rows were kept.",
                gauges.pre_image_wait_s,
            ),
        ]

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._label_values, value)
        return gauge

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._label_values, key), value)
        return family
