"""Reference values (a): one step of cross entropy over three rows, by torch.optim.SparseAdam and by shards."""

from __future__ import annotations

import torch
from torch import nn

import shardam

ROWS = [1, 3, 5]
TARGETS = torch.tensor([0, 2, 1])


def train_one_step(embedding: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = nn.functional.cross_entropy(embedding(torch.tensor(ROWS)), TARGETS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    local = nn.Embedding(10, 5, sparse=True)
    with shardam.LocalCluster(shards=2) as cluster:
        remote = shardam.Embedding(10, 5, table="example_1", cluster=cluster)
        remote.table.assign(range(10), local.weight)
        train_one_step(local, torch.optim.SparseAdam(local.parameters(), lr=0.01))
        train_one_step(remote, shardam.SparseAdam([remote], lr=0.01))
        trained = remote.table.pull(ROWS)

    for row_id, weight in zip(ROWS, trained, strict=True):
        print(f"row {row_id} local   {local.weight[row_id].tolist()}")
        print(f"row {row_id} shardam {weight.tolist()}")


if __name__ == "__main__":
    main()
