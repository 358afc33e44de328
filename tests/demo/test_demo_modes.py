"""`shardam demo --mode`: in sync the workers take the local baseline's steps, bounded ones their own; both to the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shardam_testing.demos import HANG_S, running_demo, write_clicks

pytestmark = pytest.mark.timeout(2 * HANG_S)


@pytest.mark.parametrize(("workers", "shards"), [(2, 1), (4, 2)])
def test_in_sync_the_workers_take_the_baseline_s_steps(tmp_path: Path, workers: int, shards: int) -> None:
    arguments = ("--mode", "sync", "--workers", str(workers), "--shards", str(shards), "--epochs", "1", "--json")
    with running_demo(tmp_path, "--data", "synthetic", *arguments) as demo:
        assert demo.wait() == 0, demo.err.read_text()
        demo.assert_nothing_is_left()
        people = demo.err.read_text()
        result = json.loads(demo.out.read_text())
    assert (result["mode"], result["workers"]) == ("sync", workers)
    assert result["table_steps"] == result["steps"] > 10
    assert abs(result["auc"] - result["baseline_auc"]) < 2e-4  # the order of float32 sums is all that differs
    assert abs(result["log_loss"] - result["baseline_log_loss"]) < 2e-4
    assert f"each the mean of K = {workers} contribution" in people


def test_bounded_workers_go_on_with_the_bound_of_the_run(tmp_path: Path) -> None:
    arguments = ("--data", str(write_clicks(tmp_path)), "--mode", "bounded:0", "--epochs", "2", "--shards", "3")
    with running_demo(tmp_path, *arguments, "--json") as demo:
        assert demo.wait() == 0, demo.err.read_text()
        demo.assert_nothing_is_left()
        result = json.loads(demo.out.read_text())
    assert result["mode"] == "bounded:0"
    assert result["table_steps"] == 2 * result["steps"] == 12  # 1,800 training samples are 3 batches of 512, in 2 epochs
