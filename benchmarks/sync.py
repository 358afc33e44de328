"""What a step of all workers costs in sync, beside async in the same run: time, and messages.

Usage: python benchmarks/sync.py [--shards 1 3] [--workers 2] [--json] [--smoke]

Needs the built package. A step is, for each worker, a training pull of a batch (2,048 Zipf ids x 64 float32 of 100,000 rows,
duplicates merged) and a push of the same rows. A round of async takes as many steps of each worker, which then need not wait
for each other. Shards keep a journal (`write`), as `shardam up` has it. Workers and shards share this machine: the ratio is
what counts. Messages are counted, requests and answers, over all workers; calls between shards are home's, and include those
of joins and leaves.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from frame import Benchmark, Measured, Pair, measure

import shardam

HERE = Path(__file__).parent
NUM_ROWS, SMOKE_ROWS = 100_000, 1_000
BATCH, SMOKE_BATCH = 2_048, 64
STEPS, SMOKE_STEPS = 20, 3
"""Of one round: some tenths of a second."""

NO_GOAL = 0.0
"""The design sets none: sync costs what its promise costs, and the figure says how much."""

STOP_S = 60.0
KINDS = ("pull", "push", "arrive")
BETWEEN_SHARDS = "/shardam.v1.ShardService/"
SETTING_UP = frozenset({"InstallTables", "GetStatus", "EndClient", "EndClients", "SettleClient", "DropTask"})
"""Calls between shards that belong to no step."""

MODES = ("async", "sync")


class Workers:
    """The worker processes of one cluster."""

    def __init__(self, url: str, cluster: str, mode: str, count: int, smoke: bool) -> None:
        sizes = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
        self.steps = 0
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "step_worker.py"), url, cluster, mode, str(rank), str(count), *map(str, sizes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        self._answers()

    def _answers(self) -> list[dict[str, int]]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if "" in lines:
            raise RuntimeError(f"worker {lines.index('')} ended; its message stands above")
        return [json.loads(line) for line in lines]

    def tell(self, command: str) -> list[dict[str, int]]:
        """Gives all the same command at once and waits for all."""
        for process in self._processes:
            if process.stdin:
                process.stdin.write(f"{command}\n")
                process.stdin.flush()
        return self._answers()

    def run(self, steps: int) -> None:
        self.tell(f"run {steps}")
        self.steps += steps

    def messages(self) -> dict[str, int]:
        """Returns the messages of all workers since they were asked last, by kind."""
        total: collections.Counter[str] = collections.Counter()
        for counts in self.tell("messages"):
            total.update(counts)
        return dict(total)

    def stop(self) -> None:
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            process.wait(STOP_S)
            if process.stdout:
                process.stdout.close()


@dataclasses.dataclass
class Side:
    """One cluster with its workers, in one mode.

    Attributes:
        workers: its workers.
        counts: files in which its shards leave their counts.
    """

    workers: Workers
    counts: list[Path]

    def calls_between_shards(self) -> int:
        """Returns the calls of steps that shards have made, once they have ended."""
        calls = 0
        for path in self.counts:
            for method, count in json.loads(path.read_text(encoding="utf-8")).items():
                name = method.removeprefix(BETWEEN_SHARDS)
                calls += count if name != method and name not in SETTING_UP else 0
        return calls


@contextlib.contextmanager
def running_shards(url: str, cluster: str, count: int, folder: Path) -> Iterator[list[Path]]:
    """Starts counted shards; their counts are there after the block."""
    files = [folder / f"{cluster}-{index}.json" for index in range(count)]
    common = ["--shards", str(count), "--redis", url, "--cluster", cluster, "--port", "0", "--device", "cpu"]
    common += ["--data-dir", str(folder / "rows"), "--log-level", "warning"]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "counted_shard.py"), str(path), "--index", str(index), *common],
            stdin=subprocess.DEVNULL,
        )
        for index, path in enumerate(files)
    ]
    try:
        yield files
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(STOP_S)


@contextlib.contextmanager
def running_side(url: str, mode: str, shards: int, workers: int, folder: Path, smoke: bool) -> Iterator[Side]:
    cluster = f"{mode}-{shards}"
    with running_shards(url, cluster, shards, folder) as counts:
        started = Workers(url, cluster, mode, workers, smoke)
        try:
            yield Side(started, counts)
        finally:
            started.stop()


@dataclasses.dataclass(frozen=True)
class Cost:
    """What was found for one number of shards.

    Attributes:
        shards, workers: their numbers.
        measured: rates of steps.
        messages: mode -> kind -> messages of a step of all workers.
    """

    shards: int
    workers: int
    measured: Measured
    messages: dict[str, dict[str, float]]

    @property
    def times_ms(self) -> dict[str, float]:
        """Milliseconds of a step, by mode."""
        figure = self.measured.figure
        return {"sync": 1000 / figure.value, "async": 1000 / figure.peer_value}

    def json_line(self) -> str:
        times = self.times_ms
        values = {
            "name": f"sync-step-{self.shards}",
            "shards": self.shards,
            "workers": self.workers,
            "sync_ms": float(f"{times['sync']:.4g}"),
            "async_ms": float(f"{times['async']:.4g}"),
            "time_ratio": float(f"{times['sync'] / times['async']:.4g}"),
            "spread": float(f"{self.measured.figure.spread:.4g}"),
            "messages": self.messages,
        }
        return json.dumps(values)

    def text_lines(self) -> list[str]:
        times = self.times_ms
        ratio = times["sync"] / times["async"]
        lines = []
        for mode in MODES:
            counts = self.messages[mode]
            cells = "".join(f"{counts[kind]:>8.1f}" for kind in (*KINDS, "shards", "total"))
            over = f"{ratio:>7.2f} {self.measured.figure.spread:>7.0%}" if mode == "sync" else f"{'1':>7} {'':>7}"
            lines.append(f"{self.shards:>6}  {mode:<6}{times[mode]:>8.2f}{over}{cells}")
        return lines


HEAD = f"{'shards':>6}  {'mode':<6}{'ms':>8}{'ratio':>7} {'spread':>7}" + "".join(
    f"{word:>8}" for word in ("pull", "push", "arrive", "shards", "total")
)


def cost(url: str, shards: int, workers: int, folder: Path, smoke: bool) -> Cost:
    steps = SMOKE_STEPS if smoke else STEPS
    sides: dict[str, Side] = {}
    with contextlib.ExitStack() as stack:
        for mode in MODES:
            sides[mode] = stack.enter_context(running_side(url, mode, shards, workers, folder, smoke))

        def make(_: bool) -> Pair:
            return Pair(steps, lambda: sides["sync"].workers.run(steps), lambda: sides["async"].workers.run(steps))

        measured = measure(Benchmark(f"sync-step-{shards}", "steps/s", "async", NO_GOAL, make), smoke=smoke)
        streams = {mode: side.workers.messages() for mode, side in sides.items()}
    messages = {}
    for mode, side in sides.items():
        counts = {kind: round(streams[mode].get(kind, 0) / side.workers.steps, 2) for kind in KINDS}
        counts["shards"] = round(2 * side.calls_between_shards() / side.workers.steps, 2)  # each with its answer
        messages[mode] = {**counts, "total": round(sum(counts.values()), 2)}
    return Cost(shards, workers, measured, messages)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 3], metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--smoke", action="store_true", help="small sizes and few rounds: the keys are right, the times are not"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shardam-bench-") as folder, shardam.LocalCluster(shards=1) as redis:
        if not options.json:
            print(f"a step of {options.workers} workers; messages of it, requests and answers:\n{HEAD}", flush=True)
        for shards in options.shards:
            found = cost(redis.redis_url, shards, options.workers, Path(folder), options.smoke)
            print(found.json_line() if options.json else "\n".join(found.text_lines()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
