"""Steps of a click model: a trainer on one core and a shard on another, beside the same training in one process.

Usage: python benchmarks/train.py [--json] [--smoke] [--check] [--rounds N] [--runs N] [NAME ...]

Needs the built package, on Linux. Data are synthetic, in the shape of ad click logs (13 counts, 26 fields of 3 to 500,000 ids,
Zipf distributed); the model is DLRM-like; a batch is 2,048 samples. Our trainer has one thread and runs on the first core that
this process may use, the shard on the last; rows are distinct, and all tables travel in one message.

- train-DIM-1, train-DIM-2: beside nn.Embedding(sparse=True) with torch.optim.SparseAdam in one thread on the trainer's core,
  and in two threads on both cores.
- prefetch-DIM, exact-DIM: with shardam.prefetch, beside the same without; exact is the one that gives the same results.
- bound-DIM-1, bound-DIM-2: the dense part alone on the trainer's core, beside the same peers as train: what no service could
  exceed.

Dim 64 has the goals; 16 is shown.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import frame
from frame import Benchmark, Pair
from processes import SERVER_CORE, WORKER_CORE, LineProcess, Shards, running_shards
from train_worker import BATCH, SMOKE_BATCH

import shardam

DIMS = (64, 16)
STEPS, SMOKE_STEPS = 16, 2
"""Of a round: about a second; ours ends with the answers of all pushes, for which no step otherwise waits."""

NO_GOAL = 0.0
GOALS = {(64, 1): 1.25, (64, 2): 0.8}
"""By dim and threads of the peer."""

PEERS = {1: "local, 1 thread", 2: "local, 2 threads"}
LOCAL = {1: (WORKER_CORE,), 2: (WORKER_CORE, SERVER_CORE)}
"""Cores of a local trainer by its threads."""


class Trainers:
    """Trainer processes, started when a benchmark first needs them; those that wait take no time."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._started: dict[tuple[str, int, int], LineProcess] = {}
        self._shards: Shards | None = None

    def pair(self, smoke: bool, *, dim: int, ours: str, peer: str, peer_threads: int = 1) -> Pair:
        """Returns two kinds of trainers; ours has one thread."""
        steps, batch = (SMOKE_STEPS, SMOKE_BATCH) if smoke else (STEPS, BATCH)
        our_process, peer_process = self._process(ours, dim, 1, smoke), self._process(peer, dim, peer_threads, smoke)
        command = f"run {steps}"
        return Pair(steps * batch, lambda: our_process.ask(command), lambda: peer_process.ask(command))

    def _process(self, kind: str, dim: int, threads: int, smoke: bool) -> LineProcess:
        key = kind, dim, threads
        if key not in self._started:
            self._started[key] = self._start(*key, smoke)
        return self._started[key]

    def _start(self, kind: str, dim: int, threads: int, smoke: bool) -> LineProcess:
        arguments = [str(Path(__file__).with_name("train_worker.py")), kind, str(dim), str(threads), str(smoke)]
        if kind not in ("local", "dense"):
            if self._shards is None:
                self._shards = self._stack.enter_context(running_shards())
            arguments += [self._shards.redis_url, self._shards.cluster]
        process = LineProcess(arguments, LOCAL[threads])
        self._stack.callback(process.stop)
        process.read()
        return process


def benchmarks(trainers: Trainers) -> list[Benchmark]:
    found = []
    for dim in DIMS:
        make = functools.partial(trainers.pair, dim=dim)
        for threads, peer in PEERS.items():
            beside_local = functools.partial(make, ours="plain", peer="local", peer_threads=threads)
            goal = GOALS.get((dim, threads), NO_GOAL)
            found.append(Benchmark(f"train-{dim}-{threads}", "samples/s", peer, goal, beside_local))
        for kind in ("prefetch", "exact") if hasattr(shardam, "prefetch") else ():
            ahead = functools.partial(make, ours=kind, peer="plain")
            found.append(Benchmark(f"{kind}-{dim}", "samples/s", "without prefetch", NO_GOAL, ahead))
        for threads, peer in PEERS.items():
            bound = functools.partial(make, ours="dense", peer="local", peer_threads=threads)
            found.append(Benchmark(f"bound-{dim}-{threads}", "samples/s", peer, NO_GOAL, bound))
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs what the command line names; the status is frame.main's."""
    with contextlib.ExitStack() as stack:
        return frame.main(benchmarks(Trainers(stack)), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
