"""Redis stopped, emptied, replaced, silent or not trustworthy while shards serve (PROTOCOL.md, section 9)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.processes import Shards, running_shards, running_valkey
from shardam_testing.pushing import HANG_S, PushingClient, flush, pushing_client, reason_of, stopped, wait_serving
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.redis_forwarder import redis_forwarder
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError
from shardam_proto.registry import ClusterView, Keys, route_map_from_json, route_map_to_json
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec

LEASE_S = 2.0
"""Half of it is more than a busy machine keeps a thread waiting: no outage of Redis is to meet a shard that seems to sleep."""

OUTAGE_LEASES = 3
"""An outage outlasts every lease by far."""

REDIS_TIMEOUT_S = "0.5"
"""Until a silent Redis is given up."""


@pytest.mark.case("C117")
@pytest.mark.case("C110")
def test_pushes_go_on_while_redis_is_stopped_restarted_empty_and_flushed(tmp_path: Path) -> None:
    with running_shards(tmp_path, lease_s=str(LEASE_S)) as shards, pushing_client(shards) as client:
        before = shards.view()
        with pushing_on(client) as pusher:
            shards.valkey.stop()
            end = time.monotonic() + OUTAGE_LEASES * LEASE_S
            pusher.wait_for_pushes("pushes throughout the outage", lambda: time.monotonic() > end)
            shards.valkey.start()  # empty: it keeps nothing
            wait_for("everything to be registered again", lambda: same(shards.view(), before))
            pusher.wait_for_pushes("pushes after the restart", lambda: True)
            flush(shards)
            wait_for("everything to be registered again", lambda: same(shards.view(), before))
            pusher.wait_for_pushes("pushes after the flush", lambda: True)
        assert pusher.problem is None
        with contextlib.closing(shards.valkey.client()) as connection:
            keys = Keys(shards.cluster)
            assert connection.hkeys(keys.tables) == [b"t"]
            assert connection.hgetall(keys.lineages) == {b"0": str(before.shards[0].lineage).encode()}
        assert client.raw.status().num_tables == 1
        client.raw.create(TableSpec("new", 2))


@pytest.mark.case("C110")
@pytest.mark.case("C111")
def test_a_route_map_that_was_changed_while_redis_was_away_reaches_all_shards(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2, lease_s="1") as shards:
        view = shards.view()
        shards.valkey.stop()
        shards.valkey.start()
        set_map(shards, RouteMap(epoch=5, num_shards=2))  # nobody was told: each shard reads it by itself
        for index in range(2):
            with raw_client(view, index) as client:
                wait_for_epoch(client, 5)
                client.epoch = 1
                assert reason_of(client.open) == "STALE_ROUTE"
                client.epoch = 5
                client.open()
        assert shards.view().route_map == RouteMap(epoch=5, num_shards=2)


def test_a_lower_epoch_in_redis_lowers_no_shard_s_and_is_replaced(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with running_shards(tmp_path, data_dir=state, lease_s="1") as shards, pushing_client(shards) as client:
        set_map(shards, RouteMap(epoch=5, num_shards=1))
        wait_for_epoch(client.raw, 5)
        set_map(shards, RouteMap(epoch=2, num_shards=1))
        wait_for("the higher epoch to be back", lambda: get_map(shards) == RouteMap(epoch=5, num_shards=1))
        assert client.raw.status().header.epoch == 5
        shards.processes[0].kill()
        flush(shards)
        set_map(shards, RouteMap(epoch=2, num_shards=1))
        wait_serving(shards, shards.start(0, data_dir=state, lease_s="1"))  # it remembers across its own restart, too
        assert get_map(shards) == RouteMap(epoch=5, num_shards=1)


@pytest.mark.case("C122")
def test_a_silent_redis_is_given_up_within_the_time_out_and_pushes_never_wait_for_it(tmp_path: Path) -> None:
    with running_valkey() as valkey, redis_forwarder(valkey.port) as forwarder:
        shards = Shards(valkey, tmp_path, 1)
        try:
            shard = shards.start(0, redis=forwarder.url, redis_timeout_s=REDIS_TIMEOUT_S, lease_s=str(LEASE_S))
            before = wait_serving(shards, shard)
            with pushing_client(shards) as client:
                forwarder.mode = "swallow"
                wait_for("the shard to notice", lambda: "does not answer" in shard.log_text(), HANG_S)
                wait_for("the lease to run out", lambda: not shards.view().shards)
                for number in range(1, 20):
                    client.push(number)
                assert forwarder.num_swallowed > 0
                forwarder.mode = "forward"
                wait_for("the shard to be registered again", lambda: shards.view().shards.get(0) == before)
                assert "Redis answers again" in shard.log_text()
        finally:
            shards.stop()


@pytest.mark.case("C115")
def test_a_redis_that_became_read_only_is_left_for_the_one_that_the_address_leads_to_now(tmp_path: Path) -> None:
    with running_valkey() as old, running_valkey() as new, redis_forwarder(old.port) as forwarder:
        shards = Shards(old, tmp_path, 1)
        try:
            shard = shards.start(0, redis=forwarder.url, lease_s="1")
            before = wait_serving(shards, shard)
            forwarder.target = new.port
            with contextlib.closing(old.client()) as connection:
                connection.replicaof("127.0.0.1", new.port)
            shards.valkey = new
            wait_for("the shard to be registered at the new one", lambda: shards.view().shards.get(0) == before)
            assert shards.view().route_map is not None
            assert "read only replica" in shard.log_text()
        finally:
            shards.stop()


@pytest.mark.case("C116")
def test_a_redis_that_is_loading_is_waited_for(tmp_path: Path) -> None:
    with running_valkey() as valkey, redis_forwarder(valkey.port) as forwarder:
        forwarder.mode = "loading"
        shards = Shards(valkey, tmp_path, 1)
        try:
            shard = shards.start(0, redis=forwarder.url, lease_s="1")
            wait_for("the shard to say what it waits for", lambda: "is loading the dataset" in shard.log_text(), HANG_S)
            forwarder.mode = "forward"
            wait_serving(shards, shard)
        finally:
            shards.stop()


@pytest.mark.case("C118")
def test_a_redis_that_may_delete_keys_is_warned_about_once(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 1)
        try:
            with contextlib.closing(valkey.client()) as connection:
                wait_serving(shards, shards.start(0, lease_s="1"))
                assert shards.processes[0].terminate() == 0
                connection.config_set("maxmemory-policy", "allkeys-lru")
                flush(shards)
                wait_serving(shards, shards.start(0, lease_s="1"))
                assert shards.processes[1].terminate() == 0
                connection.execute_command("ACL", "SETUSER", "default", "-info", "-config")  # type: ignore[no-untyped-call]
                flush(shards)
                wait_serving(shards, shards.start(0, lease_s="1"))
            warning = "its maxmemory-policy is allkeys-lru; set it to noeviction"
            assert [shard.log_text().count(warning) for shard in shards.processes] == [0, 1, 0]
        finally:
            shards.stop()


@pytest.mark.case("C114")
def test_commands_that_a_busy_redis_runs_late_and_again_count_nothing_twice(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2, redis_timeout_s=REDIS_TIMEOUT_S, lease_s=str(LEASE_S)) as shards:
        view = shards.view()
        with raw_client(view) as client:
            client.open()
            with stopped(shards.valkey.process.pid):
                for _ in range(2):  # the commands lie in Redis's sockets and run when it goes on
                    assert reason_of(lambda: client.create(TableSpec("t", 2))) == "REDIS_UNREACHABLE"
            table = client.create(TableSpec("t", 2))[0]
            with raw_client(view, 1) as other:
                assert other.info("t").table_id == table.table_id
            with contextlib.closing(shards.valkey.client()) as connection:
                assert connection.hlen(Keys(shards.cluster).tables) == 1
            assert get_map(shards) == view.route_map
            push = client.push(1, table, [], np.zeros((0, 2)))
            assert push.steps[0].table_step == 1
            wait_for("both shards to be registered", lambda: same(shards.view(), view))


@pytest.mark.case("C120")
def test_clocks_that_differ_or_jump_change_nothing_about_who_lives(tmp_path: Path) -> None:
    # Each process starts with a wall clock of its own, and shard 1's jumps by an hour every second.
    with running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 3)
        try:
            for index, (offset_s, jump_s) in enumerate(((60, 0), (-60, 3600), (0, 0))):
                folder = tmp_path / f"clock-{index}"
                write_clock(folder, offset_s, jump_s)
                shards.environment = {"PYTHONPATH": str(folder)}
                shards.start(index, lease_s="1")
            before = shards.wait_ready()
            with raw_client(before) as client:
                client.open()
                table = client.create(TableSpec("t", 2))[0]
                for number in range(1, 20):
                    client.push(number, table, [], np.zeros((0, 2)))
                seen = []
                end = time.monotonic() + 3.0  # three leases, and the clock has jumped as often
                wait_for("three leases to pass", lambda: seen.append(shards.view()) or time.monotonic() > end)  # type: ignore[func-returns-value]
            assert all(same(view, before) for view in seen)
            assert all("paused" not in shard.log_text() for shard in shards.processes)
            assert "clock of this process differs" in shards.processes[1].log_text()
        finally:
            shards.stop()


def write_clock(folder: Path, offset_s: int, jump_s: int) -> None:
    """Writes a sitecustomize module that gives a Python process another wall clock."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, time\n"
        "real, start = time.time, time.monotonic()\n"
        f"time.time = lambda: real() + {offset_s} + {jump_s} * int(time.monotonic() - start)\n"
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
        "print('the clock of this process differs by', time.time() - real(), file=sys.stderr)\n"
    )


