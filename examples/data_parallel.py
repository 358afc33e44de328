"""Several workers, one cluster: DDP averages the dense part, each worker pushes its own sparse gradients.

Start a cluster (`shardam up`), export the SHARDAM_REDIS_URL that it prints, then:
    torchrun --standalone --nproc-per-node 2 examples/data_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardam


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same dense part everywhere; rows need no such care, they live on the shards

    with shardam.connect() as cluster:  # the address is $SHARDAM_REDIS_URL
        items = shardam.Embedding(None, 16, table="shared_items", cluster=cluster)
        head = DistributedDataParallel(torch.nn.Linear(16, 1))  # an Embedding has no parameters for DDP to see
        sparse = shardam.SparseAdam([items], lr=1e-2 / world_size)  # N workers take N steps a round
        dense = torch.optim.Adam(head.parameters(), lr=1e-2)
        samples = torch.Generator().manual_seed(rank)  # each worker has samples of its own

        for step in range(100):
            ids = torch.randint(0, 1000, (256,), generator=samples)
            loss = torch.nn.functional.mse_loss(head(items(ids)).squeeze(1), (ids % 7).float())
            loss.backward()
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            if rank == 0 and step % 25 == 24:
                print(f"step {step + 1}: loss {loss.item():.3f}")

        sparse.synchronize()  # this worker's pushes are applied
        dist.barrier()  # and everyone's
        if rank == 0:
            stored = cluster.table("shared_items").rows(torch.arange(3))
            print(f"{world_size} workers took {stored.step.max()} steps; exp_avg of row 0 starts {stored.exp_avg[0, :3]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
