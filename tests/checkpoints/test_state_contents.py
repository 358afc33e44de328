"""Checkpoints in a loop while workers train: each holds what a replay of the shards' journals gives, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from shardam_testing.faults.checkpoint_files import StoredCheckpoint
from shardam_testing.faults.checkpoint_verification import compare_checkpoints
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.group_verification import verify_group
from shardam_testing.faults.injector import MANY
from shardam_testing.faults.members import GroupPlan
from shardam_testing.faults.verification import verify

HANG_S = 300.0
"""What takes 20 s on an idle machine."""

pytestmark = pytest.mark.timeout(HANG_S)

NUM_CHECKPOINTS = 6

ALL_CHANGES_MIB = "4096"
"""Limit of journals that hold every change of a test, without a base."""

LARGE_ROWS = 16_000
"""Rows of a large push: more than a MiB for each shard, so that it travels in chunks."""


def make_checkpoints(cluster: FaultCluster, count: int) -> list[str]:
    """Makes one after the other; returns their names."""
    return [cluster.checkpoints.done(cluster.checkpoints.create()).checkpoint for _ in range(count)]


def compared(cluster: FaultCluster, names: list[str]) -> list[StoredCheckpoint]:
    """Compares all checkpoints and returns them."""
    found = compare_checkpoints(cluster)
    found.check()
    assert [checkpoint.folder.name for checkpoint in found.checkpoints] == names
    assert found.num_comparisons == len(names) * cluster.num_shards
    return found.checkpoints


def test_checkpoints_beside_three_workers_with_new_ids_and_chunks_are_what_the_journals_replay_to(tmp_path: Path) -> None:
    with running_fault_cluster(tmp_path, 3, journal_limit_mib=ALL_CHANGES_MIB, checkpoint_keep="0") as cluster:
        workers = [cluster.workers.start(50 + index, MANY, in_flight=4 + 8 * index, new_rows=200) for index in range(2)]
        workers.append(cluster.workers.start(52, MANY, in_flight=8, large_rows=LARGE_ROWS, new_rows=200))
        for worker in workers:
            worker.wait_acknowledged(5)
        names = make_checkpoints(cluster, NUM_CHECKPOINTS)
        for worker in workers:
            worker.end()
        statuses = [cluster.wait_end(worker) for worker in workers]
        assert statuses == [0] * len(workers), [f"{worker.noted.error}\n{worker.log_text()}" for worker in workers]
        verify(cluster).check()
        checkpoints = compared(cluster, names)
    ids = [worker.noted.client_id for worker in workers]
    numbers = [[checkpoint.clients[client_id] for client_id in ids] for checkpoint in checkpoints]
    assert all(before < after for before, after in itertools.pairwise(numbers)), "nobody trained meanwhile"
    sizes = [sum(checkpoint.num_rows.values()) for checkpoint in checkpoints]
    assert sizes == sorted(set(sizes)), "no new rows came meanwhile"


def test_checkpoints_of_a_sync_group_hold_whole_steps_and_no_part_in_flight(tmp_path: Path) -> None:
    plan = GroupPlan(9, 3, MANY)
    with running_fault_cluster(tmp_path, 2, journal_limit_mib=ALL_CHANGES_MIB, checkpoint_keep="0") as cluster:
        members = cluster.members.start_all(plan)
        for member in members:
            member.wait_step(2)
        names, steps = [], []
        for _ in range(NUM_CHECKPOINTS):
            steps.append(cluster.members.last_step)
            names += make_checkpoints(cluster, 1)
            members[0].wait_step(cluster.members.last_step + 1)
        for member in members:
            member.end()
        assert [cluster.wait_end(member) for member in members] == [0] * len(members), members[0].log_text()
        verified = verify_group(cluster, plan)
        verified.check()
        checkpoints = compared(cluster, names)
    cut_at = [{shard.groups[plan.group].step for shard in checkpoint.shards} for checkpoint in checkpoints]
    assert all(len(found) == 1 for found in cut_at), f"shards were cut at steps {cut_at}"
    at_steps = [found.pop() for found in cut_at]
    assert all(step >= noted for step, noted in zip(at_steps, steps, strict=True)), f"{at_steps} lack what was noted: {steps}"
    assert at_steps == sorted(set(at_steps))
