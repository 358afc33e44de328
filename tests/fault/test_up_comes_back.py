"""What a user of `shardam up` and LocalCluster finds again after a kill, a stop and a start, with a data folder and without."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.processes import clean_environment
from shardam_testing.up_process import READY_S, Ready, Up, ready_of, up
from shardam_testing.waiting import wait_for

import shardam
from shardam import AdamOptions, Cluster, LocalCluster, Rows, TableSpec
from shardam.errors import ShardLost

SPEC = TableSpec("items", 8)
ROW_IDS = np.concatenate([np.arange(64), 2**40 + np.arange(64)])
"""Rows of every shard, whatever their number."""


def train(cluster: Cluster, steps: int) -> None:
    """Pushes seeded gradients, each step's with another learning rate; the last one is acknowledged when it returns."""
    table = cluster.create_table(SPEC)
    for _ in range(steps):
        random = np.random.default_rng(table.stats().table_step)
        row_ids = random.choice(ROW_IDS, 32)
        gradients = random.standard_normal((32, SPEC.dim), np.float32)
        table.push(row_ids, gradients, AdamOptions(lr=float(random.uniform(1e-3, 1e-1)), weight_decay=0.01))


def bits(rows: Rows) -> dict[str, bytes]:
    """Returns every bit of the rows' state."""
    return {
        name: np.ascontiguousarray(values).tobytes() for name, values in vars(rows).items() if isinstance(values, np.ndarray)
    }


def state(cluster: Cluster) -> tuple[int, dict[str, bytes]]:
    """Returns the table's step and every bit of its rows."""
    table = cluster.table(SPEC.name)
    return table.stats().table_step, bits(table.rows(ROW_IDS))


def started_again(running: Up, name: str, times: int = 1) -> bool:
    """Returns whether a child of `up` was ready so many times after its first start."""
    return len(re.findall(rf"{name} is ready \(pid", running.log.read_text())) > times


def stop(running: Up) -> None:
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0, running.log.read_text()


def kill_everything(running: Up) -> None:
    """Ends all processes at once, as the loss of the machine would."""
    for pid in running.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for("every process to end", lambda: not running.processes(), READY_S)


