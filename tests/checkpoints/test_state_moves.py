"""A cluster that moves to another number of shards while `up` runs it: real processes, a real Redis."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from shardam_testing.processes import clean_environment
from shardam_testing.up_process import READY_S, Ready, Up, ready_of, up
from shardam_testing.waiting import wait_for

import shardam
from shardam import AdamOptions, TableSpec
from shardam_proto.routing import RouteMap

HOLD = ("--hold-s", "20")
"""A busy machine brings shards level within it."""

IDS = np.arange(500)


def reshard(ready: Ready, shards: int, *flags: str, wait_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardam_server", "reshard", "--shards", str(shards), "--redis", ready.redis_url]
    return subprocess.run(
        [*command, "--wait-s", str(wait_s), *flags],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def moved(ready: Ready, shards: int) -> str:
    done = reshard(ready, shards)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state(ready: Ready) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the bits of all rows and moments, by table and part."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    with shardam.connect(ready.redis_url) as cluster:
        for name in ("a", "b"):
            table = cluster.table(name)
            rows = table.rows(IDS)
            assert rows.found.all()
            found |= {f"{name} weight": rows.weight, f"{name} exp_avg": rows.exp_avg, f"{name} exp_avg_sq": rows.exp_avg_sq}
            found[f"{name} step"] = np.array([table.stats().table_step], np.float32)
    return found


def train(ready: Ready, seed: int) -> None:
    random = np.random.default_rng(seed)
    with shardam.connect(ready.redis_url) as cluster:
        for name in ("a", "b"):
            table = cluster.create_table(TableSpec(name, 4))
            for _ in range(3):
                table.push(IDS, random.normal(size=(IDS.size, 4)).astype(np.float32), AdamOptions(lr=0.1))


def folders(running: Path) -> list[str]:
    return sorted(path.name for path in (running / "default").glob("shard-*"))


@contextlib.contextmanager
def cluster_of(tmp_path: Path, *flags: str) -> Iterator[tuple[Up, Ready]]:
    with up(tmp_path, "--json", "--data-dir", str(tmp_path / "data"), *HOLD, *flags) as running:
        yield running, ready_of(running)


def test_the_same_bits_are_on_2_then_4_then_1_shards_and_up_follows(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as (running, ready):
        train(ready, 1)
        before = state(ready)
        redis_url, epochs = ready.redis_url, []
        for count in (4, 1):
            said = moved(ready, count)
            assert f"cluster 'default' serves on {count} shards" in said
            view = ready.view()
            assert view.entry is not None
            assert view.route_map is not None
            assert view.entry.num_shards == count
            epochs.append(view.route_map)
            assert sorted(view.shards) == list(range(count))
            np.testing.assert_equal(state(ready), before)
        assert epochs == [RouteMap(2, 4), RouteMap(3, 1)]
        assert ready.redis_url == redis_url
        wait_for("folders of former shards to go", lambda: folders(tmp_path / "data") == ["shard-0"], READY_S)
        train(ready, 2)
        after = state(ready)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
    with cluster_of(tmp_path, "--shards", "1") as (_, ready):
        np.testing.assert_equal(state(ready), after)


def test_up_with_the_former_number_is_refused_with_the_present_one(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as (running, ready):
        train(ready, 1)
        moved(ready, 3)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
    with up(tmp_path, "--json", "--data-dir", str(tmp_path / "data"), "--shards", "2") as running:
        assert running.wait() == 2
        assert "was created with 3 shards, this shard was started with --shards 2; use --shards 3" in running.log.read_text()


def test_what_cannot_be_moved_is_said_and_nothing_changes(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as (_, ready):
        train(ready, 1)
        incarnations = {shard.incarnation for shard in ready.view().shards.values()}
        same = reshard(ready, 2)
        assert (same.returncode, same.stderr) == (0, "")
        assert "has 2 shards already" in same.stdout
        for count in (0, 4097):
            refused = reshard(ready, count)
            assert refused.returncode == 2
            assert "--shards" in refused.stderr
        assert {shard.incarnation for shard in ready.view().shards.values()} == incarnations


def test_without_a_folder_for_checkpoints_the_move_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--data-dir", "none", *HOLD) as running:
        ready = ready_of(running)
        refused = reshard(ready, 3)
        assert refused.returncode == 1
        assert "--checkpoint-dir" in refused.stderr
        entry = ready.view().entry
        assert entry is not None
        assert entry.num_shards == 2


def test_rows_in_memory_only_move_through_the_checkpoint_folder(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--data-dir", "none", "--checkpoint-dir", str(tmp_path / "checkpoints"), *HOLD) as running:
        ready = ready_of(running)
        train(ready, 1)
        before = state(ready)
        moved(ready, 3)
        np.testing.assert_equal(state(ready), before)
