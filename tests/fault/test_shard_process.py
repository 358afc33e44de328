"""Shard processes that are killed, doubled, drained, or left without Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shardam_testing.processes import Shards, running_shards, running_valkey
from shardam_testing.raw_client import raw_client
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError, ShardUnreachable
from shardam_proto.registry import ClusterView
from shardam_proto.schema import TableSpec


def test_sigterm_finishes_accepted_pushes_releases_the_name_and_exits_0(tmp_path: Path) -> None:
    with running_shards(tmp_path) as shards, raw_client(shards.view()) as client:
        client.open()
        table = client.create(TableSpec("t", 64))[0]
        row_ids, gradients = list(range(20_000)), np.ones((20_000, 64))
        acknowledged, started = [], threading.Event()

        def push_until_refused() -> None:
            for number in range(1, 1000):
                if number > 2:
                    started.set()
                try:
                    acknowledged.append(client.push(number, table, row_ids, gradients).steps[0].table_step)
                except ShardamError:
                    return

        pusher = threading.Thread(target=push_until_refused)
        pusher.start()
        assert started.wait(30)
        assert shards.processes[0].terminate() == 0
        pusher.join(30)
        assert not pusher.is_alive()
        assert acknowledged == list(range(1, len(acknowledged) + 1))
        assert shards.view().shards == {}
        log = shards.processes[0].log_text()
        assert log.index("drains") < log.index("stopped")
        assert "Traceback" not in log


@pytest.mark.case("C099")
def test_while_it_drains_health_says_not_serving_and_new_calls_are_refused(tmp_path: Path) -> None:
    with running_shards(tmp_path) as shards, raw_client(shards.view()) as client:
        client.open()
        seen: list[int] = []

        def watch() -> None:
            stub = health_pb2_grpc.HealthStub(client.channel)
            answers = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)  # type: ignore[attr-defined]  # not in the stubs
            seen.extend(answer.status for answer in answers)

        watcher = threading.Thread(target=lambda: _until_error(watch))
        watcher.start()
        wait_for("the first health answer", lambda: bool(seen))
        assert shards.processes[0].terminate() == 0
        watcher.join(30)
        assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
        with pytest.raises(ShardUnreachable):
            client.status()


def test_a_second_process_for_a_shard_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with running_shards(tmp_path) as shards:
        first = shards.view().shards[0]
        second = shards.start(0)
        assert second.process.wait(40) == 1
        assert f"shard 0 of cluster 'test' is already running (pid {first.pid} at {first.address})" in second.log_text()
        assert "Traceback" not in second.log_text()
        assert shards.view().shards[0] == first


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"seed": "7"}, "was created with seed 0"), ({"shards": "3"}, "was created with 1 shards")],
    ids=["seed", "shards"],
)
def test_settings_that_contradict_the_cluster_are_refused_with_the_remedy(
    tmp_path: Path, flags: dict[str, str], message: str
) -> None:
    with running_shards(tmp_path) as shards:
        assert shards.processes[0].terminate() == 0
        again = shards.start(0, **flags)
        assert again.process.wait(40) == 2
        assert message in again.log_text()
        assert "another --cluster name" in again.log_text()


@pytest.mark.case("C103")
def test_a_taken_port_is_named_with_its_flag(tmp_path: Path) -> None:
    with running_shards(tmp_path) as shards:
        port = shards.view().shards[0].address.rpartition(":")[2]
        second = shards.start(0, port=port, cluster="other")
        assert second.process.wait(40) not in (0, None)
        assert f"port {port} is in use: choose another with --port" in second.log_text()


@pytest.mark.case("C116")
def test_shards_that_start_before_redis_wait_for_it_and_say_so(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        valkey.stop()
        shards = Shards(valkey, tmp_path, 1)
        try:
            shard = shards.start(0)
            wait_for("the shard to say what it waits for", lambda: "waits for Redis" in shard.log_text())
            valkey.start()
            shards.wait_ready()
        finally:
            shards.stop()


@pytest.mark.case("C117")
def test_training_goes_on_without_redis_and_a_flushed_one_is_filled_again(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2) as shards:
        before = shards.view()
        with raw_client(before, 0) as client:
            client.open()
            table = client.create(TableSpec("t", 1))[0]
            own = _owned_by(before, 0, 5)
            client.push(1, table, own, np.ones((5, 1)))
            shards.valkey.stop()
            client.push(2, table, own, np.ones((5, 1)))
            with pytest.raises(ShardamError) as error:
                client.create(TableSpec("new", 1))
            assert error.value.reason == "REDIS_UNREACHABLE"
            shards.valkey.start()  # empty: it keeps nothing
            wait_for("everything to be registered again", lambda: _complete(shards))
            after = shards.view()
            assert (after.entry, after.route_map, after.shards) == (before.entry, before.route_map, before.shards)
            client.push(3, table, own, np.ones((5, 1)))
            client.create(TableSpec("new", 1))
            with_tables = shards.valkey.client()
            assert set(with_tables.hkeys("shardam:test:tables")) == {b"t", b"new"}
            with_tables.close()


@pytest.mark.case("C013")
@pytest.mark.case("C042")
def test_concurrent_clients_never_meet_a_half_made_row(tmp_path: Path) -> None:
    rounds, num_clients = 40, 8
    with running_shards(tmp_path) as shards:
        view = shards.view()
        with raw_client(view) as maker:
            table = maker.create(TableSpec("t", 8))[0]
        failures: list[str] = []
        barrier = threading.Barrier(num_clients, timeout=30)

        def work(index: int) -> None:
            with raw_client(view) as client:
                client.open()
                for number in range(1, rounds + 1):
                    row_ids = list(range(number * 50, number * 50 + 50))
                    barrier.wait()
                    client.push(number, table, row_ids, np.full((50, 8), index - 3.0))
                    rows = client.read(table, row_ids)
                    moments = np.frombuffer(rows.rows.exp_avg_sq, "<f4")
                    if not np.isfinite(client.pull(table, row_ids)).all() or (moments.any() and rows.table_step < 1):
                        failures.append(f"client {index}, round {number}")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        with raw_client(view) as reader:
            assert reader.info("t").table_step == rounds * num_clients


def _owned_by(view: ClusterView, shard: int, count: int) -> list[int]:
    assert view.route_map is not None
    row_ids = np.arange(100, dtype=np.int64)
    return [int(row_id) for row_id in row_ids[view.route_map.shards_of(row_ids) == shard][:count]]


def _complete(shards: Shards) -> bool:
    view = shards.view()
    return view.route_map is not None and len(view.shards) == 2 and all(entry.ready for entry in view.shards.values())


def _until_error(action: Callable[[], None]) -> None:
    try:
        action()
    except grpc.RpcError:
        return
