"""A program of two ranks in sync mode (see rank_program.py) and what it is compared with: one process with the full batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardam
from shardam_testing.rank_program import Rank, run_scenarios

NUM_ROWS, DIM = 200, 8
BATCH_SIZE, IDS_PER_SAMPLE = 64, 3
STEPS = 100
SPARSE_LR = DENSE_LR = 0.01

KINDS = ("no_shared_rows", "shared_rows")
"""Scenarios, and names of their tables: whether the ranks' halves of a batch name the same rows."""


def batch(step: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids [BATCH_SIZE, IDS_PER_SAMPLE] and targets [BATCH_SIZE, 1] of a step; each rank has one half of them."""
    generator = torch.Generator().manual_seed(step)
    row_ids = torch.randint(0, NUM_ROWS, (BATCH_SIZE, IDS_PER_SAMPLE), generator=generator)
    if kind == "no_shared_rows":
        row_ids = row_ids // 2 * 2
        row_ids[BATCH_SIZE // 2 :] += 1
    return row_ids, torch.randn(BATCH_SIZE, 1, generator=generator)


def train(
    items: nn.Module, head: nn.Module, optimizers: list[torch.optim.Optimizer], kind: str, samples: slice = slice(None)
) -> list[float]:
    """Trains on these samples of each batch and returns the losses."""
    losses = []
    for step in range(STEPS):
        row_ids, targets = batch(step, kind)
        loss = nn.functional.mse_loss(head(items(row_ids[samples]).sum(1)), targets[samples])
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


def make_head() -> nn.Linear:
    """The dense part, the same wherever it is made."""
    torch.manual_seed(0)
    return nn.Linear(DIM, 1)


def train_alone(weight: torch.Tensor, kind: str) -> tuple[list[float], torch.Tensor, nn.Linear]:
    """Trains with the full batch and torch's own optimizers, from given rows; returns losses, rows and dense part."""
    items, head = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True), make_head()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SparseAdam(items.parameters(), lr=SPARSE_LR),
        torch.optim.Adam(head.parameters(), lr=DENSE_LR),
    ]
    losses = train(items, head, optimizers, kind)
    return losses, items.weight.detach(), head


def half_of(kind: str, rank: Rank) -> Mapping[str, object]:
    """Trains this rank's half of each batch."""
    half = BATCH_SIZE // rank.world_size
    with rank.connect() as cluster:
        items = shardam.Embedding(NUM_ROWS, DIM, table=kind, cluster=cluster)
        head = DistributedDataParallel(make_head())
        optimizers: list[torch.optim.Optimizer] = [
            shardam.SparseAdam([items], lr=SPARSE_LR),
            torch.optim.Adam(head.parameters(), lr=DENSE_LR),
        ]
        losses = train(items, head, optimizers, kind, slice(half * rank.index, half * (rank.index + 1)))
        return {"losses": losses, "dense": [part.flatten().tolist() for part in head.parameters()]}


if __name__ == "__main__":
    run_scenarios({kind: functools.partial(half_of, kind) for kind in KINDS})
