"""Benchmarks in their small form: they run, and print the keys that readers of their output count on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from shardam_testing.processes import clean_environment

SERVICE = ("pull-tcp", "push-tcp", "pull-rpc", "push-rpc", "pull-redis", "push-redis", "pull-grpc", "push-grpc", "small")
TRAIN = ("train-16-1", "exact-16")
"""Local training in two threads would wait for cores that other tests have."""

SCALE = ("rows-pull", "uniform-push", "memory", "tables-pull", "tables-push", "workers", "shards")

ROOT = Path(__file__).resolve().parents[2]

WAITS = f"""
import sys
import threading
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from frame import Benchmark, Pair, main
wait = lambda: threading.Event().wait(0.001)
sys.exit(main([Benchmark("waits", "1/s", "waiting", 0.0, lambda smoke: Pair(1, wait, wait))], sys.argv[1:]))
"""
"""A benchmark of no time."""

KEYS = {"name", "value", "unit", "peer", "peer_value", "ratio", "goal", "spread"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def figures(lines: Sequence[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "arguments", "names"),
    [
        ("kernels.py", (), {"update-1", "update-2", "plain", "noted", "gather-1", "gather-2", "merge"}),
        ("checkpoint.py", (), {"push-p99", "write", "restore", "journal"}),
        ("gpu_shard.py", ("--device", "interpret"), {"gpu-shard-push", "gpu-shard-pull"}),
        ("service.py", SERVICE, set(SERVICE)),
        ("train.py", TRAIN, set(TRAIN)),
    ],
)
def test_a_smoke_run_prints_one_json_object_a_figure(script: str, arguments: tuple[str, ...], names: set[str]) -> None:
    result = run(script, *arguments, "--smoke", "--json")
    assert result.returncode == 0, result.stderr
    printed = figures(result.stdout.splitlines())
    assert {figure["name"] for figure in printed} == names
    assert all(set(figure) == KEYS for figure in printed)
    assert all(isinstance(figure["ratio"], float) and figure["ratio"] > 0 for figure in printed)


@pytest.mark.timeout(600)
def test_what_growth_costs_is_said_for_every_point_with_its_exponent() -> None:
    result = run("scale.py", "--smoke", "--json", *SCALE)
    assert result.returncode == 0, result.stderr
    printed = {figure.pop("name"): figure for figure in figures(result.stdout.splitlines())}
    assert set(printed) == set(SCALE)
    assert all(set(figure) == KEYS - {"name"} | {"details"} for figure in printed.values())
    details = {name: figure["details"] for name, figure in printed.items()}
    for name in set(SCALE) - {"memory"}:
        found = details[name]
        assert isinstance(found, dict)
        assert {"exponent", "ns_per_row"} <= set(found)
        assert len(found["ns_per_row"]) == 2
    memory = details["memory"]
    assert isinstance(memory, dict)
    assert memory["rows"] == 2_000


@pytest.mark.timeout(600)
def test_several_runs_print_the_median_one_of_each_figure(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    result = run(str(tmp_path / "waits.py"), "--smoke", "--json", "--runs", "3", "--check")
    assert result.returncode == 0, result.stderr
    (figure,) = figures(result.stdout.splitlines())
    assert set(figure) == KEYS
    assert result.stderr.count("varied by") == 3  # each run has said how quiet it was
    assert "medians of 3 runs" in result.stderr


@pytest.mark.timeout(600)
def test_what_sync_costs_is_said_in_time_and_in_messages() -> None:
    result = run("sync.py", "--smoke", "--json", "--shards", "2")
    assert result.returncode == 0, result.stderr
    (cost,) = figures(result.stdout.splitlines())
    assert (cost["name"], cost["shards"], cost["workers"]) == ("sync-step-2", 2, 2)
    for key in ("sync_ms", "async_ms", "time_ratio"):
        time = cost[key]
        assert isinstance(time, float)
        assert time > 0
    messages = cost["messages"]
    assert isinstance(messages, dict)
    # Each of 2 workers asks each of 2 shards, and every request has an answer.
    assert messages["async"] == {"pull": 8.0, "push": 8.0, "arrive": 0.0, "shards": 0.0, "total": 16.0}
    sync = messages["sync"]
    assert (sync["pull"], sync["push"]) == (8.0, 8.0)
    assert sync["arrive"] >= 4.0  # one of each worker, to home; again if the step takes long
    assert sync["shards"] >= 2.0  # home's decision, and that it was carried out


@pytest.mark.timeout(600)
def test_the_gpu_benchmark_rehearses_in_the_interpreter_and_finds_the_reference_s_bits() -> None:
    result = run("gpu.py", "--rehearse")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the device leaves the reference's bits" in result.stdout
    printed = figures([line.partition("#")[0] for line in result.stdout.splitlines() if line.startswith("{")])
    assert all(set(figure) == KEYS for figure in printed)
    assert {"copy"} < {figure["name"] for figure in printed}
