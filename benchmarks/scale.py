"""What a row costs as rows, tables, workers and shards grow: whole pulls and pushes over gRPC, and memory.

Usage: python benchmarks/scale.py [--full] [--rows N] [--json] [--smoke] [--check] [--rounds N] [--runs N] [NAME ...]

Needs the built package, on Linux. Dim 16, float32, both moments. The client runs on the first core that this process may use,
one shard on the last. A call names each id once, so that its rows are those that travel.

- rows-pull, rows-push: 16,384 ids a call, drawn by Zipf with exponent 1.05, from tables of 100,000 to --rows rows.
- uniform-pull, uniform-push: the same with ids drawn uniformly: the larger the table, the more of them are in no cache and in
  no page that the processor knows the address of. Without a goal: a table of 100,000 such rows lies in the cache as a whole.
- tables-pull, tables-push: 524,288 ids a call from 1 to 1,000 tables of 1M rows together, in one request.
- memory: resident bytes of a row of the largest table, beside its record and 32 bytes.
- workers: steps (a pull and a push of 2,048 Zipf ids) of 1 to 4 processes that share one shard and a core. Without a goal.
- shards: a pull and a push of 16,384 ids on 1 to 4 shards that share the cores. Without a goal.

A figure is the rate at the axis' last point beside that at its first; the details have every point, the exponent of the cost
per row, and the shards' kernels alone. --full goes to 30M rows (9 GB), 5,000 tables (in the details alone: the goal is for
1,000), 8 workers and 8 shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from batches import Float32s, Int64s, distinct_batches, gradients
from curves import Curve, Point, measure_curve
from frame import EXIT_MET, Figure, Measured, judge, parse, parser_of, repeat, show
from processes import CORES, SERVER_CORE, WORKER_CORE, LineProcess, Shards, running_shards

import shardam
from shardam._parts import TableStepGradient
from shardam._reads import read_weights
from shardam_kernels.layout import layout

DIM = 16
BATCH, SMOKE_BATCH = 16_384, 64
CALLS, SMOKE_CALLS = 8, 1
"""Of one round and point: some hundredths of a second."""

FEWEST_ROWS, SMOKE_FEWEST_ROWS = 100_000, 500
SMOKE_MOST_ROWS = 2_000
GROWTH = 10
"""From one point to the next, as far as the last one allows."""

TABLE_ROWS, SMOKE_TABLE_ROWS = 1_000_000, 5_000
TABLE_IDS, SMOKE_TABLE_IDS = 524_288, 1_000
"""Of a call over all tables."""

STEP_IDS, STEPS, SMOKE_STEPS = 2_048, 8, 1
STEP_ROWS = 100_000
"""Of step_worker.py's batches, and of its table."""

FILLED_AT_ONCE = 131_072
"""Rows of one push that makes rows: 8 MB."""

GROWTH_GOAL = 1 / 1.3
MEMORY_GOAL = 1 / 1.15
OVERHEAD_BYTES = 32
"""Of a row beside its record: its id, index entry and counters."""

NO_GOAL = 0.0
OPTIONS = shardam.AdamOptions(lr=1e-3)


@dataclasses.dataclass(frozen=True)
class Ends:
    """How far the axes go."""

    rows: int
    tables: int
    workers: int
    shards: int


DEFAULT, FULL, SMOKE = Ends(10_000_000, 1_000, 4, 4), Ends(30_000_000, 5_000, 8, 8), Ends(SMOKE_MOST_ROWS, 10, 2, 2)


def steps_to(first: int, last: int, growth: int) -> list[int]:
    """Returns first, first * growth, ... and last."""
    found = [first]
    while found[-1] * growth < last:
        found.append(found[-1] * growth)
    return [*found, last] if last > first else found


class Client:
    """A client of some shards, which knows how long their kernels took."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.cluster = shardam.connect(shards.redis_url, cluster=shards.cluster)

    def kernel_s(self) -> float | None:
        """Returns the seconds of the shards' kernels since this was asked last."""
        phase = self.cluster.timings(reset=True).get("kernel")
        return None if phase is None else phase.total_s

    def filled_table(self, name: str, num_rows: int) -> shardam.Table:
        """Returns a table that has rows 0 to num_rows - 1."""
        table = self.cluster.create_table(shardam.TableSpec(name, DIM))
        ones = np.ones((FILLED_AT_ONCE, DIM), np.float32)
        for start in range(0, num_rows, FILLED_AT_ONCE):
            ids = np.arange(start, min(start + FILLED_AT_ONCE, num_rows))
            table.push(ids, ones[: ids.size], OPTIONS)
        return table


