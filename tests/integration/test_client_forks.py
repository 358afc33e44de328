"""A client in a process that forks: the parent goes on, every push is applied once, and a child is a client of its own."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from shardam_testing.forking import HANG_S, Busy, forked, in_child
from shardam_testing.process_table import is_running
from shardam_testing.processes import Shards, clean_environment, running_shards
from shardam_testing.pulled_rows import pull_and_push, queue_push

import shardam
from shardam import AdamOptions, Cluster, Embedding, SparseAdam, Table, TableSpec
from shardam._backoff import Deadline
from shardam._forks import FORKS
from shardam._gradient import _GRADIENTS
from shardam.cluster import _OPEN
from shardam.errors import ClientClosed, ShardUnreachable

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12 and later

LR = AdamOptions(lr=0.1)
ONE = np.ones((1, 2), np.float32)
ZERO = shardam.init.Constant(0.0)
_names = (f"forks_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    with running_shards(tmp_path_factory.mktemp("shards"), 2) as running:
        yield running


@pytest.fixture
def client(shards: Shards) -> Iterator[Cluster]:
    with shardam.connect(shards.valkey.url, cluster="test", shard_timeout_s=HANG_S) as connected:
        yield connected


@pytest.fixture
def table(client: Cluster) -> Table:
    return client.create_table(TableSpec(next(_names), 2, init=ZERO))


def client_id(cluster: Cluster) -> bytes:
    return cluster._session.client_id


# -- os.fork


@pytest.mark.case("C091")
def test_a_forked_child_is_a_client_of_its_own_and_the_parent_goes_on(shards: Shards, client: Cluster, table: Table) -> None:
    table.push([1], ONE, LR)

    def use_both() -> tuple[bytes, int, int]:
        inherited = table.push([1], ONE, LR)
        with shardam.connect(shards.valkey.url, cluster="test") as connected:
            other = connected.table(table.name).push([1], ONE, LR)
        return client_id(client), inherited.step, other.step

    childs_id, inherited_step, other_step = in_child(use_both)
    assert childs_id != client_id(client)
    assert (inherited_step, other_step) == (2, 3)
    assert table.push([1], ONE, LR).step == 4
    np.testing.assert_allclose(table.pull([1]), -0.4, rtol=1e-4)


@pytest.mark.case("C091")
def test_every_push_is_applied_once_while_the_process_forks_again_and_again(
    client: Cluster, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    others = client.create_table(TableSpec(next(_names), 2, init=ZERO))
    row_ids, rows = np.arange(300), np.ones((300, 2), np.float32)

    def push() -> None:
        table.push(row_ids, rows, LR)

    def pull() -> None:
        assert table.pull(row_ids).shape == (300, 2)
        assert table.rows(row_ids[:10]).found.all()

    def use() -> None:
        table.pull([1])
        others.push([1], ONE, LR)

    def fork() -> None:
        in_child(use)

    push()
    with Busy(push, push, pull, fork, fork) as busy:  # two threads fork at once
        busy.wait(15)
    pushed, forks = sum(busy.counts[:2]) + 1, sum(busy.counts[3:])
    assert table.stats().table_step == pushed
    assert (table.rows(row_ids).step == pushed).all()
    assert others.stats().table_step == forks
    assert "at rest" not in caplog.text


def test_what_the_parent_has_queued_is_pushed_by_the_parent_alone_also_when_shards_are_down(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with (
        running_shards(tmp_path, data_dir=state) as shards,
        shardam.connect(shards.valkey.url, cluster="test", shard_timeout_s=HANG_S) as client,
    ):
        table = client.create_table(TableSpec("t", 2, init=ZERO))
        table.push([1], ONE, LR)
        shards.processes[0].kill()
        for _ in range(20):
            queue_push(table)

        def wait_for_the_shard() -> None:
            assert table.pull([1]).shape == (1, 2)
            client.close()

        with forked(wait_for_the_shard) as child:
            queue_push(table)
            shards.start(0, data_dir=state)
            child.result()
        assert table.push([1], ONE, LR).step == 23


def test_a_child_of_a_child_is_a_client_of_its_own(client: Cluster, table: Table) -> None:
    table.push([1], ONE, LR)

    def grandchild() -> bytes:
        pull_and_push(table)
        return client_id(client)

    def child() -> tuple[bytes, bytes]:
        pull_and_push(table)
        grandchilds = in_child(grandchild)
        pull_and_push(table)
        return client_id(client), grandchilds

    assert len({client_id(client), *in_child(child)}) == 3
    assert table.push([1], ONE, LR).step == 5


def test_a_child_closes_its_own_client_and_opens_no_more(client: Cluster, table: Table) -> None:
    def close() -> None:
        client.close()  # it had opened nothing yet
        with pytest.raises(ClientClosed, match="connect again"):
            table.pull([1])

    in_child(close)
    assert table.pull([1]).shape == (1, 2)


def test_a_scan_that_the_parent_began_is_not_gone_on_with_in_a_child(table: Table) -> None:
    table.assign(np.arange(20), np.ones((20, 2), np.float32))
    pages = table.scan(batch_size=2)
    next(pages)

    def go_on() -> int:
        with pytest.raises(ClientClosed, match="begun before the fork"):
            next(pages)
        return sum(len(page) for page in table.scan(batch_size=2))

    assert in_child(go_on) == 20
    assert sum(len(page) for page in pages) == 18


def test_a_child_opens_no_channel_for_the_parents_client(table: Table) -> None:
    links = table.cluster._session.links

    def reach() -> None:
        for link in links:
            with pytest.raises(ShardUnreachable, match="is the parent's"):
                link.stream()

    in_child(reach)


def test_a_module_is_trained_in_a_child_and_its_recorded_gradient_stays_the_parents(client: Cluster) -> None:
    items = Embedding(None, 2, table=next(_names), cluster=client, init=ZERO)
    sparse = SparseAdam([items], lr=0.1)
    items(torch.tensor([1])).sum().backward()

    def train() -> None:
        sparse.zero_grad()
        items(torch.tensor([2])).sum().backward()
        sparse.step()
        client.close()

    in_child(train)
    sparse.step()
    sparse.synchronize()
    assert items.table.rows([1, 2]).found.all()
    assert items.table.stats().table_step == 2


def test_locks_that_are_held_at_the_fork_do_not_hold_up_the_child(client: Cluster) -> None:
    items = Embedding(None, 2, table=next(_names), cluster=client)
    sparse = SparseAdam([items])

    def train() -> None:
        items(torch.tensor([1])).sum().backward()
        sparse.step()
        assert pickle.loads(pickle.dumps(items))._gradient.row_ids is None
        client.close()

    gradient = items._gradient
    with client._open_lock, client._close_lock, client._pusher._changed, gradient._lock, _GRADIENTS._lock, _OPEN._lock:
        in_child(train)


@pytest.mark.case("C119")
def test_parent_and_child_share_no_redis_connection(client: Cluster, table: Table) -> None:
    def talk(who: str) -> set[int]:
        connection = client._session.redis
        for index in range(1000):
            assert connection.echo(f"{who} {index}") == f"{who} {index}".encode()
        return {connection.client_id()}

    table.pull([1])
    parents = talk("before")
    with forked(lambda: talk("child")) as child:
        parents |= talk("parent")
        assert parents.isdisjoint(child.result())
    assert talk("after") == parents


# -- exits


def test_a_child_that_exits_leaves_the_parents_cluster_running_and_one_that_lives_on_does_not_keep_it() -> None:
    program = """
