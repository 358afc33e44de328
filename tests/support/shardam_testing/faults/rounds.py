"""Rounds of chaos: a fresh cluster, workers, a seeded plan of faults, and the comparison afterwards.

A plan follows from its seed and place alone; when its faults meet which push is up to the machine.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import signal
import time
from pathlib import Path

from shardam_testing.faults.checkpoint_verification import compare_checkpoints
from shardam_testing.faults.cluster import READY_TIMEOUT_S, FaultCluster, running_fault_cluster
from shardam_testing.faults.comparison import RUN_FIELDS, differences
from shardam_testing.faults.fault_free import expected_rows
from shardam_testing.faults.injector import MANY, playing
from shardam_testing.faults.network_faults import Cut, Delay, Direction, Drop, Partition, Swallow
from shardam_testing.faults.plans import (
    Acknowledged,
    Action,
    CutAll,
    Elapsed,
    FlushRedis,
    KillAdmin,
    KillRedis,
    KillShard,
    KillWorker,
    Network,
    Planned,
    RestoreLatest,
    StartWorker,
    StopAdmin,
    StopRedis,
    StopShard,
    StopWorker,
    spread,
)
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import all_rows, verify
from shardam_testing.faults.workers import Worker
from shardam_testing.waiting import wait_for

END_TIMEOUT_S = 150.0
"""A worker that is told to end waits for its last change, so for a shard that starts: seconds."""

ARMED_TIMEOUT_S = 3.0
"""How long training goes on for a fault of the network to meet its byte; one that does not has no connection left to meet."""

PACE_S = 0.01
"""Rest between two changes of a worker, so that the oracle has no more to replay than faults to find."""

CHANGES_PER_KILL = 20
"""Changes between two kills of a run under kills, so that each finds new rows."""

SLEEP_S = 6.0
"""A worker that is stopped for so long is closed: its client lease is 4 s (cluster.SHRUNK)."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What a round will be.

    Attributes:
        name: for people.
        num_shards: shards of its cluster.
        seeds: one for each worker that trains from the start.
        in_flight: changes that a worker hands over before it waits.
        with_admin: an admin API runs, too.
        flags: of the shards.
        plan: the faults.
        most_shards: to which the state may be moved; 0: it stays where it is.
        has_checkpoints: checkpoints are made, and compared in the end.
    """

    name: str
    num_shards: int
    seeds: tuple[int, ...]
    in_flight: int
    with_admin: bool
    flags: dict[str, str]
    plan: tuple[Planned, ...]
    most_shards: int = 0
    has_checkpoints: bool = False


@dataclasses.dataclass
class RoundResult:
    """What a round was.

    Attributes:
        fired: kind of fault -> how often.
        num_changes: changes acknowledged to workers.
        num_comparisons: tables compared.
        num_decisions: steps of groups that were decided, each compared on all shards and with one process.
        mismatches: what differed, or why the round could not end.
        seconds: how long it took.
    """

    fired: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_changes: int = 0
    num_comparisons: int = 0
    num_decisions: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def make_round(seed: int, place: int, num_kills: int) -> Round:
    """Returns a round of a run.

    Args:
        seed: of the run.
        place: of the round, from 0; the first two are one worker's run under kills of shards, on three shards and on one.
        num_kills: kills of shards in each of the first two.
    """
    rng = random.Random(f"{seed} {place}")
    if place < 2:
        return _run_under_kills(rng, place, num_shards=3 if place == 0 else 1, num_kills=num_kills)
    num_shards, num_workers, with_admin = rng.randint(1, 3), rng.randint(1, 3), rng.random() < 0.3
    seconds = rng.uniform(2.0, 4.0)
    actions = [_random_actions(rng, num_shards, num_workers, with_admin) for _ in range(rng.randint(5, 10))]
    plan = [
        Planned(Elapsed(start + later), action)
        for start, group in zip(_moments(rng, len(actions), seconds), actions, strict=True)
        for later, action in group
    ]
    flags = {"journal": rng.choice(["write", "write", "fsync"]), "journal_limit_mib": rng.choice(["1", "1024"])}
    seeds = tuple(rng.randrange(10**6) for _ in range(num_workers))
    name = f"{num_workers} workers, {num_shards} shards, journal {flags['journal']}"
    return Round(name, num_shards, seeds, rng.choice([1, 8, 32]), with_admin, flags, tuple(plan))


def _run_under_kills(rng: random.Random, place: int, *, num_shards: int, num_kills: int) -> Round:
    plan = []
    for kill, number in enumerate(spread(rng, num_kills, 10, 10 + num_kills * CHANGES_PER_KILL)):
        moment = Acknowledged(0, number)
        plan.append(Planned(moment, KillShard(rng.randrange(num_shards))))
        if kill % 3 == 0:
            plan.append(Planned(moment, Network(rng.randrange(num_shards), Swallow())))
        if kill % 3 == 1:
            plan.append(Planned(moment, Network(rng.randrange(num_shards), Cut(rng.randrange(4000)))))
    name = f"1 worker, {num_shards} shards, {num_kills} kills of shards"
    return Round(name, num_shards, (1000 + place,), 4, False, {}, tuple(plan))


def _random_actions(rng: random.Random, num_shards: int, num_workers: int, with_admin: bool) -> list[tuple[float, Action]]:
    """Returns one event, as actions and how long after its beginning each comes."""
    shard = rng.randrange(num_shards)
    direction = rng.choice(list(Direction))
    events: list[list[tuple[float, Action]]] = [
        [(0.0, KillShard(shard))],
        [(0.0, KillShard(shard)), (0.2, KillShard(rng.randrange(num_shards)))],
        [(0.0, StopShard(shard, rng.uniform(0.1, 1.2)))],
        [(0.0, Network(shard, Swallow(rng.randint(1, 3))))],
        [(0.0, Network(shard, Cut(rng.randrange(8000), direction, reset=rng.random() < 0.5)))],
        [(0.0, Network(shard, Delay(rng.uniform(0.001, 0.05), direction, pieces=rng.randint(1, 20))))],
        [(0.0, Network(shard, Drop(rng.uniform(0.05, 0.5), direction, rng.randrange(2000))))],
        [(0.0, Network(shard, Partition(rng.uniform(0.1, 0.8), direction, rng.randrange(2000))))],
        [(0.0, CutAll(shard))],
        [(0.0, KillRedis(rng.uniform(0.1, 2.0)))],
        [(0.0, StopRedis(rng.uniform(0.1, 2.0)))],
        [(0.0, FlushRedis())],
    ]
    if num_workers > 1:
        other = rng.randrange(1, num_workers)  # worker 0 stays: someone trains on
        events += [
            [(0.0, KillWorker(other)), (0.3, StartWorker(rng.randrange(10**6), PACE_S))],
            [(0.0, StopWorker(other, rng.choice([0.5, SLEEP_S])))],
        ]
    if with_admin:
        events += [[(0.0, KillAdmin())], [(0.0, StopAdmin(rng.uniform(0.1, 2.0)))]]
    return rng.choice(events)


def _moments(rng: random.Random, count: int, seconds: float) -> list[float]:
    return sorted(rng.uniform(0.2, seconds) for _ in range(count))


def run_round(planned: Round, folder: Path) -> RoundResult:
    """Runs a round; what goes wrong stands in its result."""
    start, result = time.monotonic(), RoundResult()
    try:
        with running_fault_cluster(
            folder,
            planned.num_shards,
            most_shards=planned.most_shards,
            with_admin=planned.with_admin,
            reads_messages=False,
            **planned.flags,
        ) as cluster:
            for seed in planned.seeds:
                cluster.workers.start(seed, MANY, in_flight=planned.in_flight, pace_s=PACE_S)
            cluster.workers.started[0].wait_acknowledged(1)
            with playing(cluster, planned.plan) as injector:
                injector.finish()
                injector.wait_armed(ARMED_TIMEOUT_S)
                injector.wait_jobs()
                _end_workers(cluster, planned, result)
                result.fired = injector.counts()
            _compare(cluster, result)
            if planned.has_checkpoints:
                compared = compare_checkpoints(cluster)
                result.num_comparisons += compared.num_comparisons
                result.mismatches += compared.mismatches
            if cluster.admin is not None:
                wait_for("the admin API to be ready", cluster.admin.is_ready, READY_TIMEOUT_S)
    except AssertionError as error:
        result.mismatches.append(str(error))
    result.seconds = time.monotonic() - start
    return result


def _end_workers(cluster: FaultCluster, planned: Round, result: RoundResult) -> None:
    stops = [fault.action for fault in planned.plan if isinstance(fault.action, StopWorker)]
    slept = {f"worker {stop.index}" for stop in stops if stop.seconds >= SLEEP_S}
    restores = any(isinstance(fault.action, RestoreLatest) for fault in planned.plan)
    for worker in cluster.workers.started:
        worker.end()
    for worker in cluster.workers.started:
        cluster.wait_end(worker, END_TIMEOUT_S)
        result.num_changes += worker.noted.acknowledged
        worker.replaced = restores and (worker.killed or worker.noted.error.get("error") == "ClusterRestored")
        result.mismatches += _unexpected_end(worker, may_be_closed=worker.name in slept)


def _unexpected_end(worker: Worker, *, may_be_closed: bool) -> list[str]:
    noted = worker.noted
    if worker.replaced or worker.killed or noted.done or (may_be_closed and noted.error.get("error") == "ClientClosed"):
        return []
    status = worker.process.returncode
    if status == -signal.SIGTERM and not worker.progress.exists():
        return []  # it was asked to end while it still loaded its modules
    return [f"{worker.name} ended by itself with status {status}: {noted.error or worker.log_text()[-2000:]}"]


def _compare(cluster: FaultCluster, result: RoundResult) -> None:
    verified = verify(cluster)
    result.num_comparisons += verified.num_comparisons
    result.mismatches += verified.mismatches
    only, *others = cluster.workers.started
    if others or not only.noted.done:
        return
    with cluster.clients() as clients:
        tables = {spec.name: clients[0].info(spec.name) for spec in TABLES}
    expected, got = expected_rows(only.seed, only.noted.acknowledged, tables), all_rows(cluster)
    for name, rows in expected.items():
        result.num_comparisons += 1
        found = differences(rows, got[name], RUN_FIELDS)
        result.mismatches += [f"against the run without faults: table {name}, {line}" for line in found]
