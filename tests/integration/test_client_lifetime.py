"""Beginning, failures and end of a client: what is missing at connect, shards that stop or die, exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.process_table import is_running
from shardam_testing.processes import Shards, clean_environment, free_port, running_shards, running_valkey
from shardam_testing.waiting import wait_for

import shardam
from shardam import AdamOptions, LocalCluster, TableSpec
from shardam.errors import (
    BadOption,
    BadToken,
    ClientClosed,
    RedisUnreachable,
    ShardLost,
    ShardNotReady,
    ShardUnreachable,
)

LR = AdamOptions(lr=0.1)
ONE = np.ones((1, 2), np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def run_program(program: str, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=clean_environment())
    assert done.returncode == expect, done.stderr
    return done


# -- connect


def test_without_a_url_both_ways_to_give_one_are_named(monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster) -> None:
    with pytest.raises(BadOption, match=r"pass url= to shardam\.connect or set SHARDAM_REDIS_URL"):
        shardam.connect()
    monkeypatch.setenv("SHARDAM_REDIS_URL", cluster.redis_url)
    with shardam.connect() as client:
        assert client.num_shards == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode must be 'async', 'sync' or 'bounded:N'"),
        ({"shard_timeout_s": 0}, "shard_timeout_s must be"),
        ({"shard_timeout_s": float("nan")}, "shard_timeout_s must be"),
        ({"cluster": "a/b"}, "cluster name 'a/b' is not allowed"),
    ],
)
def test_bad_arguments_of_connect_are_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        shardam.connect("redis://127.0.0.1:1/0", **arguments)  # type: ignore[arg-type]  # what a caller may pass by mistake


def test_what_is_no_redis_url_and_where_no_redis_answers_are_named_without_the_password() -> None:
    with pytest.raises(RedisUnreachable, match="is no Redis URL"):
        shardam.connect("http://127.0.0.1:1/0")
    port = free_port()
    with pytest.raises(RedisUnreachable) as caught:
        shardam.connect(f"redis://:secret@127.0.0.1:{port}/0", shard_timeout_s=0.5)
    assert f"127.0.0.1:{port}" in caught.value.message
    assert "within 0.5 s" in caught.value.message
    assert "secret" not in caught.value.message


def test_connect_says_what_was_missing(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        with pytest.raises(
            ShardNotReady, match=r"cluster 'prod'.*Redis knows no cluster of this name.*shardam up --cluster prod"
        ):
            shardam.connect(valkey.url, cluster="prod", shard_timeout_s=0.3)
        shards = Shards(valkey, tmp_path, 2)
        try:
            shards.start(0)
            wait_for("shard 0 to register", lambda: 0 in shards.view().shards)
            with pytest.raises(ShardNotReady, match="of 2 shards these are not registered: 1"):
                shardam.connect(valkey.url, cluster="test", shard_timeout_s=0.3)
        finally:
            shards.stop()


def test_connect_waits_for_shards_that_start_later(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 2)
        clients: list[shardam.Cluster] = []
        waiting = threading.Thread(target=lambda: clients.append(shardam.connect(valkey.url, cluster="test")))
        try:
            waiting.start()
            shards.start(1)
            shards.start(0)
            waiting.join(60)
            assert [client.num_shards for client in clients] == [2]
        finally:
            for client in clients:
                client.close()
            shards.stop()


def test_a_token_is_needed_where_shards_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_shards(tmp_path, token="let-me-in") as shards:
        url = shards.valkey.url
        for wrong in (None, "no"):
            with pytest.raises(BadToken):
                shardam.connect(url, cluster="test", token=wrong, shard_timeout_s=5)
        with shardam.connect(url, cluster="test", token="let-me-in") as client:
            assert client.create_table(TableSpec("t", 2)).push([1], ONE, LR).step == 1
        monkeypatch.setenv("SHARDAM_TOKEN", "let-me-in")
        with shardam.connect(url, cluster="test") as client:
            assert client.table("t").pull([1]).shape == (1, 2)


# -- shards that stop and die


def test_calls_outlast_a_shard_that_is_stopped_for_a_while(cluster: LocalCluster) -> None:
    with shardam.connect(cluster.redis_url, shard_timeout_s=10) as client:
        table = client.create_table(TableSpec("stopped", 2))
        row_ids = np.arange(50)
        rows = np.ones((50, 2), np.float32)
        table.push(row_ids, rows, LR)
        pid = cluster.shards[1].pid
        os.kill(pid, signal.SIGSTOP)
        resumed = threading.Timer(3.5, os.kill, (pid, signal.SIGCONT))  # beyond one try's 2.5 s
        resumed.start()
        try:
            started = time.monotonic()
            assert table.push(row_ids, rows, LR).step == 2
            assert time.monotonic() - started > 2.5
        finally:
            resumed.cancel()
            os.kill(pid, signal.SIGCONT)
        read = table.rows(row_ids)
        assert (read.step == 2).all()
        np.testing.assert_allclose(read.exp_avg, 0.19, rtol=1e-6)


def test_a_stopped_shard_is_unreachable_after_the_time_out_and_its_push_is_applied_once_when_it_is_back(
    cluster: LocalCluster,
) -> None:
    with shardam.connect(cluster.redis_url, shard_timeout_s=1.0) as client:
        table = client.create_table(TableSpec("unreachable", 2))
        row_ids, rows = np.arange(50), np.ones((50, 2), np.float32)
        shard = cluster.shards[0]
        os.kill(shard.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ShardUnreachable) as caught:
                table.push(row_ids, rows, LR)
            with pytest.raises(ShardUnreachable):
                table.pull(row_ids)
        finally:
            os.kill(shard.pid, signal.SIGCONT)
        assert shard.address in caught.value.message
        assert "--advertise HOST:PORT" in caught.value.message

        def back() -> bool:
            try:
                return bool((table.rows(row_ids).step == 1).all())
            except ShardUnreachable:
                return False

        wait_for("the shard to answer again", back)
        np.testing.assert_allclose(table.rows(row_ids).exp_avg, 0.1, rtol=1e-6)
        assert table.push(row_ids, rows, LR).step == 2


def test_after_a_shard_lost_its_rows_the_client_neither_pulls_nor_pushes_and_no_new_one_connects() -> None:
    with LocalCluster(shards=2) as local:
        table = local.create_table(TableSpec("lost", 2))
        row_ids, rows = np.arange(50), np.ones((50, 2), np.float32)
        for _ in range(3):
            table.push(row_ids, rows, LR)
        other = shardam.connect(local.redis_url)
        os.kill(local.shards[1].pid, signal.SIGKILL)
        with pytest.raises(ShardLost) as caught:
            table.push(row_ids, rows, LR)
        assert (caught.value.acknowledged, caught.value.has) == (3, 0)
        assert "shard 1" in caught.value.message
        assert "shardam forget-shard --index 1" in caught.value.message
        only_on_shard_0 = row_ids[local._session.route_map.shards_of(row_ids) == 0]
        for call in (
            lambda: table.pull(only_on_shard_0),
            lambda: table.push(row_ids, rows, LR),
            lambda: table.rows(only_on_shard_0),
            lambda: table.assign([1], ONE),
            lambda: table.delete([1]),
            lambda: list(table.scan()),
            lambda: table.stats(),
            lambda: local.create_table(TableSpec("new", 2)),
            lambda: local.tables(),
        ):
            with pytest.raises(ShardLost):
                call()
        with pytest.raises(ShardLost):  # one that had pushed nothing has seen the rows, too
            other.table("lost").pull(row_ids)
        other.close()
        with pytest.raises(ShardLost, match="shardam forget-shard --index 1"):
            shardam.connect(local.redis_url)


# -- end


def test_a_closed_cluster_says_so_and_closing_twice_is_fine(cluster: LocalCluster) -> None:
    client = shardam.connect(cluster.redis_url)
    table = client.create_table(TableSpec("closed", 2))
    client.close()
    client.close()
    for call in (lambda: table.pull([1]), lambda: table.push([1], ONE, LR), lambda: client.tables(), lambda: table.stats()):
        with pytest.raises(ClientClosed, match="connect again"):
            call()


def test_queued_pushes_are_sent_at_exit_without_close(cluster: LocalCluster) -> None:
    program = """
