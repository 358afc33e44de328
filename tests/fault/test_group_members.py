"""Members of a sync group that are killed, stopped, restarted or were never let in; a home that is stopped.

The others go on, and every shard has all of a step or nothing of it: the oracle's comparison with one process says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import pytest
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.comparison import ALL_FIELDS, differences
from shardam_testing.faults.group_rounds import MANY_STEPS, wait_members
from shardam_testing.faults.group_verification import GroupVerified, verify_group
from shardam_testing.faults.injector import playing
from shardam_testing.faults.members import GroupPlan, Member
from shardam_testing.faults.network_faults import MessageKind
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.plans import Planned, Stepped, StopShard
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import all_rows, read_oracles
from shardam_testing.waiting import wait_for

import shardam
from shardam.errors import GroupMismatch, NotAMember

HANG_S = 120.0
"""What takes seconds on an idle machine."""

pytestmark = pytest.mark.timeout(3 * HANG_S)

SEED = 12
HOME, PEER = 0, 2

LEASE_S = 4.0
"""Of clients (cluster.SHRUNK): a member of a busy machine misses ten beats before it is dropped."""

PHASES_OF_A_MEMBER: tuple[tuple[int, MessageKind], ...] = ((PEER, "part"), (HOME, "arrive"), (HOME, "part"))
"""Where a member is killed: with its part on some shards, with all parts staged, and with nothing at home."""

NEVER_S = "600"
"""A lease that no member of a test outlives: who is gone is replaced by its restart, or by nobody."""


def end_of_run(cluster: FaultCluster, plan: GroupPlan) -> GroupVerified:
    """Tells the members of a group without a last step to end, waits for them, and compares."""
    if plan.last_step == MANY_STEPS:
        for member in cluster.members.started:
            member.end()
    assert wait_members(cluster) == []
    verified = verify_group(cluster, plan)
    verified.check()
    return verified


def ranks_of(verified: GroupVerified, step: int) -> list[int]:
    return [one.rank for one in verified.decisions[step - 1].counted]


def kill_in_step(cluster: FaultCluster, shard: int, kind: MessageKind, member: Member) -> int:
    """Kills a member while a message of its step is kept back before a shard, which never gets it; returns the step."""
    step = cluster.members.last_step + 5  # has not begun
    hold = cluster.proxies[shard].hold(kind, step)
    try:
        wait_for(
            f"{member.name} to send {kind} of step {step}", lambda: any(one.rank == member.rank for one in hold.held), HANG_S
        )
        member.kill()
    finally:
        cluster.proxies[shard].release(lost_rank=member.rank)
    return step


@pytest.mark.case("C053")
def test_a_member_that_is_killed_in_mid_step_is_dropped_and_the_others_go_on_without_its_half_step(tmp_path: Path) -> None:
    plan = GroupPlan(SEED, 3, MANY_STEPS, pace_s=0.02)
    with running_fault_cluster(tmp_path, 3, reads_messages=True) as cluster:
        first, killed, stopped = cluster.members.start_all(plan)
        first.wait_step(2)
        between = kill_in_step(cluster, HOME, "arrive", killed)
        first.wait_step(between + 1, 10 * LEASE_S)
        stopped.stop()
        alone = first.noted.last_step + 3  # a step that it cannot have begun
        first.wait_step(alone, 10 * LEASE_S)
        stopped.go_on()
        wait_for("the stopped member to join again", lambda: len(stopped.noted.lives) == 2, HANG_S)
        again = cluster.members.start_again(killed)
        again.wait_joined(HANG_S)
        together = again.noted.lives[0].first_step
        stopped.wait_step(together)
        verified = end_of_run(cluster, plan)
        assert ranks_of(verified, between - 1) == [0, 1, 2]
        assert ranks_of(verified, between) == [0, 2]
        assert ranks_of(verified, alone) == [0]
        assert ranks_of(verified, together) == [0, 1, 2]
        assert [life.dropped for life in stopped.noted.lives] == ["NOT_A_MEMBER", ""]
        assert len(first.noted.lives) == len(again.noted.lives) == 1


def test_a_member_that_its_launcher_starts_again_takes_its_rank_over_at_once_and_goes_on_at_the_next_step(
    tmp_path: Path,
) -> None:
    plan = GroupPlan(SEED, 2, MANY_STEPS, pace_s=0.02)
    with running_fault_cluster(tmp_path, 3, reads_messages=True, client_lease_s=NEVER_S) as cluster:
        stays, member = cluster.members.start_all(plan)
        first_steps = []
        for shard, kind in PHASES_OF_A_MEMBER:
            member.wait_step(2)
            step = kill_in_step(cluster, shard, kind, member)
            assert stays.noted.last_step == step - 1
            member = cluster.members.start_again(member)
            member.wait_joined(HANG_S)
            first_steps.append((step, member.noted.lives[0].first_step))
        member.wait_step(cluster.members.last_step + 2)
        member.kill()  # in whatever it does
        member = cluster.members.start_again(member)
        member.wait_step(2)
        verified = end_of_run(cluster, plan)
        assert all(step == first_step for step, first_step in first_steps)
        assert all(ranks_of(verified, step) == [0, 1] for step, _ in first_steps)
        assert len({one.client_id for decision in verified.decisions for one in decision.counted}) == 6


def test_a_home_that_was_stopped_for_longer_than_the_lease_drops_nobody(tmp_path: Path) -> None:
    plan = GroupPlan(SEED, 2, 60, pace_s=0.02)
    with running_fault_cluster(tmp_path, 2) as cluster:
        members = cluster.members.start_all(plan)
        with playing(cluster, [Planned(Stepped(10), StopShard(HOME, 1.5 * LEASE_S))]) as injector:
            verified = end_of_run(cluster, plan)
            injector.finish()
            assert injector.counts() == {"stop shard": 1}
        assert [len(member.noted.lives) for member in members] == [1, 1]
        assert all(len(decision.counted) == 2 for decision in verified.decisions)


@contextlib.contextmanager
def idle_group(folder: Path) -> Iterator[FaultCluster]:
    """Starts two members that have joined, on two shards with some rows, and make no step."""
    with running_fault_cluster(folder, 2) as cluster:
        with shardam.connect(cluster.valkey.url, cluster="test", shard_timeout_s=HANG_S) as outsider:
            table = outsider.create_tables(list(TABLES))[0]
            table.push([1, 2, 3], np.ones((3, table.dim), np.float32), shardam.AdamOptions())
        for member in cluster.members.start_all(GroupPlan(SEED, 2, 1, pace_s=3600.0)):
            member.wait_joined(HANG_S)
        yield cluster
        for member in cluster.members.started:
            member.end()
        assert wait_members(cluster) == []


def state_of(cluster: FaultCluster) -> tuple[dict[str, TableRows], list[tuple[bytes, int]]]:
    """Returns all rows, and each shard's group with its step."""

    def read() -> list[Oracle] | None:
        return read_oracles(cluster)

    oracles = wait_for("the shards to be quiet", read, HANG_S)
    groups = [oracle.groups.groups["workers"] for oracle in oracles]
    assert all(oracle.groups.parts == {} for oracle in oracles)
    return all_rows(cluster), [(group.message.SerializeToString(), group.step) for group in groups]


