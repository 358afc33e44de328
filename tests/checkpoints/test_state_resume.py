"""A run that goes on from a checkpoint ends with the bits of the run that was never interrupted, on any number of shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.members import GroupPlan
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import all_rows, run_differences, verify

HANG_S = 300.0
"""What takes 20 s on an idle machine."""

pytestmark = pytest.mark.timeout(HANG_S)

SEED = 21
COUNT, CUT_AT = 120, 70
"""Changes of the run, and after how many the checkpoint is made."""

LOST = 25
"""Changes after the checkpoint that the crash takes away."""

NEW_ROWS = 30
OTHER_SEED = "12345"
"""Of clusters that a checkpoint is restored into: the checkpoint's own wins."""

GROUP_SEED, LAST_STEP, CUT_AT_STEP = 6, 24, 11


def train(cluster: FaultCluster, count: int, skip: int = 0) -> None:
    """Has a worker make changes of the run."""
    worker = cluster.workers.start(SEED, count, in_flight=8, new_rows=NEW_ROWS, skip=skip)
    assert cluster.wait_end(worker) == 0, f"{worker.noted.error}\n{worker.log_text()}"


@contextlib.contextmanager
def restored(folder: Path, num_shards: int, root: Path, *, weights_only: bool = False) -> Iterator[FaultCluster]:
    """Starts a cluster without state and restores the latest checkpoint into it."""
    folder.mkdir()
    with running_fault_cluster(folder, num_shards, checkpoint_dir=str(root), seed=OTHER_SEED) as cluster:
        cluster.checkpoints.done(cluster.checkpoints.restore(weights_only=weights_only))
        yield cluster
        verify(cluster).check()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TableRows]:
    """Rows after the run on two shards, without a checkpoint."""
    with running_fault_cluster(tmp_path_factory.mktemp("uninterrupted"), 2) as cluster:
        train(cluster, COUNT)
        return all_rows(cluster)


@pytest.fixture(scope="module")
def root_of(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Root folders with a checkpoint of the run at CUT_AT, by the number of shards that wrote it."""
    roots: dict[int, Path] = {}
    for num_shards in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"written-by-{num_shards}")
        roots[num_shards] = folder / "checkpoints"
        with running_fault_cluster(folder, num_shards, checkpoint_dir=str(roots[num_shards])) as cluster:
            train(cluster, CUT_AT)
            cluster.checkpoints.done(cluster.checkpoints.create())
            train(cluster, LOST, skip=CUT_AT)
    return roots


@pytest.mark.case("C066")
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(
    tmp_path: Path, root_of: dict[int, Path], uninterrupted: dict[str, TableRows], num_shards: int
) -> None:
    with restored(tmp_path / "again", num_shards, root_of[num_shards]) as cluster:
        train(cluster, COUNT - CUT_AT, skip=CUT_AT)
        assert run_differences(uninterrupted, all_rows(cluster)) == []


def test_a_run_resumed_from_weights_alone_ends_with_other_bits(
    tmp_path: Path, root_of: dict[int, Path], uninterrupted: dict[str, TableRows]
) -> None:
    with restored(tmp_path / "again", 1, root_of[1], weights_only=True) as cluster:
        train(cluster, COUNT - CUT_AT, skip=CUT_AT)
        found = run_differences(uninterrupted, all_rows(cluster))
    assert {line.partition(":")[0] for line in found} >= {f"{spec.name}.weight" for spec in TABLES[:3]}, found


def test_a_run_on_two_shards_then_three_then_one_ends_with_the_bits_of_the_run_on_two(
    tmp_path: Path, root_of: dict[int, Path], uninterrupted: dict[str, TableRows]
) -> None:
    half = (COUNT - CUT_AT) // 2
    with restored(tmp_path / "three", 3, root_of[2]) as cluster:
        train(cluster, half, skip=CUT_AT)
        cluster.checkpoints.done(cluster.checkpoints.create())
    with restored(tmp_path / "one", 1, root_of[2]) as cluster:
        train(cluster, COUNT - CUT_AT - half, skip=CUT_AT + half)
        assert run_differences(uninterrupted, all_rows(cluster)) == []


@pytest.mark.case("C079")
def test_a_checkpoint_restored_twice_with_training_in_between_gives_the_same_state_each_time(
    tmp_path: Path, root_of: dict[int, Path]
) -> None:
    with restored(tmp_path / "again", 2, root_of[2]) as cluster:
        first = all_rows(cluster)
        train(cluster, LOST, skip=CUT_AT)
        assert run_differences(first, all_rows(cluster)) != []
        for worker in cluster.workers.started:
            worker.replaced = True
        for _ in range(2):
            cluster.checkpoints.done(cluster.checkpoints.restore())
            assert run_differences(first, all_rows(cluster)) == []
        train(cluster, LOST, skip=CUT_AT)


def make_steps(cluster: FaultCluster, last_step: int, skip: int = 0) -> None:
    """Has a group of two make steps of its run."""
    members = cluster.members.start_all(GroupPlan(GROUP_SEED, 2, last_step, skip=skip))
    statuses: Sequence[int] = [cluster.wait_end(member) for member in members]
    assert statuses == [0, 0], [f"{member.noted.error}\n{member.log_text()}" for member in members]


def test_a_sync_group_of_two_that_resumes_ends_with_the_bits_of_the_uninterrupted_run(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    folders = [tmp_path / name for name in ("uninterrupted", "interrupted")]
    for folder in folders:
        folder.mkdir()
    with running_fault_cluster(folders[0], 1) as cluster:
        make_steps(cluster, LAST_STEP)
        expected = all_rows(cluster)
    with running_fault_cluster(folders[1], 1, checkpoint_dir=str(root)) as cluster:
        make_steps(cluster, CUT_AT_STEP)
        cluster.checkpoints.done(cluster.checkpoints.create())
    with restored(tmp_path / "again", 3, root) as cluster:
        make_steps(cluster, LAST_STEP - CUT_AT_STEP, skip=CUT_AT_STEP)
        assert run_differences(expected, all_rows(cluster)) == []