import os, sys, shardam
cluster = shardam.LocalCluster(shards=1)
table = cluster.create_table(shardam.TableSpec("t", 2))
options = shardam.AdamOptions(lr=0.1)
assert table.push([1], [[1.0, 1.0]], options).step == 1
pid = os.fork()
if pid == 0:
    assert table.push([1], [[1.0, 1.0]], options).step == 2
    sys.exit(3)  # exit hooks run in the child, too
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert table.push([1], [[1.0, 1.0]], options).step == 3
reading, writing = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
cluster.close()
assert cluster._process._process.returncode == 0  # by the end of its input, no signal was needed
os.close(writing)
os.waitpid(pid, 0)
print(cluster.shards[0].pid)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=clean_environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_running(int(done.stdout))


# -- subprocess


@pytest.mark.case("C092")
def test_subprocesses_start_while_pushes_run(table: Table) -> None:
    row_ids, rows = np.arange(300), np.ones((300, 2), np.float32)
    with Busy(lambda: table.push(row_ids, rows, LR)) as busy:
        for _ in range(200):
            assert subprocess.run(["true"], timeout=HANG_S, check=False).returncode == 0
        for _ in range(5):  # this one is forked, with hooks
            assert subprocess.run(["true"], timeout=HANG_S, check=False, preexec_fn=os.getpid).returncode == 0
    assert table.stats().table_step == busy.counts[0]


# -- gRPC


@pytest.mark.parametrize("support", ["0", "1"])
def test_grpc_s_own_fork_support_may_be_on_or_off(shards: Shards, table: Table, support: str) -> None:
    program = """
import os, sys, threading, shardam
table = shardam.connect(sys.argv[1], cluster="test").table(sys.argv[2])
over = threading.Event()
def push():
    while not over.is_set():
        table.push([1], [[1.0, 1.0]], shardam.AdamOptions(lr=0.1))
pushing = threading.Thread(target=push)
pushing.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        os._exit(int(table.pull([1]).shape != (1, 2)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
over.set()
pushing.join()
"""
    command = [sys.executable, "-c", program, shards.valkey.url, table.name]
    environment = clean_environment(GRPC_ENABLE_FORK_SUPPORT=support)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr


class Stuck:
    """A stream whose threads do not end."""

    def cancel(self) -> None:
        """Has no effect."""

    def wait_for_threads(self, deadline: Deadline) -> bool:
        """Says so."""
        return False


def test_a_fork_goes_ahead_and_says_so_when_grpc_does_not_come_to_rest(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shardam._forks.REST_TIMEOUT_S", 0.2)
    table.push([1], ONE, LR)
    stuck = Stuck()
    FORKS.add_stream(stuck)
    in_child(lambda: None)
    assert "gRPC is not at rest after 0.2 s" in caplog.text
    del stuck
    assert table.push([1], ONE, LR).step == 2


def test_a_channel_of_the_programs_own_holds_up_no_fork(shards: Shards, table: Table, caplog: pytest.LogCaptureFixture) -> None:
    with grpc.insecure_channel(shards.view().shards[0].address) as channel:
        grpc.channel_ready_future(channel).result(HANG_S)
        for step in (1, 2):
            assert table.push([1], ONE, LR).step == step
            in_child(lambda: None)
    assert "at rest" not in caplog.text