class Pusher:
    """Pushes one after the other on a thread until told to stop."""

    def __init__(self, client: PushingClient) -> None:
        self._client = client
        self._end = threading.Event()
        self.problem: ShardamError | None = None
        self.acknowledged = 0
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            for number in itertools.count(1):
                self._client.push(number)
                self.acknowledged = number
                if self._end.wait(0.01):  # leaves the processors to the others
                    return
        except ShardamError as error:
            self.problem = error

    def stop(self) -> None:
        self._end.set()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()

    def wait_for_pushes(self, what: str, and_then: object) -> None:
        """Waits until ten more pushes are acknowledged, and something else holds."""
        assert callable(and_then)
        before = self.acknowledged

        def enough() -> bool:
            assert self.problem is None
            return self.acknowledged >= before + 10 and bool(and_then())

        wait_for(what, enough, HANG_S)


@contextlib.contextmanager
def pushing_on(client: PushingClient) -> Iterator[Pusher]:
    pusher = Pusher(client)
    pusher.thread.start()
    try:
        yield pusher
    finally:
        pusher.stop()
    assert client.step == pusher.acknowledged


def same(view: ClusterView, before: ClusterView) -> bool:
    return (view.entry, view.route_map, view.shards) == (before.entry, before.route_map, before.shards)


def wait_for_epoch(client: RawClient, epoch: int) -> None:
    """Waits until a shard has a route epoch; the client sends none from then on."""
    client.epoch = 0
    wait_for("the new epoch", lambda: client.status().header.epoch == epoch)


def set_map(shards: Shards, route_map: RouteMap) -> None:
    with contextlib.closing(shards.valkey.client()) as connection:
        connection.set(Keys(shards.cluster).route_map, route_map_to_json(route_map))


def get_map(shards: Shards) -> RouteMap | None:
    with contextlib.closing(shards.valkey.client()) as connection:
        text = connection.get(Keys(shards.cluster).route_map)
    assert text is None or isinstance(text, bytes)
    return None if text is None else route_map_from_json(text)
