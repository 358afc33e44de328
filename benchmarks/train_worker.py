"""A trainer of the click model that takes steps when it is told to.

Usage: python benchmarks/train_worker.py local|dense|plain|prefetch|exact DIM THREADS SMOKE [REDIS_URL CLUSTER]

local: nn.Embedding(sparse=True) with torch.optim.SparseAdam. dense: the dense part alone, on rows that never change. plain,
prefetch and exact: rows in a cluster, with shardam.SparseAdam; the last two pull ahead.

Prints {} when it is ready; reads `run N` from stdin, takes N steps and answers {"loss": mean}; ends with its stdin.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from click_batches import FIELD_SIZES, SMOKE_FIELD_SIZES, Batch, make_batches
from click_model import ClickModel
from torch import nn

import shardam

BATCH, SMOKE_BATCH = 2_048, 64
NUM_BATCHES, SMOKE_BATCHES = 32, 4
"""Batches that take turns."""

LR = 1e-3
NUM_DENSE = 13

Rows = Sequence[torch.Tensor]


class Optimizers:
    """Steps that belong together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Trainer:
    """Trains with rows that somebody looks up.

    Args:
        model: the dense part.
        look_up: rows of each field of a batch.
        sparse: optimizers of the rows.
        batches: without an end.
    """

    def __init__(
        self,
        model: ClickModel,
        look_up: Callable[[Batch], Rows],
        sparse: Sequence[torch.optim.Optimizer],
        batches: Iterator[Batch],
    ) -> None:
        self._model, self._look_up, self._batches = model, look_up, batches
        self._optimizers = Optimizers(*sparse, torch.optim.Adam(model.parameters(), lr=LR))
        self._loss = nn.BCEWithLogitsLoss()

    def run(self, steps: int) -> float:
        """Takes steps; returns the mean loss."""
        total = 0.0
        for batch in itertools.islice(self._batches, steps):
            loss = self._loss(self._model(batch.dense, self._look_up(batch)), batch.labels)
            loss.backward()
            self._optimizers.step()
            total += loss.item()
        return total / steps


def local_rows(sizes: Sequence[int], dim: int) -> tuple[Callable[[Batch], Rows], list[torch.optim.Optimizer]]:
    """Returns rows in this process."""
    modules = [nn.Embedding(size, dim, sparse=True) for size in sizes]
    for module in modules:
        nn.init.normal_(module.weight, std=0.01)

    def look_up(batch: Batch) -> Rows:
        return [module(ids) for module, ids in zip(modules, batch.row_ids, strict=True)]

    return look_up, [torch.optim.SparseAdam([module.weight for module in modules], lr=LR)]


def fixed_rows(sizes: Sequence[int], dim: int, batch: int) -> tuple[Callable[[Batch], Rows], list[torch.optim.Optimizer]]:
    """Returns rows that cost nothing, with a gradient that nobody takes."""
    rows = [torch.randn(batch, dim).mul_(0.01).requires_grad_() for _ in sizes]

    def look_up(_: Batch) -> Rows:
        for row in rows:
            row.grad = None
        return rows

    return look_up, []


def cluster_rows(
    cluster: shardam.Cluster, sizes: Sequence[int], dim: int
) -> tuple[Callable[[Batch], Rows], list[torch.optim.Optimizer], shardam.EmbeddingCollection]:
    """Returns rows of a cluster; the kinds train the same tables, in turn."""
    names = [f"cat_{field}" for field in range(len(sizes))]
    initial = shardam.init.Normal(0.0, 0.01)
    modules = shardam.EmbeddingCollection(
        {
            name: shardam.Embedding(size, dim, table=f"{name}-{dim}", cluster=cluster, init=initial)
            for name, size in zip(names, sizes, strict=True)
        }
    )

    def look_up(batch: Batch) -> Rows:
        found = modules(features_of(batch))
        return [found[name] for name in names]

    return look_up, [shardam.SparseAdam([modules], lr=LR)], modules


def features_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the ids of a batch by feature."""
    return {f"cat_{field}": ids for field, ids in enumerate(batch.row_ids)}


def main(arguments: list[str]) -> None:
    kind, dim_text, threads, smoke_text, *cluster_at = arguments
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    dim, smoke = int(dim_text), smoke_text == "True"
    sizes = SMOKE_FIELD_SIZES if smoke else FIELD_SIZES
    batch = SMOKE_BATCH if smoke else BATCH
    prepared = make_batches(sizes, batch, SMOKE_BATCHES if smoke else NUM_BATCHES)
    batches: Iterator[Batch] = itertools.cycle(prepared)
    cluster = shardam.connect(cluster_at[0], cluster=cluster_at[1]) if cluster_at else None
    if cluster is not None:
        look_up, sparse, modules = cluster_rows(cluster, sizes, dim)
        if kind != "plain":
            batches = iter(shardam.prefetch(batches, {modules: features_of}, depth=1, exact=kind == "exact"))
    elif kind == "dense":
        look_up, sparse = fixed_rows(sizes, dim, batch)
    else:
        look_up, sparse = local_rows(sizes, dim)
    trainer = Trainer(ClickModel(NUM_DENSE, len(sizes), dim), look_up, sparse, batches)
    trainer.run(len(prepared))  # from then on every row exists
    print("{}", flush=True)
    for line in sys.stdin:
        command, steps = line.split()
        if command != "run":
            sys.exit(f"unknown command {line!r}")
        loss = trainer.run(int(steps))
        if cluster is not None:
            cluster._synchronize()  # what was pushed belongs to the steps
        if not math.isfinite(loss):
            sys.exit(f"the loss is {loss}")
        print(json.dumps({"loss": loss}), flush=True)
    if cluster is not None:
        cluster.close()


if __name__ == "__main__":
    main(sys.argv[1:])
