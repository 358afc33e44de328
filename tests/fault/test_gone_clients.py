"""Workers that are killed, stopped or leave while a push of theirs is on some shards only; homes that pause."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from shardam_testing.processes import Shards, clean_environment, running_shards
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.raw_worker import ROWS_PER_SHARD, RawWorker, raw_worker, rows_of
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError, WrongRole
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, shard_pb2

LEASE_S = 2.0
HEARTBEAT_S = LEASE_S / 10
"""A live worker misses ten before it is closed: a busy machine is no silence."""

NUM_SHARDS = 3

NAME_LEASE_S = 30.0
"""No pause of these tests is so long that a shard doubts its name."""


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[tuple[Shards, list[RawClient], common_pb2.TableInfo]]:
    """Yields three shards with a short lease for clients, anonymous readers of each, and a table."""
    flags = {"client_lease_s": str(LEASE_S), "lease_s": str(NAME_LEASE_S)}
    with running_shards(folder, NUM_SHARDS, **flags) as shards, contextlib.ExitStack() as stack:
        view = shards.view()
        readers = [stack.enter_context(raw_client(view, index)) for index in range(NUM_SHARDS)]
        for reader in readers:
            reader.client_id = b""
        yield shards, readers, readers[0].create(TableSpec("t", 2))[0]


@contextlib.contextmanager
def half_pushed(shards: Shards, reached: list[int]) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """Starts a worker process whose second push reaches some shards only; yields it and its client id."""
    arguments = [shards.valkey.url, shards.cluster, "t", str(HEARTBEAT_S), ",".join(map(str, reached))]
    process = subprocess.Popen(
        [sys.executable, "-m", "shardam_testing.raw_worker", *arguments],
        env=clean_environment(PYTHONPATH=str(Path(__file__).parents[1] / "support")),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, bytes.fromhex(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def steps(readers: list[RawClient]) -> list[int]:
    return [reader.info("t").table_step for reader in readers]


def own_steps(readers: list[RawClient], table: common_pb2.TableInfo) -> list[list[int]]:
    """Returns for each shard the steps at which its rows were touched last."""
    return [
        np.frombuffer(reader.read(table, rows_of(reader.entry.index, NUM_SHARDS)).rows.last_touched_step, "<i8").tolist()
        for reader in readers
    ]


def sample(reader: RawClient, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(reader.metrics())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels)
    return found[0]


def last_number(reader: RawClient, client_id: bytes) -> int:
    """Returns the last number of a closed client, as home is told."""
    request = shard_pb2.EndClientRequest(header=reader.header(), client_id=client_id)
    return int(reader.call(reader.shard.EndClient, request).last_number)


@pytest.mark.case("C053")
@pytest.mark.case("C054")
@pytest.mark.parametrize(
    ("number", "reached"),
    [(signal.SIGKILL, [0, 1]), (signal.SIGSTOP, [2])],
    ids=["killed, home and another have it", "stopped, home has it not"],
)
def test_a_push_cut_off_by_its_workers_death_is_closed_on_the_shards_that_lack_it_and_others_go_on(
    tmp_path: Path, number: signal.Signals, reached: list[int]
) -> None:
    with (
        running_cluster(tmp_path) as (shards, readers, table),
        raw_worker(shards.view(), heartbeat_s=HEARTBEAT_S) as other,
        half_pushed(shards, reached) as (process, client_id),
    ):
        others = readers[0].create(TableSpec("others", 2))[0]
        assert [reader.status().num_clients for reader in readers] == [2, 2, 2]
        assert steps(readers) == [2 if index in reached else 1 for index in range(NUM_SHARDS)]
        process.send_signal(number)
        pushes = keep_pushing_until(other, others, lambda: [reader.status().num_clients for reader in readers] == [1, 1, 1])
        wait_for("equal table steps", lambda: steps(readers) == [2, 2, 2])
        assert [last_number(reader, client_id) for reader in readers] == [2, 2, 2]
        # A part is whole where it arrived, and absent elsewhere.
        assert own_steps(readers, table) == [[2 if index in reached else 1] * ROWS_PER_SHARD for index in range(NUM_SHARDS)]
        assert [reader.info("others").table_step for reader in readers] == [pushes] * NUM_SHARDS
        assert sample(readers[0], "shardam_clients_dropped_total") == 1
        assert sample(readers[0], "shardam_clients", state="open") == 1
        assert sample(readers[0], "shardam_clients", state="closed") == 1
        assert f"client {client_id.hex()} was silent for" in shards.processes[0].log_text()
        assert other.refused == ""
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "CLIENT_CLOSED"


def keep_pushing_until(worker: RawWorker, table: common_pb2.TableInfo, done: Callable[[], bool]) -> int:
    """Pushes to all shards, a hundred times and until something holds; returns how often."""
    deadline, number = time.monotonic() + 60, 0
    while number < 100 or not done():
        assert time.monotonic() < deadline
        number += 1
        worker.push(number, table, range(NUM_SHARDS))
    return number


@pytest.mark.case("C054")
def test_a_leave_ends_the_client_on_all_shards_at_once_and_settles_what_only_some_have(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as (shards, readers, table), raw_worker(shards.view()) as worker:
        worker.push(1, table, [0, 1, 2])
        worker.push(2, table, [1])
        worker.shards[0].leave()
        wait_for("the client to be ended", lambda: [reader.status().num_clients for reader in readers] == [0, 0, 0])
        wait_for("equal table steps", lambda: steps(readers) == [2, 2, 2])
        assert own_steps(readers, table) == [[1] * ROWS_PER_SHARD, [2] * ROWS_PER_SHARD, [1] * ROWS_PER_SHARD]
        for shard in worker.shards:
            with pytest.raises(ShardamError) as error:
                shard.push(3, table, [], np.empty((0, 2)))
            assert error.value.reason == "CLIENT_CLOSED"
        worker.shards[0].leave()
        assert sample(readers[0], "shardam_clients_dropped_total") == 0


def test_a_leave_with_a_shard_down_is_answered_and_settled_when_the_shard_is_back(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as (shards, readers, table), raw_worker(shards.view()) as worker:
        worker.push(1, table, [0, 1, 2])
        worker.push(2, table, [0])
        os.kill(shards.processes[2].process.pid, signal.SIGSTOP)
        try:
            worker.shards[0].leave()
            wait_for("the other shard to be level with home", lambda: steps(readers[:2]) == [2, 2])
        finally:
            os.kill(shards.processes[2].process.pid, signal.SIGCONT)
        wait_for("the shard that was away to be level, too", lambda: steps(readers) == [2, 2, 2])
        assert [last_number(reader, worker.client_id) for reader in readers] == [2, 2, 2]


def test_a_pause_of_home_longer_than_the_lease_closes_nobody(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as (shards, readers, table), raw_worker(shards.view(), heartbeat_s=HEARTBEAT_S) as worker:
        wait_for("a heartbeat", lambda: worker.heard > 0)
        home = shards.processes[0].process.pid
        os.kill(home, signal.SIGSTOP)
        try:
            paused = time.monotonic()
            wait_for("the pause to be longer than the lease", lambda: time.monotonic() > paused + 1.5 * LEASE_S)
        finally:
            os.kill(home, signal.SIGCONT)
        before = worker.heard
        wait_for("heartbeats over another lease", lambda: worker.heard >= before + LEASE_S / HEARTBEAT_S or worker.refused)
        assert worker.refused == ""
        worker.push(1, table, range(NUM_SHARDS))
        assert sample(readers[0], "shardam_clients_dropped_total") == 0


def test_heartbeats_are_refused_elsewhere_than_on_home_and_for_clients_that_are_not_open(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as (shards, readers, _), raw_worker(shards.view()) as worker:
        assert worker.shards[0].open(heartbeats=True).client_lease_s == LEASE_S
        worker.shards[0].heartbeat()
        with pytest.raises(WrongRole, match="shard 0"):
            worker.shards[1].heartbeat()
        worker.shards[0].leave()
        for shard, reason in ((worker.shards[0], "CLIENT_CLOSED"), (readers[0], "UNKNOWN_CLIENT")):
            with pytest.raises(ShardamError) as error:
                shard.heartbeat()
            assert error.value.reason == reason
