"""Rounds of chaos for groups: members that train in sync, a seeded plan of faults, and the comparison afterwards.

A plan follows from its seed and place alone. The first rounds are runs without a change of membership, under kills of shards in
every phase of a step; their bits follow from seed and number of ranks alone. Then members come and go, too.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from pathlib import Path

from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.group_verification import GroupVerified, verify_group
from shardam_testing.faults.injector import playing
from shardam_testing.faults.members import GroupPlan, Member
from shardam_testing.faults.network_faults import Cut, Direction, Lose, MessageKind
from shardam_testing.faults.plans import (
    Action,
    CutAll,
    Elapsed,
    KillInPhase,
    KillMember,
    KillRedis,
    KillShard,
    Network,
    Phase,
    Planned,
    Stepped,
    StopMember,
    StopShard,
)
from shardam_testing.faults.rounds import ARMED_TIMEOUT_S, END_TIMEOUT_S, PACE_S, SLEEP_S, RoundResult

RUNS_UNDER_KILLS = ((2, 3), (4, 1), (4, 3), (2, 1))
"""Ranks and shards of the rounds without a change of membership."""

STEPS_PER_KILL = 6
"""Steps between two kills: some that nothing disturbs, and room for the one that is kept back."""

STEPS_AFTER = 20
"""Steps after the last kill, so that everything that came back takes part."""

MANY_STEPS = 1_000_000
"""Of a group that trains until its members are told to end."""

PEER_MESSAGES: tuple[MessageKind, ...] = ("part", "staged", "update", "updated")
HOME_MESSAGES: tuple[MessageKind, ...] = ("part", "staged", "arrive", "result")
"""What may be lost before a peer, and before home."""


@dataclasses.dataclass(frozen=True)
class GroupRound:
    """What a round will be.

    Attributes:
        name: for people.
        num_shards: shards of its cluster.
        plan: what the members have in common.
        faults: the faults.
        flags: of the shards.
    """

    name: str
    num_shards: int
    plan: GroupPlan
    faults: tuple[Planned, ...]
    flags: dict[str, str]

    @property
    def keeps_members(self) -> bool:
        """Whether every step counts every rank."""
        return self.plan.last_step != MANY_STEPS


def make_group_round(seed: int, place: int, num_kills: int) -> GroupRound:
    """Returns a round of a run.

    Args:
        seed: of the run.
        place: of the round, from 0; the first ones are RUNS_UNDER_KILLS.
        num_kills: kills of shards in each of them.
    """
    rng = random.Random(f"groups {seed} {place}")
    if place < len(RUNS_UNDER_KILLS):
        world_size, num_shards = RUNS_UNDER_KILLS[place]
        return run_under_kills(seed, world_size, num_shards, num_kills, rng)
    num_shards, world_size = rng.randint(1, 3), rng.randint(2, 4)
    seconds = rng.uniform(3.0, 6.0)
    moments = sorted(rng.uniform(0.2, seconds) for _ in range(rng.randint(4, 8)))
    faults = [Planned(Elapsed(moment), _random_action(rng, num_shards, world_size)) for moment in moments]
    flags = {"journal": rng.choice(["write", "write", "fsync"]), "journal_limit_mib": rng.choice(["1", "1024", "1024"])}
    plan = GroupPlan(rng.randrange(10**6), world_size, MANY_STEPS, reduce=rng.choice(["mean", "sum"]), pace_s=PACE_S)
    name = f"group of {world_size}, {num_shards} shards, journal {flags['journal']}"
    return GroupRound(name, num_shards, plan, tuple(faults), flags)


def run_under_kills(seed: int, world_size: int, num_shards: int, num_kills: int, rng: random.Random) -> GroupRound:
    """Returns a round without a change of membership: each phase in turn, of home and of other shards, and lost messages."""
    faults: list[Planned] = []
    phases = list(Phase)
    for kill in range(num_kills):
        turn, place = divmod(kill, len(phases))
        victim = (kill + turn) % num_shards  # in time each shard in each phase
        moment = Stepped(2 + kill * STEPS_PER_KILL)
        shard = rng.randrange(num_shards)
        faults.append(Planned(moment, Network(shard, Lose(rng.choice(PEER_MESSAGES if shard else HOME_MESSAGES)))))
        faults.append(Planned(moment, KillInPhase(phases[place], victim)))
    plan = GroupPlan(seed, world_size, num_kills * STEPS_PER_KILL + STEPS_AFTER)
    name = f"group of {world_size}, {num_shards} shards, {num_kills} kills of shards in all phases"
    return GroupRound(name, num_shards, plan, tuple(faults), {})


def _random_action(rng: random.Random, num_shards: int, world_size: int) -> Action:
    shard, other = rng.randrange(num_shards), rng.randrange(1, world_size)  # rank 0 stays: someone trains on
    phases = [Phase.STAGED, Phase.DECIDED] + ([Phase.HALF] if num_shards > 1 else [])
    message = rng.choice(PEER_MESSAGES if shard else HOME_MESSAGES)
    actions: list[Action] = [
        KillInPhase(rng.choice(phases), shard),
        KillShard(shard),
        StopShard(shard, rng.choice([0.5, SLEEP_S])),
        Network(shard, Lose(message)),
        Network(shard, Cut(rng.randrange(8000), rng.choice(list(Direction)))),
        CutAll(shard),
        KillRedis(rng.uniform(0.1, 2.0)),
        KillMember(other, again_after_s=rng.choice([0.1, SLEEP_S])),
        StopMember(other, rng.choice([0.5, SLEEP_S])),
    ]
    return rng.choice(actions)


def run_group_round(planned: GroupRound, folder: Path) -> RoundResult:
    """Runs a round; what goes wrong stands in its result."""
    start, result = time.monotonic(), RoundResult()
    try:
        play_group_round(planned, folder, result)
    except AssertionError as error:
        result.mismatches.append(str(error))
    result.seconds = time.monotonic() - start
    return result


def play_group_round(planned: GroupRound, folder: Path, result: RoundResult) -> GroupVerified:
    """Runs a round and returns what was compared; counts, and what differed, stand in the result.

    Raises:
        AssertionError: it could not end.
    """
    with running_fault_cluster(
        folder, planned.num_shards, most_shards=0, with_admin=False, reads_messages=True, **planned.flags
    ) as cluster:
        for member in cluster.members.start_all(planned.plan):
            member.wait_step(1)
        with playing(cluster, planned.faults) as injector:
            injector.finish()
            if not planned.keeps_members:
                injector.wait_armed(ARMED_TIMEOUT_S)
                for member in cluster.members.started:
                    member.end()
            result.mismatches += wait_members(cluster)
            result.fired = injector.counts()
        return _compare(cluster, planned, result)


def wait_members(cluster: FaultCluster) -> list[str]:
    """Waits until every member has ended; returns one line for each that did not end as it should."""
    found = []
    for member in cluster.members.started:
        cluster.wait_end(member, END_TIMEOUT_S)
        found += _unexpected_end(member)
    return found


def _unexpected_end(member: Member) -> list[str]:
    status = member.process.returncode
    if member.killed or member.noted.done:
        return []
    if status == -signal.SIGTERM and not member.progress.exists():
        return []  # it was asked to end while it still loaded its modules
    return [f"{member.name} ended by itself with status {status}: {member.noted.error or member.log_text()[-2000:]}"]


def _compare(cluster: FaultCluster, planned: GroupRound, result: RoundResult) -> GroupVerified:
    verified = verify_group(cluster, planned.plan)
    result.num_comparisons += verified.num_comparisons
    result.num_decisions += len(verified.decisions)
    result.num_changes += sum(len(member.noted.ended) for member in cluster.members.started)
    result.mismatches += verified.mismatches
    if planned.keeps_members:
        result.mismatches += partial_steps(verified, planned.plan)
    return verified


def partial_steps(verified: GroupVerified, plan: GroupPlan) -> list[str]:
    """Returns one line for each step that does not count every rank, or is missing: of a run that keeps its members."""
    steps = [decision.step for decision in verified.decisions]
    found = [
        f"step {decision.step} counts {len(decision.counted)} of {plan.world_size} ranks"
        for decision in verified.decisions
        if len(decision.counted) != plan.world_size
    ]
    return found if steps == list(range(1, plan.last_step + 1)) else [*found, f"decided steps are {steps}"]
