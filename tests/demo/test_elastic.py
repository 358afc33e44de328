"""Workers in sync under torchrun: one kills itself, torchrun starts all again, and they go on at the next step of the group."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardam_testing.processes import Shards, clean_environment, running_valkey
from shardam_testing.raw_client import raw_client

import shardam

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 300
"""A run takes 10 to 20 s."""

pytestmark = pytest.mark.timeout(2 * HANG_S)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    with running_valkey() as valkey:
        started = Shards(valkey, tmp_path, 2, cluster="default")  # the example's
        try:
            for index in range(2):
                started.start(index)
            started.wait_ready()
            yield started
        finally:
            started.stop()


def train(shards: Shards, workers: int, *arguments: str) -> str:
    """Runs the example under torchrun to its end and returns what it printed."""
    torchrun = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(workers), "--max-restarts", "3"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *torchrun, str(ROOT / "examples" / "sync_workers.py"), *arguments],
        env=clean_environment(
            SHARDAM_REDIS_URL=shards.valkey.url,
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def steps_by_shard(shards: Shards) -> list[int]:
    view = shards.view()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw_client(view, index)) for index in sorted(view.shards)]
        return [client.info("sync_items").table_step for client in clients]


def went_on_at(printed: str, restart: int) -> int:
    (step,) = re.findall(rf"restart {restart}: goes on at step (\d+)", printed)
    return int(step)


@pytest.mark.case("C053")
def test_after_a_kill_the_group_goes_on_at_the_next_step_and_with_other_workers_later(shards: Shards, tmp_path: Path) -> None:
    dense = ("--dense", str(tmp_path / "dense.pt"))
    printed = train(shards, 2, *dense, "--steps", "30", "--die-at", "12")
    assert went_on_at(printed, restart=1) in (11, 12)  # whether the last queued step was decided before the kill
    assert "2 workers in sync: 30 steps, one of the table each" in printed
    assert steps_by_shard(shards) == [30, 30], "no shard has the half step of the worker that was killed"
    printed = train(shards, 3, *dense, "--steps", "40")
    assert went_on_at(printed, restart=0) == 30
    assert "3 workers in sync: 40 steps, one of the table each" in printed
    assert steps_by_shard(shards) == [40, 40]
    with contextlib.closing(shardam.connect(shards.valkey.url, cluster=shards.cluster)) as outside:
        table = outside.table("sync_items")
        row_ids = table.rows(range(1000))
        assert int(row_ids.found.sum()) == table.stats().num_rows > 900
        table.push([1], [[0.0] * 16], shardam.AdamOptions())  # the group has left, so changes from outside are taken again
    assert steps_by_shard(shards) == [41, 41]
