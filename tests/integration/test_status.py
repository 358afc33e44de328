from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardam_testing.processes import Shards, clean_environment, running_shards, running_valkey
from shardam_testing.waiting import wait_for

from shardam_proto.registry import Keys, ShardEntry

TOKEN = "t0ken-of-the-test"


def status(shards: Shards, *flags: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"SHARDAM_REDIS_URL": shards.valkey.url}
    if token is not None:
        environment["SHARDAM_TOKEN"] = token
    return subprocess.run(
        [sys.executable, "-m", "shardam_server", "status", "--cluster", shards.cluster, "--shard-timeout-s", "5", *flags],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Shards]:
    with running_shards(tmp_path, 2, token=TOKEN, seed="5", lease_s="60") as shards:
        yield shards


def test_a_ready_cluster_is_one_table_and_exit_status_0(cluster: Shards) -> None:
    done = status(cluster, token=TOKEN)
    assert (done.returncode, done.stderr) == (0, "")
    view = cluster.view()
    assert view.entry is not None
    assert f"id {view.entry.cluster_id}   seed 5   epoch 1   tables 0" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [row[:4] for row in rows] == [[str(index), "serving", shard.address, "cpu"] for index, shard in view.shards.items()]
    assert [int(row[-3]) for row in rows] == [shard.pid for shard in view.shards.values()]
    assert done.stdout.endswith("all shards are ready\n")


def test_json_is_one_object_with_what_each_shard_says(cluster: Shards) -> None:
    done = status(cluster, "--json", token=TOKEN)
    assert done.returncode == 0
    value = json.loads(done.stdout)
    assert (value["ready"], value["problems"], value["seed"], value["epoch"]) == (True, [], "5", 1)
    assert [(shard["index"], shard["state"], shard["num_rows"]) for shard in value["shards"]] == [
        (0, "serving", 0),
        (1, "serving", 0),
    ]
    assert all(shard["resident_bytes"] > 0 for shard in value["shards"])


def test_a_stopped_shard_is_missing_and_exit_status_1(cluster: Shards) -> None:
    assert cluster.processes[1].terminate() == 0
    done = status(cluster, token=TOKEN)
    assert (done.returncode, done.stderr) == (1, "")
    assert "missing: shard 1 is not registered: it is not running, or cannot reach this Redis" in done.stdout
    assert [shard["state"] for shard in json.loads(status(cluster, "--json", token=TOKEN).stdout)["shards"]] == [
        "serving",
        "missing",
    ]


def test_a_killed_shard_whose_lease_still_runs_does_not_answer(cluster: Shards) -> None:
    cluster.processes[1].kill()
    done = status(cluster, token=TOKEN)
    assert done.returncode == 1
    assert "missing: shard 1 is registered but does not answer: shard 1 at 127.0.0.1:" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_hanging_shard_is_given_up_after_the_time_allowed(cluster: Shards) -> None:
    os.kill(cluster.processes[1].process.pid, signal.SIGSTOP)
    done = status(cluster, "--shard-timeout-s", "0.5", token=TOKEN)
    assert done.returncode == 1
    assert "DEADLINE_EXCEEDED" in done.stdout


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_refused_token_is_said_once_and_no_shard_is_called_unreachable(cluster: Shards, token: str | None) -> None:
    done = status(cluster, token=token)
    assert done.returncode == 1
    assert done.stdout.count("this cluster needs a token") == 1
    assert "missing: shards 0, 1 refused to answer: this cluster needs a token: set SHARDAM_TOKEN" in done.stdout
    assert "does not answer" not in done.stdout
    value = json.loads(status(cluster, "--json", token=token).stdout)
    assert [shard["state"] for shard in value["shards"]] == ["refused", "refused"]


def test_a_shard_that_redis_knows_from_before_its_restart_is_restarting(cluster: Shards) -> None:
    with running_valkey() as valkey:
        view, keys = cluster.view(), Keys(cluster.cluster)
        assert view.entry is not None
        connection = valkey.client()
        connection.set(keys.cluster_entry, view.entry.to_json())
        connection.set(keys.shard(0), dataclasses.replace(view.shards[0], incarnation=7).to_json())
        connection.set(keys.shard(1), view.shards[1].to_json())
        connection.close()
        done = status(Shards(valkey, cluster.folder, 2, cluster=cluster.cluster), token=TOKEN)
    assert done.returncode == 1
    assert "missing: shard 0 is restarting; try again\n" in done.stdout
    assert "does not answer" not in done.stdout


def test_a_redis_that_refuses_the_password_is_not_called_silent(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        connection = valkey.client()
        connection.config_set("requirepass", "right")
        urls = (valkey.url, valkey.url.replace("redis://", "redis://:wrong@"))
        said = [status(Shards(valkey, tmp_path, 1), "--redis", url).stderr for url in urls]
        connection.close()
    for text in said:
        assert "refused the credentials" in text
        assert "does not answer" not in text
        assert "wrong@" not in text


def test_a_shard_that_waits_for_another_says_so(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 2)
        try:
            shards.start(0)
            wait_for("shard 0 to register", lambda: 0 in shards.view().shards)
            done = wait_for("shard 0 to say what it waits for", lambda: waiting(shards))
        finally:
            shards.stop()
    assert done.returncode == 1
    assert "missing: shard 0 is starting and waits for shards [1] to register" in done.stdout
    assert "missing: shard 1 is not registered" in done.stdout
    assert "missing: there is no route map yet" in done.stdout


def waiting(shards: Shards) -> subprocess.CompletedProcess[str] | None:
    done = status(shards)
    return done if "waits for shards" in done.stdout else None


def test_a_cluster_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 1, cluster="nobody")
        done = status(shards)
        assert done.returncode == 1
        assert "cluster 'nobody' does not exist in this Redis" in done.stdout
        value = json.loads(status(shards, "--json").stdout)
    assert (value["cluster_id"], value["ready"], value["shards"]) == (None, False, [])


def test_a_registration_that_leads_to_another_cluster_is_said(cluster: Shards) -> None:
    with running_valkey() as valkey:
        connection = valkey.client()
        keys = Keys(cluster.cluster)
        connection.set(keys.cluster_entry, json.dumps({"cluster_id": "other", "num_shards": 1, "seed": 0}))
        entry: ShardEntry = cluster.view().shards[0]
        connection.set(keys.shard(0), entry.to_json())
        connection.close()
        done = status(Shards(valkey, cluster.folder, 1, cluster=cluster.cluster), token=TOKEN)
    assert done.returncode == 1
    assert f"shard 0 is registered at {entry.address}, where another process answers" in done.stdout
