"""The CPU kernels against torch: python benchmarks/kernels.py [--json] [--smoke] [--check] [NAME ...].

A table of 1M rows of 64 float32; a batch is 16,384 ids, Zipf distributed with exponent 1.05, of which 42 % are distinct.
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

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.initializers import InitialRows, fold_constant
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import RowSteps

NUM_ROWS, SMOKE_ROWS = 1_000_000, 2_000
BATCH, SMOKE_BATCH = 16_384, 512
DIM = 64
EXPONENT = 1.05


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

    def slots(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        slots = np.empty(row_ids.size, np.int64)
        self.index.lookup(row_ids, slots)
        return slots


def with_threads(num_threads: int, work: Callable[[], object]) -> Callable[[], object]:
    """Returns work that runs with torch on so many threads."""

    def run() -> object:
        torch.set_num_threads(num_threads)
        return work()

    return run


def update_pair(smoke: bool, *, num_threads: int) -> Pair:
    """A push: sum of duplicates, lookup, one Adam step; the peer is SparseAdam's step with the gradient of an Embedding."""
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    row_ids = zipf_ids(num_rows, count)
    gradients = np.random.default_rng(1).standard_normal((count, DIM)).astype(np.float32)
    table, step = Table(num_rows), factors(AdamOptions(), 100)

    def ours() -> None:
        merged = native.merge_gradients(row_ids, gradients, step, num_threads)
        steps = RowSteps(step.step_factors(merged.row_ids.size))
        native.adam_update(table.records, table.slots(merged.row_ids), merged.gradients, step, steps, num_threads)

    weight = torch.nn.Parameter(torch.full((num_rows, DIM), 0.1))
    optimizer = torch.optim.SparseAdam([weight])
    weight.grad = torch.sparse_coo_tensor(
        torch.from_numpy(row_ids)[None], torch.from_numpy(gradients), weight.shape, check_invariants=False
    )
    return Pair(count, ours, with_threads(num_threads, optimizer.step))


def gather_pair(smoke: bool, *, num_threads: int) -> Pair:
    """A pull: lookup and gather; the peer is an Embedding's forward."""
    num_rows, count = (SMOKE_ROWS, SMOKE_BATCH) if smoke else (NUM_ROWS, BATCH)
    row_ids = zipf_ids(num_rows, count)
    table, out = Table(num_rows), np.empty((count, DIM), np.float32)

    def ours() -> None:
        native.gather_weights(table.records, table.slots(row_ids), row_ids, table.initial, out, num_threads)

    embedding = torch.nn.Embedding.from_pretrained(torch.full((num_rows, DIM), 0.1))
    indices = torch.from_numpy(row_ids)
    return Pair(count, ours, with_threads(num_threads, lambda: embedding(indices)))


BENCHMARKS = [
    Benchmark(
        f"update-{num_threads}", "ids/s", "torch.optim.SparseAdam", 7.0, functools.partial(update_pair, num_threads=num_threads)
    )
    for num_threads in (1, 2)
] + [
    Benchmark(
        f"gather-{num_threads}", "rows/s", "torch.nn.Embedding", 1.25, functools.partial(gather_pair, num_threads=num_threads)
    )
    for num_threads in (1, 2)
]

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS, sys.argv[1:]))
