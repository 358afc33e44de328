"""`shardam demo` end to end: real shards, real workers under torchrun, the admin API, and no process left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from shardam_testing.demos import HANG_S, running_demo, write_clicks
from shardam_testing.processes import clean_environment

pytestmark = pytest.mark.timeout(2 * HANG_S)


def get_json(url: str) -> dict[str, object]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as response:
        content: dict[str, object] = json.load(response)
        return content


def test_the_synthetic_demo_ends_with_one_json_object_of_its_figures(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--data", "synthetic", "--epochs", "1", "--json") as demo:
        assert demo.wait() == 0, demo.err.read_text()
        demo.assert_nothing_is_left()
        demo.assert_temp_is_empty()
        assert not demo.state_home.exists(), "rows live in memory and go with the demo"
        lines = demo.out.read_text().splitlines()
        people = demo.err.read_text()
    result = json.loads(lines[-1])
    assert list(result) == [
        "auc",
        "log_loss",
        "samples_per_s",
        "baseline_auc",
        "baseline_log_loss",
        "baseline_samples_per_s",
        "step_ms",
        "baseline_step_ms",
        "mode",
        "workers",
        "shards",
        "rows",
        "batch_size",
        "steps",
        "table_steps",
    ]
    assert len(lines) == 1
    assert result["workers"] == result["shards"] == 2
    assert result["mode"] == "async"
    assert result["table_steps"] == 2 * result["steps"]  # one for each push
    assert result["step_ms"] == pytest.approx(1000 * result["batch_size"] / result["samples_per_s"])
    assert result["rows"] > 1_000
    assert 0.6 < result["baseline_auc"] < 0.9
    assert abs(result["auc"] - result["baseline_auc"]) < 0.05  # one epoch: shardam's tables have taken twice the steps
    assert 0.0 < result["log_loss"] < 0.7
    assert result["samples_per_s"] > 0
    assert people.startswith("shardam demo: synthetic click data, seed 0")
    assert "weight now" in people
    assert "exp_avg_sq" in people
    assert "Traceback" not in people


def test_keep_leaves_urls_that_work_until_ctrl_c(tmp_path: Path) -> None:
    arguments = ["--data", str(write_clicks(tmp_path)), "--epochs", "2", "--workers", "1", "--shards", "3", "--keep"]
    arguments += ["--mode", "sync"]
    folder = tmp_path / "rows"
    with running_demo(tmp_path, *arguments, "--data-dir", str(folder)) as demo:
        text = demo.wait_for_text("export SHARDAM_REDIS_URL=redis://")
        words = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith("  ")}
        assert len(text.splitlines()) < 40
        assert f"rows are kept in {folder}; a demo with this folder again trains on from there" in text
        assert folder.is_dir()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for name in ("page", "API"):
            with opener.open(words[name], timeout=30) as response:
                assert response.status == 200
        row = get_json(words["this"])
        assert row["id"] in {str(2**53 + 1 + site) for site in range(4)}
        assert row["found"] is True
        optimizer = row["optimizer"]
        assert isinstance(optimizer, dict)
        assert optimizer["step"] == 6  # 1,800 training samples are 3 batches of 512, in 2 epochs
        assert any(value != 0 for value in optimizer["exp_avg"])
        cluster = subprocess.run(
            [sys.executable, "-m", "shardam_server", "status", "--redis", words["connect"].partition("=")[2]],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert cluster.returncode == 0, cluster.stderr
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 0, demo.err.read_text()
        demo.assert_nothing_is_left()
        demo.assert_temp_is_empty()
        assert "Traceback" not in demo.out.read_text() + demo.err.read_text()


def test_a_bad_file_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("label,price\n1,2\n")
    run = subprocess.run(
        [sys.executable, "-m", "shardam_server", "demo", "--data", str(path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"shardam: {path}, line 1: unknown column 'price'; the file needs")
