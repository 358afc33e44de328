"""Two ranks under DDP with sparse gradients of their own: the dense replicas stay equal, bit for bit."""

from __future__ import annotations

import pytest
from shardam_testing import replica
from shardam_testing.rank_processes import Seen, run_ranks

from shardam import LocalCluster

RANKS = 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw, by kind of run."""
    with LocalCluster(shards=2) as cluster:
        return run_ranks("replica", cluster.redis_url, tmp_path_factory.mktemp("replicas"), RANKS)


@pytest.mark.parametrize("kind", ["plain", "clipped"])
def test_dense_replicas_and_loss_scales_are_equal_after_an_inf_on_one_rank(seen: Seen, kind: str) -> None:
    first, second = seen[kind]
    assert first["dense"] == second["dense"]
    assert first["scales"] == second["scales"]
    halved = [1024.0] * replica.INF_STEP + [512.0] * (replica.ALONE_STEP - replica.INF_STEP)
    assert first["scales"] == halved + [256.0] * (replica.STEPS - replica.ALONE_STEP)
    dense = first["dense"]
    assert isinstance(dense, list)
    assert len(set(dense)) == replica.STEPS  # the dense optimizer stepped each time: its gradients were finite


@pytest.mark.parametrize("kind", ["plain", "clipped"])
def test_a_rank_with_a_good_sparse_gradient_abstains_with_the_one_that_found_an_inf(seen: Seen, kind: str) -> None:
    first, second = seen[kind]
    assert first["skipped"] == [replica.INF_STEP, replica.ALONE_STEP]
    assert second["skipped"] == [replica.INF_STEP]  # in the other step it had none
    assert first["table_step"] == second["table_step"] == RANKS * (replica.STEPS - 2)


def test_torchs_own_scaler_lets_the_replicas_drift_apart(seen: Seen) -> None:
    first, second = seen["torchs_scaler"]
    assert first["scales"] != second["scales"]
    assert first["dense"] != second["dense"]
    assert first["skipped"] == [replica.INF_STEP, replica.ALONE_STEP]
    assert second["skipped"] == []
