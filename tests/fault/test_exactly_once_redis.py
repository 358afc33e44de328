"""Redis killed, stopped or flushed, a shard away for long, a worker that sleeps: training goes on, and who is late is told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.injector import Elapsed, FlushRedis, KillRedis, Planned, StopRedis, playing
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import verify
from shardam_testing.faults.workers import FAILED, Worker
from shardam_testing.waiting import wait_for

from shardam_proto.registry import ClusterView, Keys

HANG_S = 120.0
"""What takes seconds on an idle machine."""

pytestmark = pytest.mark.timeout(3 * HANG_S)

ENOUGH = 100_000
"""Changes of a worker that is to train as long as the test lasts."""

LEASE_S = 0.5

OUTAGE_S = 10 * LEASE_S
"""What a minute is to leases of 6 s."""

RECONNECT_S = 5.0
"""From a shard being ready to a worker's next answer, at most (C100)."""


@pytest.mark.case("C110")
@pytest.mark.case("C117")
@pytest.mark.case("C122")
@pytest.mark.parametrize(
    ("action", "kind"),
    [(KillRedis(OUTAGE_S), "kill redis"), (StopRedis(OUTAGE_S), "stop redis"), (FlushRedis(), "flush redis")],
    ids=["killed", "stopped", "flushed"],
)
def test_training_goes_on_while_redis_is_away_and_everything_is_registered_again(
    tmp_path: Path, action: KillRedis | StopRedis | FlushRedis, kind: str
) -> None:
    with running_fault_cluster(tmp_path, 2, lease_s=str(LEASE_S), redis_timeout_s="0.5") as cluster:
        worker = cluster.workers.start(1, ENOUGH)
        worker.wait_acknowledged(20, HANG_S)
        before = cluster.view()
        with playing(cluster, [Planned(Elapsed(0), action)]) as injector:
            wait_for("the fault", lambda: bool(injector.fired), HANG_S)
            at_fault = worker.noted.acknowledged
            worker.wait_acknowledged(at_fault + 20, HANG_S)
            assert injector.anything_stopped == (kind != "flush redis")
            injector.finish()
            assert injector.counts() == {kind: 1}
        wait_for("everything to be registered again", lambda: _complete(cluster, before), HANG_S)
        worker.wait_acknowledged(worker.noted.acknowledged + 20, HANG_S)
        assert cluster.num_restarts == 0
        _end(cluster, worker)
        verify(cluster).check()


@pytest.mark.case("C100")
def test_a_worker_goes_on_within_seconds_of_its_shard_being_ready_again(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with running_fault_cluster(tmp_path, 1) as cluster:
        worker = cluster.workers.start(1, ENOUGH)
        worker.wait_acknowledged(20, HANG_S)
        with cluster.held_down(0):
            at_kill = worker.noted.acknowledged
            time.sleep(OUTAGE_S)  # the outage itself: long enough for the client's back-off to reach its longest wait
            assert worker.noted.acknowledged <= at_kill + 1
        wait_for("the shard to serve", lambda: cluster.serves(0) is not None, HANG_S)
        ready_at, at_ready = time.monotonic(), worker.noted.acknowledged
        worker.wait_acknowledged(at_ready + 1, HANG_S)
        seconds = time.monotonic() - ready_at
        assert seconds <= RECONNECT_S
        record_property("summary", f"first answer {seconds:.2f} s after the shard was ready again")
        _end(cluster, worker)
        verify(cluster).check()


def test_a_worker_stopped_beyond_its_lease_is_told_that_it_was_closed_and_the_other_trains_on(tmp_path: Path) -> None:
    with running_fault_cluster(tmp_path, 2, client_lease_s="3") as cluster:
        sleeper, other = cluster.workers.start(1, ENOUGH, in_flight=4), cluster.workers.start(2, ENOUGH, in_flight=4)
        for worker in (sleeper, other):
            worker.wait_acknowledged(20, HANG_S)
        sleeper.stop()
        wait_for("home to close the silent worker", lambda: _num_clients(cluster) == {1}, HANG_S)
        sleeper.go_on()
        assert cluster.wait_end(sleeper) == FAILED
        error = sleeper.noted.error
        assert (error["error"], error["reason"]) == ("ClientClosed", "CLIENT_CLOSED")
        assert "connect again" in error["message"]
        other.wait_acknowledged(other.noted.acknowledged + 20, HANG_S)
        _end(cluster, other)
        verify(cluster).check()


def _end(cluster: FaultCluster, worker: Worker) -> None:
    worker.end()
    assert cluster.wait_end(worker) == 0, worker.log_text()


def _num_clients(cluster: FaultCluster) -> set[int]:
    return {status.num_clients for status in cluster.statuses()}


def _complete(cluster: FaultCluster, before: ClusterView) -> bool:
    """Whether Redis has what it had, down to addresses and schemas."""
    after = cluster.view()
    with contextlib.closing(cluster.valkey.client()) as client:
        names = set(client.hkeys(Keys("test").tables))
    same = (after.entry, after.route_map, after.shards) == (before.entry, before.route_map, before.shards)
    return same and names == {spec.name.encode() for spec in TABLES}
