"""Several workers, one step: DDP averages the dense part, shardam merges the sparse gradients, and a killed worker comes back.

Start a cluster (`shardam up`), export the SHARDAM_REDIS_URL that it prints, then:
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # else torch's own restart may find addresses of the former workers
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/sync_workers.py

With `--die-at 40` rank 1 kills itself when it has queued steps 0 to 39. torchrun starts both workers again, and they go on at
the first step that was not decided: 39 or 40.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardam

TABLE = "sync_items"
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def first_step(cluster: shardam.Cluster) -> int:
    """Returns the step to go on at: the table's, on which every rank agrees once all have joined."""
    dist.barrier()
    step = torch.tensor(cluster.table(TABLE).stats().table_step)
    dist.broadcast(step, src=0)
    return int(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--dense", type=Path, help="file that keeps the dense part after each step; the rows live on the shards"
    )
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself before this step, once")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same dense part everywhere
    layer = torch.nn.Linear(16, 1)
    saved = torch.load(options.dense) if options.dense and options.dense.exists() else None
    if saved:
        layer.load_state_dict(saved["layer"])

    with shardam.connect(mode="sync") as cluster:  # rank, world size and restarts are torchrun's
        items = shardam.Embedding(None, 16, table=TABLE, cluster=cluster)
        head = DistributedDataParallel(layer)
        sparse = shardam.SparseAdam([items], lr=1e-2)  # as in one process: the workers' gradients are averaged into one step
        dense = torch.optim.Adam(head.parameters(), lr=1e-2)
        if saved:
            dense.load_state_dict(saved["optimizer"])
        start = first_step(cluster)
        if rank == 0 and start:
            print(f"restart {RESTARTS}: goes on at step {start}", flush=True)

        for step in range(start, options.steps):
            if step == options.die_at and rank == 1 and not RESTARTS:
                os.kill(os.getpid(), signal.SIGKILL)
            samples = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
            ids = torch.randint(0, 1000, (256,), generator=samples)
            loss = torch.nn.functional.mse_loss(head(items(ids)).squeeze(1), (ids % 7).float())
            loss.backward()
            sparse.step()  # each rank, each step: the others wait for this one's part
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            if rank == 0 and options.dense:
                sparse.synchronize()  # the step is decided: the file is never ahead of the rows, and at most a step behind
                partial = options.dense.with_suffix(".partial")  # a kill in the middle leaves the former file whole
                torch.save({"layer": layer.state_dict(), "optimizer": dense.state_dict()}, partial)
                partial.replace(options.dense)
            if rank == 0 and step % 25 == 24:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

        sparse.synchronize()  # the last step is decided, and applied on every shard
        if rank == 0:
            steps = cluster.table(TABLE).stats().table_step
            print(f"{dist.get_world_size()} workers in sync: {steps} steps, one of the table each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