import sys, numpy as np, shardam
from shardam._push_checks import merged_gradient
client = shardam.connect(sys.argv[1])
table = client.create_table(shardam.TableSpec("at_exit", 8, init=shardam.init.Constant(0.0)))
rows = np.ones((1000, 8), np.float32)
client._queue_push([merged_gradient(table.info(), np.arange(1000), rows, shardam.AdamOptions(lr=0.1), 1.0)])
"""
    run_program(program, cluster.redis_url)
    rows = cluster.table("at_exit").rows(np.arange(1000))
    assert (rows.step == 1).all()
    np.testing.assert_allclose(rows.weight, -0.1, rtol=1e-5)


def test_queued_pushes_are_sent_by_close_and_its_errors_raised(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("at_close", 2, max_rows_per_shard=1))
    client = shardam.connect(cluster.redis_url)
    from shardam._push_checks import merged_gradient

    def queue(row_ids: list[int]) -> None:
        ids = np.array(row_ids)
        rows = np.ones((ids.size, 2), np.float32)
        client._queue_push([merged_gradient(table.info(), ids, rows, LR, 1.0)])

    queue([1])
    client.close()
    assert table.stats().table_step == 1
    client = shardam.connect(cluster.redis_url)
    queue(list(range(100)))
    with pytest.raises(shardam.errors.RowLimit):
        client.close()
    with pytest.raises(ClientClosed):
        client.tables()


# -- LocalCluster


def test_a_killed_program_leaves_no_process_behind() -> None:
    program = """
import os, signal, shardam
local = shardam.LocalCluster(shards=2)
print(*[shard.pid for shard in local.shards], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_program(program, expect=-signal.SIGKILL)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_for("the shards to end", lambda: not any(map(is_running, pids)), timeout_s=60)


def test_a_local_cluster_that_was_not_closed_ends_with_its_program() -> None:
    program = "import shardam; local = shardam.LocalCluster(shards=1); print(local.shards[0].pid)"
    pid = int(run_program(program).stdout)
    assert not is_running(pid)


def test_a_local_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(ShardNotReady, match=r"(?s)the local cluster ended with exit status .*its last lines:.*cuda:9"):
        LocalCluster(shards=1, device="cuda:9")
    for shards in (0, -1, 1.5, True):
        with pytest.raises(BadOption, match="shards must be an integer >= 1"):
            LocalCluster(shards=shards)  # type: ignore[arg-type]  # what a caller may pass by mistake


def test_a_local_cluster_has_its_own_seed_not_the_environments_and_ends_with_its_context(
    monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster
) -> None:
    spec = TableSpec("seeded", 8)
    expected = cluster.create_table(spec).pull([1, 2, 3])  # seed 0
    monkeypatch.setenv("SHARDAM_SEED", "0")
    monkeypatch.setenv("SHARDAM_TOKEN", "another-clusters")
    monkeypatch.setenv("SHARDAM_CLUSTER", "another")
    with LocalCluster(shards=1, seed=1) as local:
        pids = [shard.pid for shard in local.shards]
        assert all(map(is_running, pids))
        assert local.admin_url.startswith("http://127.0.0.1:")
        assert (local.create_table(spec).pull([1, 2, 3]) != expected).all()
    assert not any(map(is_running, pids))
