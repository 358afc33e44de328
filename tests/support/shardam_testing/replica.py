"""One rank of a small DDP training with sparse gradients and a loss scale; prints what must be equal on all ranks.

Usage: python replica.py REDIS_URL STORE_FILE RANK WORLD_SIZE

For each kind of run it prints one JSON line: the loss scale and the dense parameters' bits after every step, and which steps
of the sparse optimizer were skipped.
"""

from __future__ import annotations

import json
import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardam

STEPS = 8
INF_STEP = 2
"""Rank 0's sparse gradient is infinite, the dense ones are finite everywhere."""
ALONE_STEP = 4
"""The same, and the other ranks have no sparse gradient."""


class Replica:
    """One rank's model and optimizers."""

    def __init__(self, cluster: shardam.Cluster, table: str, scaler: torch.amp.GradScaler) -> None:
        self.rank = dist.get_rank()
        self.items = shardam.Embedding(None, 4, table=table, cluster=cluster)
        torch.manual_seed(0)
        self.head = DistributedDataParallel(nn.Linear(4, 1))
        self.sparse = shardam.SparseAdam([self.items], lr=0.1)
        self.dense = torch.optim.Adam(self.head.parameters(), lr=0.1)
        self.scaler = scaler
        self.samples = torch.Generator().manual_seed(self.rank)

    def step(self, number: int, clip: bool) -> bool:
        """Takes a step; returns whether the sparse optimizer was skipped."""
        features = torch.randn(8, 4, generator=self.samples)
        loss = self.head(features).square().mean()
        if self.rank == 0 or number != ALONE_STEP:
            factor = math.inf if self.rank == 0 and number in (INF_STEP, ALONE_STEP) else 1.0
            loss = loss + (self.items(torch.tensor([number])) * factor).sum()
        self.scaler.scale(loss).backward()
        if clip:
            self.scaler.unscale_(self.dense)
            nn.utils.clip_grad_norm_(self.head.parameters(), 0.1)
            self.scaler.unscale_(self.sparse)
            nn.utils.clip_grad_norm_(self.sparse.parameters(), 0.1 * (1 + self.rank))
        pending = self.items._gradient.to_push() is not None
        pushed_before = self.items.table.cluster._pusher._num_submitted
        self.scaler.step(self.sparse)
        self.scaler.step(self.dense)
        self.scaler.update()
        self.sparse.zero_grad()
        self.dense.zero_grad()
        return pending and self.items.table.cluster._pusher._num_submitted == pushed_before

    def dense_bits(self) -> str:
        return "".join(parameter.detach().numpy().tobytes().hex() for parameter in self.head.parameters())


def run(cluster: shardam.Cluster, kind: str) -> dict[str, object]:
    """Trains once and returns what it saw."""
    scaler_type = torch.amp.GradScaler if kind == "torchs scaler" else shardam.GradScaler
    replica = Replica(cluster, kind.replace(" ", "_"), scaler_type("cpu", init_scale=1024.0, growth_interval=1000))
    scales, bits, skipped = [], [], []
    for number in range(STEPS):
        if replica.step(number, clip=kind == "clipped"):
            skipped.append(number)
        scales.append(replica.scaler.get_scale())
        bits.append(replica.dense_bits())
    replica.sparse.synchronize()
    dist.barrier()
    table_step = replica.items.table.stats().table_step
    return {"kind": kind, "scales": scales, "dense": bits, "skipped": skipped, "table_step": table_step}


def main(redis_url: str, store: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        with shardam.connect(redis_url) as cluster:
            for kind in ("plain", "clipped", "torchs scaler"):
                sys.stdout.write(json.dumps(run(cluster, kind)) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
