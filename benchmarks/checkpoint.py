"""What checkpoints and the journal cost, each beside the same work without them in the same run.

Usage: python benchmarks/checkpoint.py [--rows 2000000] [--rounds 5] [--folder PATH] [--json] [--smoke] [--check] [NAME ...]

- push-p99: 99th percentile of the time of a push while checkpoints are written, against without. The figure is 1 / time, so
  that more is better as everywhere: the goal of 3 times the latency is a ratio of 1/3.
- write: a checkpoint of the table until it is complete, against a plain file of the same bytes, written in one go and fsynced.
- restore: from the request until the cluster serves again, against reading the same files and writing a plain file of their
  bytes, fsynced: a shard that restores writes its new base, too.
- journal: pushes with `--journal write`, against `off`. What loading the table has left to write is written before, and no base
  falls into the rounds: one costs pushes what a checkpoint does, a time that depends on --journal-limit-mib.

Needs the built package. One shard, which keeps its folder below --folder (a temporary one of its own by default); a row has 64
float32 and both moments; a push has 2,048 ids drawn uniformly. Shard and worker share this machine: the ratios are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from frame import EXIT_MET, EXIT_MISSED, EXIT_NOISY, Figure, Measured, seconds_of, spread_of, verdict

import shardam

DIM = 64
BATCH, SMOKE_BATCH = 2_048, 64
ROWS, SMOKE_ROWS = 2_000_000, 20_000
ROUNDS, SMOKE_ROUNDS = 5, 1
PUSHES, SMOKE_PUSHES = 500, 20
"""Of one round: the 99th percentile of five rounds then rests on 25 pushes."""

ASSIGNED_AT_ONCE = 50_000
"""Rows that one assign brings: 38 MB with moments."""

CHUNK_BYTES = 4 * 2**20
"""Of plain files: as one writes and reads them sequentially."""

STOP_S = 60.0
NO_BASE_MIB = 2**16
"""A journal that no round fills."""

QUIET_S = 1.0
"""A shard that writes a base writes on within this time."""

OPTIONS = shardam.AdamOptions(lr=1e-3)
TABLE = "rows"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        rows: of the table.
        batch: ids of a push.
        pushes: of one round.
        rounds: of each figure.
    """

    rows: int
    batch: int
    pushes: int
    rounds: int


@contextlib.contextmanager
def running_cluster(folder: Path, journal: str, limit_mib: int = 1024) -> Iterator[shardam.Cluster]:
    """Starts one shard with everything it needs."""
    command = [sys.executable, "-m", "shardam_server", "up", "--shards", "1", "--port", "0", "--admin-port", "0", "--json"]
    command += ["--exit-with-stdin", "--device", "cpu", "--log-level", "warning"]
    command += ["--data-dir", str(folder), "--journal", journal, "--checkpoint-keep", "1"]
    command += ["--journal-limit-mib", str(limit_mib)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDAM_")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with shardam.connect(ready["redis_url"], cluster=ready["cluster"]) as cluster:
            yield cluster
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(STOP_S)
        if process.stdout is not None:
            process.stdout.close()


class Worker:
    """Pushes to the one table of a cluster."""

    def __init__(self, cluster: shardam.Cluster, sizes: Sizes) -> None:
        self.cluster = cluster
        self._sizes = sizes
        self._random = np.random.default_rng(7)
        cluster.create_table(shardam.TableSpec(name=TABLE, dim=DIM))
        self._table = cluster.table(TABLE)
        for start in range(0, sizes.rows, ASSIGNED_AT_ONCE):
            ids = np.arange(start, min(start + ASSIGNED_AT_ONCE, sizes.rows))
            values = self._random.standard_normal((ids.size, DIM), dtype=np.float32)
            self._table.assign(ids, values, exp_avg=values, exp_avg_sq=np.abs(values))

    def push(self) -> None:
        """Pushes one batch and waits for its answer."""
        ids = self._random.integers(0, self._sizes.rows, self._sizes.batch)
        self._table.push(ids, np.ones((ids.size, DIM), np.float32), OPTIONS)

    def push_times(self, count: int) -> list[float]:
        """Returns the seconds of that many pushes."""
        return [seconds_of(self.push) for _ in range(count)]

    def push_times_while_writing(self, count: int) -> list[float]:
        """Returns the seconds of at least that many pushes, all of them while a checkpoint is written."""
        times: list[float] = []
        while len(times) < count:
            job = self.cluster.checkpoint(wait=False)
            while job.refresh().state not in ("done", "failed"):
                times += self.push_times(4)  # asking home after each push would measure that
            job.wait()
        return times


def write_plain(path: Path, size_bytes: int) -> None:
    """Writes a file in one go, durably."""
    chunk = np.random.default_rng(1).bytes(CHUNK_BYTES)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size_bytes, CHUNK_BYTES):
            file.write(chunk[: min(CHUNK_BYTES, size_bytes - start)])
        os.fsync(file.fileno())
    path.unlink()


def read_plain(folder: Path) -> None:
    """Reads all files of a folder one after another."""
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                pass


Times = tuple[list[float], list[float]]
"""Seconds of our way and of the peer's, of each round."""


def rounds_of(sizes: Sizes, ours: Callable[[], object], peer: Callable[[], object]) -> tuple[Times, float]:
    """Measures both in turn after a round that does not count; returns the times, and how much a control memcpy varied."""
    source = np.ones(1 << 26, np.uint8)
    target = np.empty_like(source)
    ours()
    peer()
    found: Times = ([], [])
    controls = []
    for _ in range(sizes.rounds):
        controls.append(min(seconds_of(lambda: np.copyto(target, source)) for _ in range(3)))
        found[0].append(seconds_of(ours))
        found[1].append(seconds_of(peer))
    return found, spread_of(controls)


