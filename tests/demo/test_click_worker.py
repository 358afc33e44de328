"""`python -m shardam.demo.click_worker` by itself; as one of the compose file's group it runs in test_compose.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from shardam_testing.processes import clean_environment, free_port, running_shards

import shardam

HANG_S = 300


def run_worker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardam.demo.click_worker", *arguments],
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.timeout(HANG_S + 60)
def test_alone_it_is_a_group_of_one_and_ends_after_its_epochs_with_every_push_applied(tmp_path: Path) -> None:
    with running_shards(tmp_path, 1) as shards:
        result = run_worker("--cluster", "test", "--epochs", "1", SHARDAM_REDIS_URL=shards.valkey.url)
        assert result.returncode == 0, result.stderr
        steps = 27_000 // 512  # nine tenths of the samples, in whole batches
        assert f"done after step {steps}" in result.stderr
        assert "epoch 1: AUC 0." in result.stderr
        with contextlib.closing(shardam.connect(shards.valkey.url, cluster="test")) as cluster:
            assert cluster.table("cat_25").stats().table_step == steps


def test_a_cluster_that_does_not_come_is_one_line_and_status_1() -> None:
    result = run_worker("--shard-timeout-s", "0.5", SHARDAM_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    assert result.returncode == 1
    assert "within 0.5 s: Redis did not answer" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("--epochs", "0"), ("--seed", "-1")])
def test_a_wrong_flag_is_refused_with_its_value(arguments: tuple[str, str]) -> None:
    result = run_worker(*arguments)
    assert result.returncode == 2
    assert "--epochs must be 1 or more and --seed 0 or more" in result.stderr