def forget_shard(redis_url: str, index: int) -> None:
    """Gives the rows of a LOST shard up, as its user would."""
    done = subprocess.run(
        [sys.executable, "-m", "shardam_server", "forget-shard", "--index", str(index)],
        env=clean_environment(SHARDAM_REDIS_URL=redis_url),
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def shard_folder(data_dir: Path, index: int) -> Path:
    """Returns where a shard keeps its state."""
    return data_dir / "default" / f"shard-{index}"


def subfolder(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def connect(ready: Ready) -> Cluster:
    return shardam.connect(ready.redis_url, cluster=ready.cluster, shard_timeout_s=READY_S)


def test_a_killed_shard_comes_back_with_every_bit_and_its_clients_train_on(tmp_path: Path) -> None:
    with up(tmp_path, "--json") as running:
        ready = ready_of(running)
        with connect(ready) as cluster:
            train(cluster, 5)
            for index in (1, 0):
                before = state(cluster)
                os.kill(ready.shard_pid(index), signal.SIGKILL)
                wait_for("the shard to be back", functools.partial(started_again, running, f"shard {index}"), READY_S)
                assert state(cluster) == before
                train(cluster, 3)
            assert state(cluster)[0] == 5 + 3 + 3
        log = running.log.read_text()
        for index in (0, 1):
            assert f"shard {index} was killed by SIGKILL; it restarts from its data folder in" in log
        assert "LOST" not in log
        stop(running)


def test_the_next_up_finds_the_rows_after_a_stop_and_after_all_processes_were_killed(tmp_path: Path) -> None:
    flags = ("--json", "--data-dir", str(tmp_path / "rows"))
    with up(subfolder(tmp_path, "first"), *flags) as running, connect(ready_of(running)) as cluster:
        train(cluster, 5)
        stopped = state(cluster)
        cluster.close()
        stop(running)
    with up(subfolder(tmp_path, "second"), *flags) as running, connect(ready_of(running)) as cluster:
        assert state(cluster) == stopped
        train(cluster, 5)
        killed = state(cluster)
        cluster.close()
        kill_everything(running)
    with up(subfolder(tmp_path, "third"), *flags) as running, connect(ready_of(running)) as cluster:
        assert killed != stopped
        assert state(cluster) == killed
        cluster.close()
        stop(running)


def test_without_a_folder_a_killed_shard_is_lost_and_serves_nothing_until_its_rows_are_given_up(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--data-dir", "none", "--shards", "1") as running:
        ready = ready_of(running)
        with connect(ready) as cluster:
            train(cluster, 3)
            os.kill(ready.shard_pid(0), signal.SIGKILL)
            wait_for("up to say that it is LOST", lambda: "until then it is not ready" in running.log.read_text(), READY_S)
            with pytest.raises(ShardLost, match="forget-shard"):
                cluster.table(SPEC.name).pull(ROW_IDS)
        log = running.log.read_text()
        assert "in memory only and are lost: it will be LOST, and serve nothing, until `shardam forget-shard --index 0`" in log
        said = [line for line in log.splitlines() if "is LOST: " in line and not line.startswith("[shard 0]")]
        assert len(said) == 1
        assert "forget-shard --index 0" in said[0]
        assert not started_again(running, "shard 0")
        forget_shard(ready.redis_url, 0)
        wait_for("the shard to serve again", lambda: started_again(running, "shard 0"), READY_S)
        with connect(ready) as cluster:
            assert not cluster.table(SPEC.name).rows(ROW_IDS).found.any()
        stop(running)


def test_up_waits_for_a_shard_whose_folder_is_gone_and_prints_what_its_user_needs(tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path / "rows"))
    with up(subfolder(tmp_path, "first"), "--json", *flags) as running, connect(ready_of(running)) as cluster:
        train(cluster, 3)
        cluster.close()
        stop(running)
    shutil.rmtree(shard_folder(tmp_path / "rows", 1))
    with up(subfolder(tmp_path, "program"), "--json", *flags) as running:
        assert running.wait() == 1  # a program that waits for the line cannot know the URL that the remedy needs
        assert re.search(r"(?m)^shardam: shard 1 is LOST: .*forget-shard --index 1", running.log.read_text())
    with up(subfolder(tmp_path, "person"), *flags) as running:
        assert running.banner().startswith("Shard 1 is LOST, and the cluster waits for it")
        assert running.process.stdout is not None
        url = running.process.stdout.readline().rpartition("export SHARDAM_REDIS_URL=")[2].strip()
        assert url.startswith("redis://:")
        assert "shardam forget-shard --index 1" in running.process.stdout.readline()
        assert url.partition("@")[0].rpartition(":")[2] not in running.log.read_text()
        forget_shard(url, 1)
        assert running.banner() == "shardam: cluster 'default' is ready\n"
        stop(running)


def test_the_folder_of_a_cluster_of_another_shape_is_refused_at_once_with_the_shards_reason(tmp_path: Path) -> None:
    kept = ("--json", "--shards", "1", "--data-dir", str(tmp_path / "rows"))
    with up(subfolder(tmp_path, "first"), *kept) as running, connect(ready_of(running)) as cluster:
        train(cluster, 2)
        before = state(cluster)
        cluster.close()
        stop(running)
    for flags, reason in ((("--shards", "2"), "was created with 1 shards"), (("--seed", "9"), "was created with seed 0")):
        with up(subfolder(tmp_path, flags[0]), *kept, *flags) as running:
            assert running.wait() == 2
            log = running.log.read_text()
            assert re.fullmatch(rf"shardam: shard \d cannot start: .*{reason}.*", log.splitlines()[-1])
            assert "starting it again" not in log
            assert "Traceback" not in log
    with up(subfolder(tmp_path, "again"), *kept) as running, connect(ready_of(running)) as cluster:
        assert state(cluster) == before


def test_a_second_up_with_the_folder_of_a_running_one_is_refused_with_its_holder_and_the_first_serves_on(
    tmp_path: Path,
) -> None:
    flags = ("--json", "--shards", "1", "--data-dir", str(tmp_path / "rows"))
    with up(subfolder(tmp_path, "first"), *flags) as running:
        ready = ready_of(running)
        with connect(ready) as cluster:
            train(cluster, 2)
            with up(subfolder(tmp_path, "second"), *flags) as second:
                assert second.wait() == 1
                assert f"runs on {tmp_path / 'rows'} already: shard-0 is process {ready.shard_pid(0)}" in second.log.read_text()
                assert "Traceback" not in second.log.read_text()
            train(cluster, 1)
            assert state(cluster)[0] == 3
        stop(running)


def test_without_a_journal_a_stop_keeps_the_rows(tmp_path: Path) -> None:
    flags = ("--json", "--shards", "1", "--journal", "off", "--data-dir", str(tmp_path / "rows"))
    with up(subfolder(tmp_path, "first"), *flags) as running, connect(ready_of(running)) as cluster:
        train(cluster, 3)
        before = state(cluster)
        cluster.close()
        stop(running)
    with up(subfolder(tmp_path, "second"), *flags) as running, connect(ready_of(running)) as cluster:
        assert state(cluster) == before
        cluster.close()
        stop(running)


def test_a_local_cluster_with_a_folder_survives_a_kill_and_a_later_one_finds_its_rows(tmp_path: Path) -> None:
    with LocalCluster(2, seed=3, data_dir=tmp_path / "rows") as cluster:
        train(cluster, 4)
        before = state(cluster)
        os.kill(cluster.shards[1].pid, signal.SIGKILL)
        assert state(cluster) == before  # waits until the shard is back
        train(cluster, 4)
        closed = state(cluster)
    with LocalCluster(2, seed=3, data_dir=tmp_path / "rows") as cluster:
        assert state(cluster) == closed
        train(cluster, 1)
        assert state(cluster)[0] == 9
