"""Shards and workers killed, answers swallowed and streams cut in the middle of training: every change is applied once.

One worker: the run ends with the bits of a run without faults. Several: each shard has the bits of its journal, and what was
applied is what was acknowledged, but for what killed workers had in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
from pathlib import Path

import pytest
from shardam_testing.faults.cluster import running_fault_cluster
from shardam_testing.faults.injector import Acknowledged, CutAll, KillShard, KillWorker, Network, Planned, playing, spread
from shardam_testing.faults.live import read_rows
from shardam_testing.faults.network_faults import Cut, Delay, Direction, Drop, Swallow
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.verification import all_rows, run_differences, verify
from shardam_testing.faults.workers import Workers
from shardam_testing.up_process import Ready, ready_of, up
from shardam_testing.waiting import wait_for

SEED = 7
COUNT = 240
"""Changes of a worker: a second without faults, so that three kills lie well within."""

LARGE_ROWS = 16_000
"""Rows of a large push: more than a MiB for each of three shards, so that it travels in chunks."""

HANG_S = 120.0
"""What takes seconds on an idle machine."""

pytestmark = pytest.mark.timeout(3 * HANG_S)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one worker's run left and saw."""

    rows: dict[str, TableRows]
    pulled: dict[int, str]


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same changes without a fault, on one shard."""
    with running_fault_cluster(tmp_path_factory.mktemp("fault-free"), 1) as cluster:
        worker = cluster.workers.start(SEED, COUNT, in_flight=8, large_rows=LARGE_ROWS)
        assert cluster.wait_end(worker) == 0, worker.log_text()
        assert cluster.network_fired() == []
        return Run(all_rows(cluster), dict(worker.noted.pulled))


@pytest.mark.parametrize(("num_shards", "journal_limit_mib"), [(1, "1024"), (3, "4")], ids=["1 shard", "3 shards, with bases"])
def test_one_worker_s_run_with_kills_and_a_broken_network_ends_with_the_bits_of_the_run_without(
    tmp_path: Path, fault_free: Run, num_shards: int, journal_limit_mib: str
) -> None:
    rng = random.Random(num_shards)

    def shard() -> int:
        return rng.randrange(num_shards)

    plan = [
        *(Planned(Acknowledged(0, number), KillShard(shard())) for number in spread(rng, 3, 10, 200)),
        *(Planned(Acknowledged(0, number), Network(shard(), Swallow())) for number in spread(rng, 2, 10, 180)),
        *(
            Planned(Acknowledged(0, number), Network(shard(), Cut(rng.randrange(3000), reset=rng.random() < 0.5)))
            for number in spread(rng, 2, 10, 180)
        ),
        Planned(Acknowledged(0, 30), Network(shard(), Cut(rng.randrange(200), Direction.REPLIES))),
        Planned(Acknowledged(0, 60), Network(shard(), Delay(0.02, pieces=5))),
        Planned(Acknowledged(0, 90), Network(shard(), Drop(0.2))),
    ]
    with running_fault_cluster(tmp_path, num_shards, journal_limit_mib=journal_limit_mib) as cluster:
        worker = cluster.workers.start(SEED, COUNT, in_flight=8, large_rows=LARGE_ROWS)
        with playing(cluster, plan) as injector:
            status = cluster.wait_end(worker)
            assert status == 0, f"{worker.noted.error}\n{worker.log_text()}"
            injector.finish()
            counts = injector.counts()
        assert counts == {"kill shard": 3, "swallow": 2, "cut": 3, "delay": 5, "drop": 1}
        assert cluster.num_restarts == 3
        verified = verify(cluster)
        verified.check()
        has_bases = [oracle.base_change_number > 0 for oracle in verified.oracles]
        assert has_bases == [journal_limit_mib != "1024"] * num_shards
        assert run_differences(fault_free.rows, all_rows(cluster)) == []
        assert worker.noted.pulled == fault_free.pulled
        assert [oracle.clients[worker.noted.client_id].last_number for oracle in verified.oracles] == [COUNT] * num_shards


def test_shardam_up_starts_killed_shards_again_and_the_worker_trains_on_to_the_same_bits(
    tmp_path: Path, fault_free: Run
) -> None:
    rng = random.Random(5)
    flags = ("--shards", "2", "--data-dir", str(tmp_path / "state"), "--journal", "write", "--json")
    with up(tmp_path, *flags) as running:
        ready = ready_of(running)
        workers = Workers(ready.redis_url, tmp_path, ready.cluster)
        try:
            worker = workers.start(SEED, COUNT, in_flight=8, large_rows=LARGE_ROWS)
            for number in spread(rng, 2, 10, 200):
                worker.wait_acknowledged(number, HANG_S)
                index = rng.randrange(2)
                pid = ready.shard_pid(index)
                os.kill(pid, signal.SIGKILL)
                again = functools.partial(_serves_again, ready, index, pid)
                wait_for("up to start the shard again", again, HANG_S)
            assert worker.wait(HANG_S) == 0, f"{worker.noted.error}\n{worker.log_text()}"
        finally:
            workers.close()
        assert run_differences(fault_free.rows, read_rows(ready.view())) == []
        assert worker.noted.pulled == fault_free.pulled


@pytest.mark.case("C053")
def test_several_workers_under_kills_and_a_broken_network_leave_each_shard_with_the_bits_of_its_journal(tmp_path: Path) -> None:
    num_shards, rng = 2, random.Random(3)
    plan = [
        *(Planned(Acknowledged(0, number), KillShard(place % 2)) for place, number in enumerate(spread(rng, 3, 10, 180))),
        Planned(Acknowledged(1, 70), KillWorker(1)),
        Planned(Acknowledged(2, 120), KillWorker(2)),
        *(Planned(Acknowledged(0, number), Network(number % 2, Swallow())) for number in spread(rng, 3, 10, 180)),
        *(Planned(Acknowledged(0, number), Network(number % 2, Cut(2000))) for number in spread(rng, 3, 10, 180)),
        Planned(Acknowledged(0, 100), CutAll(1)),
    ]
    with running_fault_cluster(tmp_path, num_shards) as cluster:
        workers = [cluster.workers.start(100 + index, COUNT, in_flight=4 + 8 * index) for index in range(2)]
        workers.append(cluster.workers.start(102, COUNT, in_flight=32, large_rows=LARGE_ROWS))
        with playing(cluster, plan) as injector:
            cluster.wait_end(workers[1])
            workers.append(cluster.workers.start(200, 100, in_flight=16))
            statuses = [cluster.wait_end(worker) for worker in workers]
            injector.finish()
            counts = injector.counts()
        logs = [f"{worker.noted.error}\n{worker.log_text()}" for worker in workers]
        assert statuses == [0, -signal.SIGKILL, -signal.SIGKILL, 0], logs
        assert (counts["kill shard"], counts["kill worker"], counts["swallow"]) == (3, 2, 3)
        assert counts["cut"] >= 3  # and one for each connection of CutAll
        verified = verify(cluster)
        verified.check()
        assert verified.num_comparisons == num_shards * len(all_rows(cluster))
        for worker in workers:
            books = [oracle.clients[worker.noted.client_id] for oracle in verified.oracles]
            assert all(client.ended for client in books)


def _serves_again(ready: Ready, index: int, old_pid: int) -> bool:
    entry = ready.view().shards.get(index)
    return entry is not None and entry.ready and entry.pid != old_pid
