"""Reference values (c): SparseAdam and Adam agree after one step; a step on row 5 then moves row 3 under Adam only."""

from __future__ import annotations

import torch
from torch import nn

import shardam

ROW, OTHER_ROW = 3, 5


def train_one_step(embedding: nn.Module, optimizer: torch.optim.Optimizer, row_id: int) -> None:
    embedding(torch.tensor([row_id])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def local_embedding(*, sparse: bool) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(10, 4, sparse=sparse)


def main() -> None:
    sparse, dense = local_embedding(sparse=True), local_embedding(sparse=False)
    local_adam = torch.optim.SparseAdam(sparse.parameters(), lr=0.01)
    dense_adam = torch.optim.Adam(dense.parameters(), lr=0.01)
    with shardam.LocalCluster(shards=2) as cluster:
        remote = shardam.Embedding(10, 4, table="example_3", cluster=cluster)
        remote.table.assign(range(10), sparse.weight)
        remote_adam = shardam.SparseAdam([remote], lr=0.01)
        for step, row_id in enumerate((ROW, OTHER_ROW), start=1):
            train_one_step(sparse, local_adam, row_id)
            train_one_step(dense, dense_adam, row_id)
            train_one_step(remote, remote_adam, row_id)
            print(f"row {ROW} after step {step} (on row {row_id})")
            print(f"  local SparseAdam {sparse.weight[ROW].tolist()}")
            print(f"  shardam          {remote.table.pull([ROW])[0].tolist()}")
            print(f"  local Adam       {dense.weight[ROW].tolist()}")


if __name__ == "__main__":
    main()