def figure_of(name: str, unit: str, peer: str, goal: float, work: float, times: Times) -> Figure:
    """Returns the rates of medians and their ratio."""
    ours, peers = times
    value, peer_value = work / statistics.median(ours), work / statistics.median(peers)
    spread = spread_of([of_peer / of_ours for of_ours, of_peer in zip(ours, peers, strict=True)])
    return Figure(name, value, unit, peer, peer_value, value / peer_value, goal, spread)


def measure_push(sizes: Sizes, folder: Path) -> Measured:
    """Latency of pushes during checkpoints."""
    with running_cluster(folder, "write") as cluster:
        worker = Worker(cluster, sizes)
        worker.push_times(sizes.pushes)
        rounds, controls = [], []
        source = np.ones(1 << 26, np.uint8)
        target = np.empty_like(source)
        for _ in range(sizes.rounds):
            controls.append(min(seconds_of(lambda: np.copyto(target, source)) for _ in range(3)))
            rounds.append((worker.push_times_while_writing(sizes.pushes), worker.push_times(sizes.pushes)))
        during = [float(np.percentile(times, 99)) for times, _ in rounds]
        without = [float(np.percentile(times, 99)) for _, times in rounds]
        all_during = float(np.percentile(np.concatenate([times for times, _ in rounds]), 99))
        all_without = float(np.percentile(np.concatenate([times for _, times in rounds]), 99))
        figure = Figure(
            name="push-p99",
            value=1 / all_during,
            unit="1/s",
            peer="pushes without a checkpoint",
            peer_value=1 / all_without,
            ratio=all_without / all_during,
            goal=1 / 3,
            spread=spread_of([of_peer / of_ours for of_ours, of_peer in zip(during, without, strict=True)]),
        )
        return Measured(figure, spread_of(controls))


def measure_write(sizes: Sizes, folder: Path) -> Measured:
    """Writing a checkpoint."""
    with running_cluster(folder, "write") as cluster:
        Worker(cluster, sizes)
        cluster.checkpoint()
        size_bytes = cluster.checkpoints()[0].size_bytes
        times, control = rounds_of(sizes, cluster.checkpoint, lambda: write_plain(folder / "plain", size_bytes))
    peer = "a plain file of the same bytes, written and fsynced"
    return Measured(figure_of("write", "MB/s", peer, 0.5, size_bytes / 1e6, times), control)


def measure_restore(sizes: Sizes, folder: Path) -> Measured:
    """Restoring one."""
    with running_cluster(folder, "write") as cluster:
        Worker(cluster, sizes)
        cluster.checkpoint(name="kept")
        (info,) = cluster.checkpoints()

        def plain() -> None:
            read_plain(Path(info.folder))
            write_plain(folder / "plain", info.size_bytes)

        times, control = rounds_of(sizes, lambda: cluster.restore("kept"), plain)
    peer = "reading the same files, writing a plain one"
    return Measured(figure_of("restore", "MB/s", peer, 0.5, info.size_bytes / 1e6, times), control)


def wait_until_written(folder: Path) -> None:
    """Waits until shards write no more, and the system has written what they wrote."""
    before: list[int] = []
    while (sizes := [path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()]) != before:
        before = sizes
        time.sleep(QUIET_S)
    os.sync()


def measure_journal(sizes: Sizes, folder: Path) -> Measured:
    """Pushes with a journal."""
    with running_cluster(folder / "write", "write", NO_BASE_MIB) as kept, running_cluster(folder / "off", "off") as free:
        ours, peer = Worker(kept, sizes), Worker(free, sizes)
        wait_until_written(folder)
        times, control = rounds_of(sizes, lambda: ours.push_times(sizes.pushes), lambda: peer.push_times(sizes.pushes))
    return Measured(figure_of("journal", "pushes/s", "--journal off", 1 / 1.3, sizes.pushes, times), control)


MEASURES: dict[str, Callable[[Sizes, Path], Measured]] = {
    "push-p99": measure_push,
    "write": measure_write,
    "restore": measure_restore,
    "journal": measure_journal,
}


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmarks that the command line names and prints a line for each; the status is frame.main's."""
    parser = argparse.ArgumentParser(description="exit status with --check: 0 goals met, 1 missed, 3 machine too noisy")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURES)}; default all")
    parser.add_argument("--rows", type=int, default=None, help=f"rows of the table; default {ROWS}")
    parser.add_argument("--rounds", type=int, default=None, help=f"rounds of each figure; default {ROUNDS}")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is to be measured; default a temporary one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--smoke", action="store_true", help="small sizes and one round: the keys are right, the figures are not"
    )
    parser.add_argument("--check", action="store_true", help="compare with the goals")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in MEASURES:
            parser.error(f"unknown benchmark {name!r}")
    sizes = Sizes(
        rows=options.rows or (SMOKE_ROWS if options.smoke else ROWS),
        batch=SMOKE_BATCH if options.smoke else BATCH,
        pushes=SMOKE_PUSHES if options.smoke else PUSHES,
        rounds=options.rounds or (SMOKE_ROUNDS if options.smoke else ROUNDS),
    )
    measured = []
    for name in options.names or MEASURES:
        with tempfile.TemporaryDirectory(prefix="shardam-checkpoint-", dir=options.folder) as folder:
            measured.append(MEASURES[name](sizes, Path(folder)))
        figure = measured[-1].figure
        print(figure.json_line() if options.json else figure.text_line(), flush=True)
    if not options.check:
        return EXIT_MET
    status = verdict(measured)
    word = {EXIT_MET: "goals met", EXIT_MISSED: "a goal is missed", EXIT_NOISY: "too noisy to say"}[status]
    print(f"{word}; the control memcpy varied by {max(each.control_spread for each in measured):.0%}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