class Cycle:
    """Calls that take batches in turn."""

    def __init__(self, call: Callable[[Int64s], object], batches: Sequence[Int64s], calls: int) -> None:
        self._call, self._batches, self._calls = call, batches, calls
        self._next = 0

    def __call__(self) -> None:
        for _ in range(self._calls):
            self._call(self._batches[self._next % len(self._batches)])
            self._next += 1


class Axes:
    """What is measured; servers are stopped by the stack."""

    def __init__(self, stack: contextlib.ExitStack, ends: Ends, *, smoke: bool) -> None:
        self._stack, self._ends, self._smoke = stack, ends, smoke
        self._batch = SMOKE_BATCH if smoke else BATCH
        self._calls = SMOKE_CALLS if smoke else CALLS
        self._client: Client | None = None
        self._by_rows: dict[int, shardam.Table] = {}
        self._by_tables: dict[int, list[shardam.Table]] = {}
        self._resident = (0, 0)

    @property
    def client(self) -> Client:
        """The client of the one shard that most axes share."""
        if self._client is None:
            self._client = self._connect(1, (SERVER_CORE,))
        return self._client

    def _connect(self, num_shards: int, cores: Sequence[int]) -> Client:
        client = Client(self._stack.enter_context(running_shards(num_shards, cores=cores)))
        self._stack.callback(client.cluster.close)
        return client

    def _fill_rows(self) -> dict[int, shardam.Table]:
        first = SMOKE_FEWEST_ROWS if self._smoke else FEWEST_ROWS
        for num_rows in steps_to(first, self._ends.rows, GROWTH):
            if num_rows not in self._by_rows:
                before = self.client.shards.resident_bytes()
                self._by_rows[num_rows] = self.client.filled_table(f"rows-{num_rows}", num_rows)
                self._resident = before, self.client.shards.resident_bytes()
        return self._by_rows

    def rows(self, _: bool, *, push: bool, uniform: bool) -> list[Point]:
        values = gradients(self._batch, DIM)
        return [
            Point(
                num_rows,
                self._batch * self._calls,
                Cycle(
                    functools.partial(table.push, gradients=values, options=OPTIONS) if push else table.pull,
                    distinct_batches(num_rows, self._batch, self._calls, uniform=uniform),
                    self._calls,
                ),
                self.client.kernel_s,
            )
            for num_rows, table in self._fill_rows().items()
        ]

    def memory(self) -> Measured:
        """Measures the largest table, which was filled last."""
        num_rows = list(self._fill_rows())[-1]
        before, after = self._resident
        expected = layout(DIM).stride_bytes + OVERHEAD_BYTES
        found = max(after - before, 1) / num_rows
        details = {"resident_bytes_per_row": round(found, 1), "rows": num_rows}
        peer = f"{expected} B a row"
        figure = Figure("memory", 1 / found, "rows/B", peer, 1 / expected, expected / found, MEMORY_GOAL, 0.0, details)
        return Measured(figure, 0.0)

    def _fill_tables(self) -> dict[int, list[shardam.Table]]:
        num_rows = SMOKE_TABLE_ROWS if self._smoke else TABLE_ROWS
        cluster = self.client.cluster
        for count in steps_to(1, self._ends.tables, GROWTH) if not self._by_tables else ():
            specs = [shardam.TableSpec(f"of-{count}-{index}", DIM) for index in range(count)]
            self._by_tables[count] = cluster.create_tables(specs)
            row_ids = np.arange(num_rows // count)
            ones = np.ones((row_ids.size, DIM), np.float32)
            push_all(cluster, [(table, row_ids, ones) for table in self._by_tables[count]])
        return self._by_tables

    def tables(self, _: bool, *, push: bool) -> list[Point]:
        num_rows, num_ids = (SMOKE_TABLE_ROWS, SMOKE_TABLE_IDS) if self._smoke else (TABLE_ROWS, TABLE_IDS)
        values = gradients(num_ids, DIM)
        cluster = self.client.cluster
        points = []
        for count, tables in self._fill_tables().items():
            (row_ids,) = distinct_batches(num_rows // count, num_ids // count, 1, uniform=True)
            parts = [(table, row_ids, values[: row_ids.size]) for table in tables]
            work = functools.partial(push_all if push else pull_all, cluster, parts)
            points.append(Point(count, row_ids.size * count, work, self.client.kernel_s))
        return points

    def workers(self, smoke: bool) -> list[Point]:
        shards = self.client.shards
        rows, batch = ("1000", "64") if smoke else (str(STEP_ROWS), str(STEP_IDS))
        script = str(Path(__file__).with_name("step_worker.py"))
        started: list[LineProcess] = []
        for rank in range(self._ends.workers):
            arguments = [shards.redis_url, shards.cluster, "async", str(rank), str(self._ends.workers), rows, batch]
            process = LineProcess([script, *arguments], CORES[:-1] or CORES)
            self._stack.callback(process.stop)
            process.read()
            started.append(process)
        steps = SMOKE_STEPS if smoke else STEPS

        def run(count: int) -> None:
            for process in started[:count]:
                process.tell(f"run {steps}")
            for process in started[:count]:
                process.read()

        counts = steps_to(1, self._ends.workers, 2)
        return [Point(count, count * steps * int(batch), functools.partial(run, count)) for count in counts]

    def shards(self, _: bool) -> list[Point]:
        values = gradients(self._batch, DIM)
        num_rows = SMOKE_FEWEST_ROWS if self._smoke else FEWEST_ROWS
        batches = distinct_batches(num_rows, self._batch, self._calls, uniform=True)
        points = []
        for count in steps_to(1, self._ends.shards, 2):
            client = self._connect(count, CORES)
            table = client.filled_table("rows", num_rows)

            def call(row_ids: Int64s, table: shardam.Table = table) -> None:
                table.pull(row_ids)
                table.push(row_ids, values, OPTIONS)

            points.append(Point(count, self._batch * self._calls, Cycle(call, batches, self._calls), client.kernel_s))
        return points


Part = tuple[shardam.Table, Int64s, Float32s]
"""A table, distinct ids and their gradient."""


def pull_all(cluster: shardam.Cluster, parts: Sequence[Part]) -> None:
    """Pulls rows of all tables in one request, as a forward does."""
    read_weights(cluster._ready_to_read(), [(table.info(), row_ids) for table, row_ids, _ in parts])


def push_all(cluster: shardam.Cluster, parts: Sequence[Part]) -> None:
    """Pushes to all tables in one step, as an optimizer does, and waits until it is applied."""
    cluster._queue_push(
        [TableStepGradient(table.name, table.info().table_id, row_ids, rows, OPTIONS) for table, row_ids, rows in parts]
    )
    cluster._synchronize()


def curves(axes: Axes) -> list[Curve]:
    zipf, uniform = (functools.partial(axes.rows, uniform=uniform) for uniform in (False, True))
    found = []
    for name, axis, goal, make, most in (
        ("rows", "rows", GROWTH_GOAL, zipf, None),
        ("uniform", "rows", NO_GOAL, uniform, None),
        ("tables", "tables", GROWTH_GOAL, axes.tables, DEFAULT.tables),
    ):
        found.append(Curve(f"{name}-pull", axis, goal, functools.partial(make, push=False), most))
        found.append(Curve(f"{name}-push", axis, goal, functools.partial(make, push=True), most))
    return [*found, Curve("workers", "workers", NO_GOAL, axes.workers), Curve("shards", "shards", NO_GOAL, axes.shards)]


NAMES = (
    *("rows-pull", "rows-push", "uniform-pull", "uniform-push", "memory"),
    *("tables-pull", "tables-push", "workers", "shards"),
)


def main(arguments: Sequence[str]) -> int:
    """Runs what the command line names; the status is frame.main's."""
    parser = parser_of(NAMES)
    parser.add_argument("--full", action="store_true", help="to 30M rows, 5,000 tables, 8 workers and 8 shards")
    parser.add_argument("--rows", type=int, default=None, metavar="N", help="rows of the largest table; default 10M")
    options = parse(parser, NAMES, arguments)
    if options.runs > 1:
        return repeat(options)
    ends = SMOKE if options.smoke else FULL if options.full else DEFAULT
    if options.rows is not None:
        ends = dataclasses.replace(ends, rows=options.rows)
    os.sched_setaffinity(0, {WORKER_CORE})
    measured = []
    with contextlib.ExitStack() as stack:
        axes = Axes(stack, ends, smoke=options.smoke)
        by_name = {curve.name: curve for curve in curves(axes)}
        for name in options.names or NAMES:
            if name == "memory":
                measured.append(axes.memory())
            else:
                measured.append(measure_curve(by_name[name], smoke=options.smoke, num_rounds=options.rounds))
            show(measured[-1].figure, as_json=options.json)
    return judge(measured) if options.check else EXIT_MET


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
