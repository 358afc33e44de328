"""A program of two ranks in sync mode (see rank_program.py): all the ways in which a step of a group can end.

Rank 0 trains rows 1 and 2 with gradient 1, rank 1 rows 1 and 3 with gradient 2, and each scenario has a table of its name.
"""

from __future__ import annotations

import math

import torch

import shardam
from shardam_testing import replica
from shardam_testing.rank_program import LR, Rank, Trainer, run_scenarios

ROWS = ([1, 2], [1, 3])
"""Row ids by rank."""

GRADIENTS = (1.0, 2.0)
"""Each row's gradient by rank."""

LEAVES_AFTER, STEPS_IN_ALL = 40, 60
"""Uneven data: steps after which rank 1 leaves, and steps that rank 0 takes."""

SPREAD = list(range(10, 26))
"""Ids of which both of two shards have some."""

Saw = dict[str, object]


def loss_of(trainer: Trainer, rank: Rank) -> torch.Tensor:
    """The loss of a usual batch."""
    return trainer.loss(ROWS[rank.index], GRADIENTS[rank.index])


def train(trainer: Trainer, rank: Rank) -> str | None:
    """A usual step."""
    loss_of(trainer, rank).backward()
    return trainer.step()


def one_abstains(rank: Rank) -> Saw:
    """An inf on rank 0 with torch's own scaler: it abstains alone, and from then on the loss scales differ."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "one_abstains")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        endings: list[str | None] = []
        for factor in (1.0, math.inf, 1.0):
            gradient = GRADIENTS[rank.index] * (factor if rank.index == 0 else 1.0)
            scaler.scale(trainer.loss(ROWS[rank.index], gradient)).backward()
            try:
                scaler.step(trainer.sparse, sync=True)
                endings.append(None)
            except shardam.errors.GroupMismatch as error:
                endings.append(error.message)
            scaler.update()
            trainer.sparse.zero_grad()
            trainer.dense.zero_grad()
        return {"endings": endings}


def all_abstain(rank: Rank) -> Saw:
    """An inf on rank 0 with shardam's scaler: all ranks abstain; later all drop a gradient."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "all_abstain")
        scaler = shardam.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        scales = []
        for factor in (1.0, math.inf, 1.0):
            gradient = GRADIENTS[rank.index] * (factor if rank.index == 0 else 1.0)
            scaler.scale(trainer.loss(ROWS[rank.index], gradient)).backward()
            scaler.step(trainer.sparse)
            scaler.step(trainer.dense)
            scaler.update()
            trainer.finish(refused=True)  # the scaler has stepped the dense part
            scales.append(scaler.get_scale())
        loss_of(trainer, rank).backward()
        trainer.finish(refused=True)
        train(trainer, rank)
        return {"scales": scales, "dense": trainer.dense_bits}


def not_finite(rank: Rank) -> Saw:
    """A gradient on rank 1 of which one row is inf, without a scaler; once raised by step, once by the next forward."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "not_finite")
        bad = [1.0] * len(SPREAD)
        bad[-1] = math.inf if rank.index == 1 else 1.0
        endings = [train(trainer, rank)]
        trainer.loss(SPREAD, bad).backward()
        endings.append(trainer.step())
        trainer.loss(SPREAD, bad).backward()
        trainer.sparse.step()
        trainer.finish()
        try:
            trainer.loss(ROWS[rank.index])
            endings.append(None)
        except shardam.errors.NonFiniteGradient as error:
            endings.append(f"{error.reason}: {error.message}")
        endings.append(train(trainer, rank))
        return {"endings": endings, "dense": trainer.dense_bits}


def one_ulp(rank: Rank) -> Saw:
    """Learning rates that differ in their last bit, and then are equal."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "one_ulp", lr=LR if rank.index == 0 else math.nextafter(LR, 1.0))
        endings = [train(trainer, rank)]
        trainer.sparse.param_groups[0]["lr"] = LR
        endings.append(train(trainer, rank))
        return {"endings": endings, "dense": trainer.dense_bits}


