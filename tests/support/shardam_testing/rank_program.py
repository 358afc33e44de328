"""One rank's side of scenarios that several processes run together, each scenario as a group of its own.

Usage of such a program: python -m shardam_testing.PROGRAM REDIS_URL FOLDER RANK WORLD_SIZE

It prints one JSON line for each scenario: what this rank saw.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardam

LR = 0.125
"""Learning rate of the sparse optimizers; a power of two, so that a test can write it as it is."""


HANG_S = 90.0
"""All scenarios of a program take about 10 s on two cores; after this time it says where it hangs, and ends."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """Who this process is.

    Attributes:
        redis_url: the cluster's Redis.
        folder: what the ranks share.
        index: its rank.
        world_size: number of ranks.
    """

    redis_url: str
    folder: Path
    index: int
    world_size: int

    def connect(self, mode: str = "sync") -> shardam.Cluster:
        """Joins the group."""
        return shardam.connect(self.redis_url, mode=mode, rank=self.index, world_size=self.world_size)

    def meet(self) -> None:
        """Waits until all ranks are here."""
        dist.barrier()


Scenario = Callable[[Rank], Mapping[str, object]]


class Trainer:
    """One rank's table, with a dense part that DDP keeps equal on all ranks.

    Args:
        cluster: of this rank.
        table: the table's name.
        lr: of the sparse optimizer.
    """

    def __init__(self, cluster: shardam.Cluster, table: str, lr: float = LR) -> None:
        self.items = shardam.Embedding(None, 2, table=table, cluster=cluster)
        self.sparse = shardam.SparseAdam([self.items], lr=lr)
        torch.manual_seed(0)
        self.head = DistributedDataParallel(nn.Linear(4, 1))
        self.dense = torch.optim.Adam(self.head.parameters(), lr=0.1)
        self.samples = torch.Generator().manual_seed(dist.get_rank())
        self.dense_bits: list[str] = []

    def loss(self, row_ids: list[int], factors: float | list[float] = 1.0) -> torch.Tensor:
        """Returns a loss whose gradient of each row is its factor, and which has another dense part on each rank."""
        loss: torch.Tensor = self.head(torch.randn(8, 4, generator=self.samples)).square().mean()
        if row_ids:
            scale = torch.as_tensor(factors, dtype=torch.float32).expand(len(row_ids)).unsqueeze(1)
            loss = loss + (self.items(torch.tensor(row_ids)) * scale).sum()
        return loss

    def step(self) -> str | None:
        """Steps both optimizers and waits; returns the reason if the sparse step was refused, and then steps neither."""
        try:
            self.sparse.step(sync=True)
            refusal = None
        except shardam.errors.ShardamError as error:
            refusal = f"{error.reason}: {error.message}"
        self.finish(refused=refusal is not None)
        return refusal

    def finish(self, *, refused: bool = False) -> None:
        """Steps the dense part unless the sparse step was refused, and goes on to the next batch."""
        if not refused:
            self.dense.step()
        self.sparse.zero_grad()
        self.dense.zero_grad()
        self.dense_bits.append("".join(part.detach().numpy().tobytes().hex() for part in self.head.parameters()))


def run_scenarios(scenarios: Mapping[str, Scenario]) -> None:
    """Runs all scenarios as the rank that the command line names; a rank that fails ends, and so do those that need it."""
    redis_url, folder, index, world_size = sys.argv[1:]
    rank = Rank(redis_url, Path(folder), int(index), int(world_size))
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank.index, world_size=rank.world_size)
    try:
        for name, scenario in scenarios.items():
            sys.stdout.write(json.dumps({"scenario": name, **scenario(rank)}) + "\n")
            rank.meet()  # a group begins when all members of the one before have left
    finally:
        dist.destroy_process_group()
