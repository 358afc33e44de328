"""Rounds of chaos with checkpoints, restores and reshards among the faults; a plan follows from its seed and place alone."""

from __future__ import annotations

import random

from shardam_testing.faults.plans import (
    Action,
    CutAll,
    Elapsed,
    KillRedis,
    KillShard,
    KillWorker,
    MakeCheckpoint,
    MoveToShards,
    Planned,
    RestoreLatest,
    StartWorker,
    StopShard,
)
from shardam_testing.faults.rounds import PACE_S, Round

MOST_SHARDS = 4

SECONDS = (5.0, 9.0)
"""Length of a plan: room for a few jobs of a second each."""

Event = list[tuple[float, Action]]
"""Actions, and how long after the event's beginning each comes."""


def make_job_round(seed: int, place: int) -> Round:
    """Returns a round of a run.

    Args:
        seed: of the run.
        place: of the round, from 0.
    """
    rng = random.Random(f"jobs {seed} {place}")
    num_shards, num_workers, seconds = rng.randint(1, 3), rng.randint(1, 3), rng.uniform(*SECONDS)
    moments = sorted(rng.uniform(0.3, seconds) for _ in range(rng.randint(5, 9)))
    events: list[Event] = [[(0.0, MakeCheckpoint())], *(_random_event(rng, num_shards, num_workers) for _ in moments)]
    plan = [
        Planned(Elapsed(start + later), action)
        for start, event in zip([0.0, *moments], events, strict=True)
        for later, action in event
    ]
    seeds = tuple(rng.randrange(10**6) for _ in range(num_workers))
    name = f"{num_workers} workers, {num_shards} shards, checkpoints"
    flags = {"journal": rng.choice(["write", "fsync"]), "journal_limit_mib": "1024", "checkpoint_keep": "3"}
    return Round(name, num_shards, seeds, rng.choice([1, 8, 32]), False, flags, tuple(plan), MOST_SHARDS, True)


def _random_event(rng: random.Random, num_shards: int, num_workers: int) -> Event:
    shard = rng.randrange(num_shards)
    again = StartWorker(rng.randrange(10**6), PACE_S)
    events: list[Event] = [
        [(0.0, MakeCheckpoint())],
        [(0.0, MakeCheckpoint()), (rng.uniform(0.5, 1.5), KillShard(shard))],
        [(0.0, RestoreLatest()), (1.0, again)],
        [(0.0, RestoreLatest()), (rng.uniform(0.5, 1.5), KillShard(shard)), (2.0, again)],
        [(0.0, MoveToShards(rng.randint(num_shards, MOST_SHARDS)))],
        [(0.0, MoveToShards(rng.randint(num_shards, MOST_SHARDS))), (rng.uniform(0.5, 2.0), KillShard(shard))],
        [(0.0, KillShard(shard))],
        [(0.0, StopShard(shard, rng.uniform(0.1, 3.0)))],
        [(0.0, CutAll(shard))],
        [(0.0, KillRedis(rng.uniform(0.1, 1.5)))],
    ]
    if num_workers > 1:
        events.append([(0.0, KillWorker(1)), (0.3, again)])
    return rng.choice(events)
