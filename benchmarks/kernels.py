"""The CPU kernels against torch and plain C: python benchmarks/kernels.py [--json] [--smoke] [--check] [NAME ...].

A table of 1M rows of 64 float32; a batch is 16,384 ids, Zipf distributed with exponent 1.05, of which 42 % are distinct. A push
is all that a shard does with a section: duplicates, the check of the sums, lookup, Adam, and what it notes of each row (the
change and step that last touched it), whose cost has a figure of its own.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else torch's threads spin on after a call and take a core from ours

import numpy as np
import numpy.typing as npt
import torch
from frame import Benchmark, Pair, main
from plain_table import PlainTable

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.initializers import InitialRows, fold_constant
from shardam_kernels.layout import layout

NUM_ROWS, SMOKE_ROWS = 1_000_000, 2_000
BATCH, SMOKE_BATCH = 16_384, 512
DIM = 64
EXPONENT = 1.05

MERGE_BATCH, SMOKE_MERGE_BATCH, DUPLICATES = 65_536, 512, 0.3
"""A push of which 30 % of the ids repeat others: does grouping them take longer than the update?"""


def zipf_ids(num_rows: int, count: int) -> npt.NDArray[np.int64]:
    """Returns ids 0 to num_rows - 1, the frequent ones anywhere in the table."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -EXPONENT
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(count))
    return rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]


class Table:
    """A table of existing rows under the native kernels."""

    def __init__(self, num_rows: int) -> None:
        record_layout = layout(DIM)
        self.index = native.ArrayIndex(num_rows)
        self.arena = native.Arena(record_layout.stride_bytes)
        self.arena.reserve(num_rows)
        self.records = native.Records(self.arena, record_layout)
        self.initial = InitialRows(fold_constant(0.1), 0)
        row_ids = np.arange(num_rows)
        slots, is_new = np.empty(num_rows, np.int64), np.empty(num_rows, np.uint8)
        self.index.insert(row_ids, slots, is_new)
        native.initialize(self.records, slots, row_ids, self.initial)
        self.touches = native.zeroed_memory(num_rows * 16).view(np.uint64).reshape(num_rows, 2)
        self.factors = factors(AdamOptions(), 100)

    def group(self, row_ids: npt.NDArray[np.int64], gradients: npt.NDArray[np.float32], num_threads: int) -> native.StepRows:
        return native.group_rows(row_ids, gradients, self.factors, num_threads)

    def apply(self, rows: native.StepRows, num_threads: int, *, noted: bool = True) -> None:
        rows.find(self.index)
        touches = self.touches if noted else None
        native.update_rows(self.records, rows, self.factors, touches, 1, 100, num_threads=num_threads)


def with_threads(num_threads: int, work: Callable[[], object]) -> Callable[[], object]:
    """Returns work that runs with torch on so many threads."""

    def run() -> object:
        torch.set_num_threads(num_threads)
        return work()

    return run


def push_of(count: int, num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Returns ids and gradients of a batch."""
    return zipf_ids(num_rows, count), np.random.default_rng(1).standard_normal((count, DIM)).astype(np.float32)


def update_pair(smoke: bool, *, num_threads: int) -> Pair:
    """A push; the peer is SparseAdam's step with the gradient of an Embedding."""
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    row_ids, gradients = push_of(count, num_rows)
    table = Table(num_rows)

    def ours() -> None:
        table.apply(table.group(row_ids, gradients, num_threads), num_threads)

    weight = torch.nn.Parameter(torch.full((num_rows, DIM), 0.1))
    optimizer = torch.optim.SparseAdam([weight])
    weight.grad = torch.sparse_coo_tensor(
        torch.from_numpy(row_ids)[None], torch.from_numpy(gradients), weight.shape, check_invariants=False
    )
    return Pair(count, ours, with_threads(num_threads, optimizer.step))


def plain_pair(smoke: bool) -> Pair:
    """A push in one thread; the peer is a loop in C over the same records: no index, no checks, no notes."""
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    row_ids, gradients = push_of(count, num_rows)
    table, plain = Table(num_rows), PlainTable(num_rows, DIM)
    return Pair(
        count,
        lambda: table.apply(table.group(row_ids, gradients, 1), 1, noted=False),
        lambda: plain.update(row_ids, gradients),
    )


def merge_pair(smoke: bool) -> Pair:
    """What finds duplicates and checks their sums; the peer is the rest of the same push, with the sums themselves."""
    num_rows, count = (SMOKE_ROWS, SMOKE_MERGE_BATCH) if smoke else (NUM_ROWS, MERGE_BATCH)
    rng, table = np.random.default_rng(2), Table(num_rows)
    row_ids = rng.permutation(num_rows)[:count]
    row_ids[: int(count * DUPLICATES)] = rng.choice(row_ids[int(count * DUPLICATES) :], int(count * DUPLICATES))
    rng.shuffle(row_ids)
    gradients = rng.standard_normal((count, DIM)).astype(np.float32)
    rows = table.group(row_ids, gradients, 1)
    return Pair(count, lambda: table.group(row_ids, gradients, 1), lambda: table.apply(rows, 1))


def noted_pair(smoke: bool) -> Pair:
    """A push whose rows are noted; the peer is one whose rows are not."""
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    row_ids, gradients = push_of(count, num_rows)
    table, other = Table(num_rows), Table(num_rows)
    return Pair(
        count,
        lambda: table.apply(table.group(row_ids, gradients, 1), 1),
        lambda: other.apply(other.group(row_ids, gradients, 1), 1, noted=False),
    )


def gather_pair(smoke: bool, *, num_threads: int) -> Pair:
    """A pull: lookup and gather; the peer is an Embedding's forward."""
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    row_ids = zipf_ids(num_rows, count)
    table, out = Table(num_rows), np.empty((count, DIM), np.float32)

    def ours() -> None:
        native.gather_rows(table.records, table.index, row_ids, table.initial, out, num_threads)

    embedding = torch.nn.Embedding.from_pretrained(torch.full((num_rows, DIM), 0.1))
    indices = torch.from_numpy(row_ids)
    return Pair(count, ours, with_threads(num_threads, lambda: embedding(indices)))


def update_benchmark(num_threads: int, goal: float) -> Benchmark:
    """A push against torch, with so many threads each."""
    make = functools.partial(update_pair, num_threads=num_threads)
    return Benchmark(f"update-{num_threads}", "ids/s", "torch.optim.SparseAdam", goal, make)


def gather_benchmark(num_threads: int) -> Benchmark:
    """A pull against torch, with so many threads each."""
    make = functools.partial(gather_pair, num_threads=num_threads)
    return Benchmark(f"gather-{num_threads}", "rows/s", "torch.nn.Embedding", 1.25, make)


BENCHMARKS = [
    update_benchmark(1, 9),
    update_benchmark(2, 10),
    Benchmark("plain", "ids/s", "a plain C loop", 0.85, plain_pair),
    Benchmark("noted", "ids/s", "the same without notes of rows", 0.7, noted_pair),
    gather_benchmark(1),
    gather_benchmark(2),
    Benchmark("merge", "ids/s", "the rest of the push", 1, merge_pair),
]

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS, sys.argv[1:]))
