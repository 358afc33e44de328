"""A shard on a GPU end to end: one worker's pushes and pulls over gRPC, beside the same on a shard on the CPU.

Usage: python benchmarks/gpu_shard.py [--device cuda:0] [--json] [--smoke] [--check]

Needs the built package. A batch is 16,384 Zipf ids x 64 float32, duplicates included; both shards must hold the same bits at
the end, or the exit status is 4. `--device interpret` rehearses the path; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from frame import Benchmark, Pair, main

import shardam

NUM_ROWS, SMOKE_ROWS = 1_000_000, 500
BATCH, SMOKE_BATCH = 16_384, 256
DIM = 64
EXPONENT = 1.05
GOAL = 1.0
"""gRPC and the worker take most of the time of either, so a GPU shard should be no slower; the kernels' goals are gpu.py's."""

EXIT_WRONG_BITS = 4

Int64s = npt.NDArray[np.int64]


class Side:
    """One shard on one device, and what is pushed to it."""

    def __init__(self, device: str) -> None:
        self.cluster = shardam.LocalCluster(shards=1, device=device)
        self.tables: dict[str, shardam.Table] = {}

    def table(self, name: str) -> shardam.Table:
        if name not in self.tables:
            self.tables[name] = self.cluster.create_table(shardam.TableSpec(name, DIM))
        return self.tables[name]


def batches(smoke: bool) -> tuple[Int64s, npt.NDArray[np.float32]]:
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    rng = np.random.default_rng(0)
    row_ids = (rng.zipf(EXPONENT, (16, count)) % num_rows).astype(np.int64)
    return row_ids, rng.standard_normal((count, DIM)).astype(np.float32)


def push_pair(smoke: bool, *, ours: Side, peer: Side) -> Pair:
    row_ids, gradients = batches(smoke)

    def pushing(side: Side) -> Callable[[], object]:
        calls = iter(range(10**9))
        return lambda: side.table("pushed").push(row_ids[next(calls) % len(row_ids)], gradients, shardam.AdamOptions())

    return Pair(row_ids.shape[1], pushing(ours), pushing(peer))


def pull_pair(smoke: bool, *, ours: Side, peer: Side) -> Pair:
    row_ids, gradients = batches(smoke)
    for side in (ours, peer):
        for batch in row_ids:
            side.table("pulled").push(batch, gradients, shardam.AdamOptions())

    def pulling(side: Side) -> Callable[[], object]:
        calls = iter(range(10**9))
        return lambda: side.table("pulled").pull(row_ids[next(calls) % len(row_ids)])

    return Pair(row_ids.shape[1], pulling(ours), pulling(peer))


def same_bits(ours: Side, peer: Side) -> bool:
    """Whether both shards hold the same rows, moments and steps."""
    for name in ours.tables:
        for our_rows, peer_rows in zip(ours.table(name).scan(), peer.table(name).scan(), strict=True):
            columns = ("row_ids", "weight", "exp_avg", "exp_avg_sq", "step")
            if any(getattr(our_rows, column).tobytes() != getattr(peer_rows, column).tobytes() for column in columns):
                return False
    return True


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda:0")
    options, rest = parser.parse_known_args(arguments)
    ours, peer = Side(options.device), Side("cpu")
    with ours.cluster, peer.cluster:
        benchmarks = [
            Benchmark(name, "rows/s", "a shard on the CPU", GOAL, functools.partial(make, ours=ours, peer=peer))
            for name, make in (("gpu-shard-push", push_pair), ("gpu-shard-pull", pull_pair))
        ]
        code = main(benchmarks, rest)
        if not same_bits(ours, peer):
            print("the GPU shard and the CPU shard hold different bits", file=sys.stderr)
            return EXIT_WRONG_BITS
        return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
