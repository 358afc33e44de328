"""Reference values (b): one step on the sum of one row, before and after, by torch.optim.SparseAdam and by shards."""

from __future__ import annotations

import torch
from torch import nn

import shardam

ROW = 2


def train_one_step(embedding: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    embedding(torch.tensor([ROW])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    local = nn.Embedding(10, 3, sparse=True)
    with shardam.LocalCluster(shards=2) as cluster:
        remote = shardam.Embedding(10, 3, table="example_2", cluster=cluster)
        remote.table.assign(range(10), local.weight)
        print(f"before local   {local.weight[ROW].tolist()}")
        print(f"before shardam {remote.table.pull([ROW])[0].tolist()}")
        train_one_step(local, torch.optim.SparseAdam(local.parameters(), lr=0.01))
        train_one_step(remote, shardam.SparseAdam([remote], lr=0.01))
        print(f"after  local   {local.weight[ROW].tolist()}")
        print(f"after  shardam {remote.table.pull([ROW])[0].tolist()}")


if __name__ == "__main__":
    main()
