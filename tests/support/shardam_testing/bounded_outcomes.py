"""A program of two ranks in bounded mode (see rank_program.py): what counts as a step for the others, and who waits."""

from __future__ import annotations

import math
import threading

import torch

import shardam
from shardam_testing.rank_program import LR, Rank, run_scenarios

STEPS = 20
HANG_S = 60.0
"""A pull that waits for the other rank is answered in milliseconds once that rank has stepped."""

Saw = dict[str, object]


def make(cluster: shardam.Cluster, table: str) -> tuple[shardam.Embedding, shardam.SparseAdam]:
    """A table and its optimizer."""
    items = shardam.Embedding(None, 2, table=table, cluster=cluster)
    return items, shardam.SparseAdam([items], lr=LR)


def prefetch(rank: Rank) -> Saw:
    """Each rank's thread looks up the next batch before the rank has pushed this one."""
    with rank.connect("bounded:0") as cluster:
        items, sparse = make(cluster, "prefetch")
        found: list[torch.Tensor] = []

        def look_up(step: int) -> None:
            found.append(items(torch.tensor([step % 3, 10 + rank.index])))

        look_up(0)
        for step in range(STEPS):
            ahead = threading.Thread(target=look_up, args=(step + 1,))
            ahead.start()
            found.pop(0).sum().backward()
            sparse.step()
            ahead.join(HANG_S)
            assert not ahead.is_alive(), f"the rows of step {step + 1} did not come"
            sparse.zero_grad()
        sparse.synchronize()
        return {}


def steps_of_all_kinds(rank: Rank) -> Saw:
    """Rank 0 has gradients, none, ones that it drops, an inf under a scaler and one that is refused; rank 1 keeps pace."""
    with rank.connect("bounded:0") as cluster:
        items, sparse = make(cluster, "steps_of_all_kinds")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        refused = 0
        for step in range(STEPS):
            kind = step % 5 if rank.index == 0 else 0
            if kind == 1:
                sparse.step()
                continue
            output = items(torch.tensor([rank.index])).sum()
            if kind == 2:
                scaler.scale(output * math.inf).backward()
                scaler.step(sparse)
                scaler.update()
            elif kind == 3:
                output.backward()
            elif kind == 4:
                (output * math.inf).backward()
                try:
                    sparse.step()
                except shardam.errors.NonFiniteGradient:
                    refused += 1
            else:
                output.backward()
                sparse.step()
            sparse.zero_grad()
        sparse.synchronize()
        return {"refused": refused}


def who_waits(rank: Rank) -> Saw:
    """Rank 0 is a step ahead: its training forward waits for rank 1, a look at rows does not."""
    stepped = rank.folder / "rank-1-steps"
    with rank.connect("bounded:0") as cluster:
        items, sparse = make(cluster, "who_waits")
        ids, saw_step = torch.tensor([1]), []

        def train() -> None:
            items(ids).sum().backward()
            saw_step.append(stepped.exists())

        rank.meet()
        if rank.index == 1:
            train()
            rank.meet()
            stepped.touch()
            sparse.step()
            sparse.synchronize()
            rank.meet()
            return {}
        train()
        sparse.step()
        sparse.zero_grad()
        next_step = threading.Thread(target=train)
        next_step.start()
        with torch.no_grad():
            looked_at = [items(ids).shape[0] for _ in range(3)]
        rank.meet()
        next_step.join(HANG_S)
        assert not next_step.is_alive(), "the training forward did not come back"
        sparse.step()
        rank.meet()
        return {"saw_step": saw_step, "looked_at": looked_at}


if __name__ == "__main__":
    run_scenarios({scenario.__name__: scenario for scenario in (prefetch, steps_of_all_kinds, who_waits)})