def empty(rank: Rank) -> Saw:
    """A step in which rank 0 has no sparse gradient, and one in which no rank has any."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "empty")
        endings = [train(trainer, rank)]
        trainer.loss([] if rank.index == 0 else ROWS[1], GRADIENTS[1]).backward()
        endings.append(trainer.step())
        trainer.loss([]).backward()
        endings += [trainer.step(), train(trainer, rank)]
        return {"endings": endings, "dense": trainer.dense_bits}


def dropped_gradient(rank: Rank) -> Saw:
    """A gradient that rank 0 forgets with zero_grad() instead of a step."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "dropped_gradient")
        endings = [train(trainer, rank)]
        loss_of(trainer, rank).backward()
        if rank.index == 0:
            trainer.sparse.zero_grad()
            trainer.finish()
        else:
            endings.append(trainer.step())
        endings.append(train(trainer, rank))
        return {"endings": endings, "dense": trainer.dense_bits}


def evaluation(rank: Rank) -> Saw:
    """Rank 0 looks at rows while a step waits: for rank 1, with its own push queued, then for itself, with rank 1 in step()."""
    with rank.connect() as cluster:
        trainer = Trainer(cluster, "evaluation")
        ids, seen = torch.tensor([1, 2]), []
        rank.meet()

        def look() -> None:
            with torch.no_grad():
                seen.append(trainer.items(ids).tolist())

        look()
        loss_of(trainer, rank).backward()
        if rank.index == 0:
            trainer.sparse.step()
            look()
        rank.meet()
        trainer.sparse.step() if rank.index == 1 else trainer.sparse.synchronize()
        trainer.finish()
        loss_of(trainer, rank).backward()
        rank.meet()
        if rank.index == 0:
            for _ in range(3):
                look()
        trainer.step()
        return {"seen": seen, "dense": trainer.dense_bits}


def uneven_data(rank: Rank) -> Saw:
    """Rank 1 has less data and leaves; rank 0 goes on alone."""
    with rank.connect() as cluster:
        items = shardam.Embedding(None, 2, table="uneven_data", cluster=cluster)
        sparse = shardam.SparseAdam([items], lr=LR)
        num_steps = STEPS_IN_ALL if rank.index == 0 else LEAVES_AFTER
        for _ in range(num_steps):
            (items(torch.tensor(ROWS[rank.index])) * GRADIENTS[rank.index]).sum().backward()
            sparse.step()
            sparse.zero_grad()
        return {"num_steps": num_steps}


def two_optimizers(rank: Rank) -> Saw:
    """Two optimizers on one cluster, each with a table of its own; rank 1 has a gradient of the second one alone."""
    with rank.connect() as cluster:
        modules = [shardam.Embedding(None, 2, table=table, cluster=cluster) for table in ("two_optimizers", "the_second")]
        optimizers = [shardam.SparseAdam([module], lr=LR) for module in modules]
        for _ in range(3):
            for module in modules[rank.index :]:
                (module(torch.tensor(ROWS[rank.index])) * GRADIENTS[rank.index]).sum().backward()
            for sparse in optimizers:
                sparse.step()
            for sparse in optimizers:
                sparse.zero_grad()
        return {}


def scaled_replicas(rank: Rank) -> Saw:
    """An inf on one rank, in sync mode."""
    with rank.connect() as cluster:
        return replica.run(cluster, "plain", prefix="sync")


def clipped_replicas(rank: Rank) -> Saw:
    """The same, with each rank clipping its own sparse gradient."""
    with rank.connect() as cluster:
        return replica.run(cluster, "clipped", prefix="sync")


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        one_abstains,
        all_abstain,
        not_finite,
        one_ulp,
        empty,
        dropped_gradient,
        evaluation,
        uneven_data,
        two_optimizers,
        scaled_replicas,
        clipped_replicas,
    )
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