class Place(TypedDict):
    """What a worker says of its group when it connects."""

    mode: str
    rank: int
    world_size: int
    reduce: NotRequired[str]
    group: NotRequired[str]


def test_who_does_not_belong_to_a_group_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    wrong: dict[str, Place] = {
        "rank 1 of group 'workers' is taken": {"mode": "sync", "rank": 1, "world_size": 2},
        "this worker asks for": {"mode": "sync", "rank": 2, "world_size": 3},
        "asks for bounded:1": {"mode": "bounded:1", "rank": 1, "world_size": 2},
        "reduce=sum": {"mode": "sync", "rank": 1, "world_size": 2, "reduce": "sum"},
        "beside a sync group there is no other": {"mode": "sync", "rank": 0, "world_size": 2, "group": "others"},
        "beside a sync group": {"mode": "bounded:0", "rank": 0, "world_size": 2, "group": "others"},
    }
    with idle_group(tmp_path) as cluster:
        rows, groups = state_of(cluster)
        for message, place in wrong.items():
            with pytest.raises(GroupMismatch, match=message):
                shardam.connect(cluster.valkey.url, cluster="test", shard_timeout_s=HANG_S, **place)
        with shardam.connect(cluster.valkey.url, cluster="test", shard_timeout_s=HANG_S) as outsider:
            table = outsider.table(TABLES[0].name)
            assert table.pull([1, 2, 3]).shape == (3, table.dim)
            with pytest.raises(NotAMember, match="mode='sync'"):
                table.push([1], np.ones((1, table.dim), np.float32), shardam.AdamOptions())
            with pytest.raises(NotAMember, match="mode='sync'"):
                table.assign([1], np.ones((1, table.dim), np.float32))
        after, groups_after = state_of(cluster)
        assert groups_after == groups
        for name, before in rows.items():
            assert differences(before, after[name], ALL_FIELDS) == []
