"""Two ranks under DDP with sparse gradients of their own: the dense replicas stay equal, bit for bit."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from shardam_testing import replica
from shardam_testing.processes import clean_environment

from shardam import LocalCluster

RANKS = 2
TIMEOUT_S = 110
"""Both ranks take 10 s on two cores, most of it importing torch."""

Seen = dict[str, list[dict[str, object]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw, by kind of run."""
    store = tmp_path_factory.mktemp("replicas") / "store"
    found: Seen = {}
    with LocalCluster(shards=2) as cluster, contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            command = [sys.executable, "-W", "error", replica.__file__, cluster.redis_url, str(store), str(rank), str(RANKS)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        for process in ranks:
            output, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
            for line in output.splitlines():
                run = json.loads(line)
                found.setdefault(run["kind"], []).append(run)
    return found


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
    first, second = seen["torchs scaler"]
    assert first["scales"] != second["scales"]
    assert first["dense"] != second["dense"]
    assert first["skipped"] == [replica.INF_STEP, replica.ALONE_STEP]
    assert second["skipped"] == []
