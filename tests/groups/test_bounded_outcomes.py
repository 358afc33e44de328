"""Two ranks in bounded mode: every step() moves a rank on, whatever it has, and only training waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardam_testing import bounded_outcomes
from shardam_testing.rank_processes import Seen, of_all, run_ranks

from shardam import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


@pytest.fixture(scope="module")
def seen(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw, by scenario."""
    return run_ranks("bounded_outcomes", cluster.redis_url, tmp_path_factory.mktemp("ranks"))


def test_looking_up_the_next_batch_before_this_push_does_not_deadlock(cluster: LocalCluster, seen: Seen) -> None:
    assert seen["prefetch"] == [{}, {}]
    assert cluster.table("prefetch").stats().table_step == 2 * bounded_outcomes.STEPS


def test_steps_without_a_gradient_dropped_and_refused_ones_move_the_rank_on(cluster: LocalCluster, seen: Seen) -> None:
    rounds = bounded_outcomes.STEPS // 5
    assert of_all(seen, "steps_of_all_kinds", "refused") == [rounds, 0]
    assert cluster.table("steps_of_all_kinds").stats().table_step == rounds + bounded_outcomes.STEPS


def test_a_training_forward_waits_for_the_rank_behind_and_a_look_at_rows_does_not(cluster: LocalCluster, seen: Seen) -> None:
    first, second = seen["who_waits"]
    assert (first, second) == ({"saw_step": [False, True], "looked_at": [1, 1, 1]}, {})
    assert cluster.table("who_waits").stats().table_step == 3
