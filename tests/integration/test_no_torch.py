"""Shards on the CPU, the admin API and the command line never load torch: 2 s and 200 MB that each process would pay."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from shardam_testing.processes import clean_environment

MAX_RESIDENT_BYTES = 200 * 2**20
"""What importing torch alone would cost."""


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Returns an environment in which importing torch leaves a file behind and fails, and that file's path."""
    trace = tmp_path / "torch-was-imported"
    (tmp_path / "torch.py").write_text(
        f"import traceback\nopen({str(trace)!r}, 'a').write(''.join(traceback.format_stack()))\nraise ImportError('torch')\n"
    )
    return clean_environment(PYTHONPATH=str(tmp_path)), trace


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_poisoned_module_is_what_a_process_would_import(poisoned: tuple[dict[str, str], Path]) -> None:
    environment, trace = poisoned
    assert run(environment, "-c", "import torch").returncode != 0
    assert trace.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        *((command, "--help") for command in ("up", "shard", "admin", "status", "demo", "checkpoint", "table")),
        ("checkpoint", "restore", "--help"),
        ("table", "import", "--help"),
    ],
)
def test_command_line_answers_without_torch(poisoned: tuple[dict[str, str], Path], arguments: tuple[str, ...]) -> None:
    environment, trace = poisoned
    result = run(environment, "-m", "shardam_server", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert not trace.exists(), trace.read_text()


@pytest.fixture
def cluster(poisoned: tuple[dict[str, str], Path]) -> Iterator[dict[str, object]]:
    """Starts `shardam up` with one shard in the poisoned environment and yields its banner."""
    command = ["up", "--json", "--exit-with-stdin", "--shards", "1", "--device", "cpu", "--port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "shardam_server", *command],
        env=poisoned[0],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "`up` ended before it was ready; its log is above"
        yield {**json.loads(line), "up_pid": process.pid}
        process.communicate("", timeout=60)  # closes stdin: drain and exit
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def create_and_use_a_table(admin_url: str) -> None:
    body = json.dumps({"name": "items", "dim": 8}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{admin_url}/v1/tables", body, headers), timeout=30) as answer:
        assert answer.status in (200, 201)
    for path, ids in (("/v1/tables/items/rows:batchGet", ["1", "2"]), ("/metrics", None), ("/docs", None), ("/", None)):
        data = None if ids is None else json.dumps({"ids": ids}).encode()
        with urllib.request.urlopen(urllib.request.Request(admin_url + path, data, headers), timeout=30) as answer:
            assert answer.status == 200


def push_a_row(redis_url: str) -> None:
    import shardam

    with shardam.connect(redis_url) as client:
        result = client.table("items").push([1], np.ones((1, 8), np.float32), shardam.AdamOptions(lr=0.1))
        assert result.step == 1


def test_running_shard_and_admin_api_hold_no_torch(poisoned: tuple[dict[str, str], Path], cluster: dict[str, object]) -> None:
    create_and_use_a_table(str(cluster["admin_url"]))
    push_a_row(str(cluster["redis_url"]))
    parent = psutil.Process(int(str(cluster["up_pid"])))
    family = [parent, *parent.children(recursive=True)]
    pythons = [process for process in family if "shardam_server" in process.cmdline()]
    assert len(pythons) == 3, [process.cmdline() for process in family]
    assert not poisoned[1].exists(), poisoned[1].read_text()
    for process in pythons:
        mapped = [entry.path for entry in process.memory_maps() if "libtorch" in entry.path]
        assert mapped == [], process.cmdline()
        assert process.memory_info().rss < MAX_RESIDENT_BYTES, process.cmdline()
