"""One rank of a small DDP training with sparse gradients and a loss scale (see rank_program.py): what must be equal on all.

Each kind of run yields the loss scale and the dense parameters' bits after every step, and which steps of the sparse optimizer
were skipped.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardam
from shardam_testing.rank_program import Rank, run_scenarios

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
        self.scaler.step(self.sparse)
        found_inf = any(self.scaler._found_inf_per_device(self.sparse).values())
        self.scaler.step(self.dense)
        self.scaler.update()
        self.sparse.zero_grad()
        self.dense.zero_grad()
        return pending and found_inf

    def dense_bits(self) -> str:
        return "".join(parameter.detach().numpy().tobytes().hex() for parameter in self.head.parameters())


def run(cluster: shardam.Cluster, kind: str, prefix: str = "async") -> dict[str, object]:
    """Trains once, on a table of its own, and returns what it saw."""
    scaler_type = torch.amp.GradScaler if kind == "torchs_scaler" else shardam.GradScaler
    replica = Replica(cluster, f"{prefix}_{kind}", scaler_type("cpu", init_scale=1024.0, growth_interval=1000))
    scales, bits, skipped = [], [], []
    for number in range(STEPS):
        if replica.step(number, clip=kind == "clipped"):
            skipped.append(number)
        scales.append(replica.scaler.get_scale())
        bits.append(replica.dense_bits())
    replica.sparse.synchronize()
    dist.barrier()
    table_step = replica.items.table.stats().table_step
    return {"scales": scales, "dense": bits, "skipped": skipped, "table_step": table_step}


def run_async(rank: Rank, kind: str) -> dict[str, object]:
    """Trains without a group."""
    with shardam.connect(rank.redis_url) as cluster:
        return run(cluster, kind)


if __name__ == "__main__":
    kinds = ("plain", "clipped", "torchs_scaler")
    run_scenarios({kind: functools.partial(run_async, kind=kind) for kind in kinds})
