"""Who may act as a shard: two processes for one name, owners that slept, folders of others (PROTOCOL.md, section 9)."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.processes import running_shards
from shardam_testing.pushing import HANG_S, InBackground, flush, is_lost, pushing_client, reason_of, stopped, wait_serving
from shardam_testing.raw_client import raw_client
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardUnreachable
from shardam_proto.v1 import shard_pb2

LEASE_S = "1"
"""A lease that a stopped process outsleeps quickly, and that a busy machine does not."""

LONG_LEASE_S = "60"
"""One that no test waits for."""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_second_process_on_the_owner_s_folder_is_refused_and_told_whom_to_kill(tmp_path: Path, is_stopped: bool) -> None:
    with running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LEASE_S) as shards:
        owner = shards.processes[0]
        with contextlib.ExitStack() as paused:
            if is_stopped:
                paused.enter_context(stopped(owner.process.pid))
                wait_for("the lease to run out", lambda: not shards.view().shards)
            second = shards.start(0, data_dir=str(tmp_path / "state"), lease_s=LEASE_S)
            assert second.process.wait(HANG_S) == 1
            assert f"held by process {owner.process.pid}" in second.log_text()
            assert "kill it first" in second.log_text()
            assert "Traceback" not in second.log_text()
        wait_for("the owner to have its name", lambda: shards.view().shards.get(0))
        assert shards.view().shards[0].pid == owner.process.pid


def test_a_process_with_another_folder_is_refused_while_the_owner_lives(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LEASE_S) as shards,
        pushing_client(shards) as client,
    ):
        owner = shards.view().shards[0]
        second = shards.start(0, data_dir=str(tmp_path / "other"), lease_s=LEASE_S)
        assert second.process.wait(HANG_S) == 1
        assert f"is already running (pid {owner.pid} at {owner.address})" in second.log_text()
        assert shards.view().shards[0] == owner
        client.push(1)
        assert client.step == 1


@pytest.mark.parametrize("is_older", [False, True], ids=["as new as the owner's", "older"])
def test_a_copy_of_the_owner_s_folder_takes_nothing_while_the_owner_lives(tmp_path: Path, is_older: bool) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    with running_shards(tmp_path, data_dir=str(state), lease_s=LEASE_S) as shards, pushing_client(shards) as client:
        client.push(1)
        shutil.copytree(state, copy)
        if is_older:
            client.push(2)
        owner = shards.view().shards[0]
        second = shards.start(0, data_dir=str(copy), lease_s=LEASE_S)
        assert second.process.wait(HANG_S) == 1
        assert f"is already running (pid {owner.pid} at {owner.address})" in second.log_text()
        assert shards.view().shards[0] == owner
        client.push(3 if is_older else 2)
        assert "fenced" not in shards.processes[0].log_text()


def test_a_copy_as_new_as_the_owner_s_folder_waits_for_the_lease_of_a_killed_owner(tmp_path: Path) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    with running_shards(tmp_path, data_dir=str(state), lease_s=LEASE_S) as shards, pushing_client(shards) as client:
        client.push(1)
        shards.processes[0].kill()
        shutil.copytree(state, copy)
        lineage = shards.view().shards[0].lineage
        assert wait_serving(shards, shards.start(0, data_dir=str(copy), lease_s=LEASE_S)).lineage == lineage
        with raw_client(shards.view()) as returned:
            assert returned.info("t").table_step == 1


@pytest.mark.case("C112")
def test_an_owner_that_overslept_and_was_replaced_is_fenced_and_nothing_is_applied_by_both(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LEASE_S) as shards,
        pushing_client(shards) as client,
    ):
        owner = shards.processes[0]
        client.push(1)
        with stopped(owner.process.pid):
            wait_for("the lease to run out", lambda: not shards.view().shards)
            replacement = shards.start(0, data_dir=str(tmp_path / "other"), lease_s=LEASE_S)
            entry = wait_for("the replacement", lambda: shards.view().shards.get(0), HANG_S)
            assert (entry.lost, entry.ready, entry.pid) == (True, False, replacement.process.pid)
            with raw_client(shards.view()) as other:
                assert reason_of(other.open) == "SHARD_LOST"
                assert reason_of(lambda: other.push(2, client.table, [1], np.ones((1, 2)))) == "SHARD_LOST"
            late = InBackground(lambda: client.push(2))  # waits in the socket of the owner that sleeps
        assert owner.process.wait(HANG_S) == 1
        assert "fenced" in owner.log_text()
        assert "Traceback" not in owner.log_text()
        assert late.reason() in ("NOT_READY", "SHARD_UNREACHABLE")
        with pytest.raises(ShardUnreachable):
            client.push(2)
        assert replacement.terminate() == 0
        again = shards.start(0, data_dir=str(tmp_path / "state"), lease_s=LEASE_S)
        wait_serving(shards, again)
        with raw_client(shards.view()) as returned:
            returned.client_id = client.raw.client_id
            assert returned.open().header.last_number == 1
            assert returned.info("t").table_step == 1


def test_an_owner_that_overslept_without_a_replacement_serves_again_once_redis_confirms_it(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LEASE_S) as shards,
        pushing_client(shards) as client,
    ):
        before = shards.view().shards[0]
        with contextlib.ExitStack() as paused:
            with stopped(shards.processes[0].process.pid):
                wait_for("the lease to run out", lambda: not shards.view().shards)
                paused.enter_context(stopped(shards.valkey.process.pid))
            wait_for("the owner to notice", lambda: client.state == shard_pb2.SERVING_STATE_SUSPENDED)
            assert reason_of(lambda: client.push(1)) == "NOT_READY"
            assert reason_of(lambda: client.raw.pull(client.table, [1])) == "NOT_READY"
        wait_for("Redis to confirm it", lambda: client.state == shard_pb2.SERVING_STATE_SERVING)
        client.push(1)
        assert shards.view().shards[0] == before
        assert "Redis confirms its name" in shards.processes[0].log_text()


def test_a_killed_shard_that_is_started_again_has_its_state_and_waits_for_no_lease(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LONG_LEASE_S) as shards,
        pushing_client(shards) as client,
    ):
        before = shards.view()
        client.push(1)
        shards.processes[0].kill()
        wait_serving(shards, shards.start(0, data_dir=str(tmp_path / "state"), lease_s=LONG_LEASE_S))
        after = shards.view()
        assert (after.entry, after.route_map) == (before.entry, before.route_map)
        assert after.shards[0].lineage == before.shards[0].lineage
        assert after.shards[0].incarnation != before.shards[0].incarnation
        with raw_client(after) as returned:
            returned.client_id = client.raw.client_id
            assert returned.open().header.last_number == 1
            repeated = returned.push(1, client.table, [1], np.ones((1, 2)))
            assert (repeated.repeated_number, repeated.steps[0].table_step) == (True, 1)


def test_the_owner_s_state_takes_the_name_from_a_lost_process(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LEASE_S) as shards,
        pushing_client(shards) as client,
    ):
        client.push(1)
        shards.processes[0].kill()
        lost = shards.start(0, lease_s=LEASE_S)
        wait_for("the process without a state", lambda: is_lost(shards, 0), HANG_S)
        wait_serving(shards, shards.start(0, data_dir=str(tmp_path / "state"), lease_s=LEASE_S))
        assert lost.process.wait(HANG_S) == 1
        assert "fenced" in lost.log_text()
        with raw_client(shards.view()) as returned:
            assert returned.info("t").table_step == 1


def test_a_folder_of_another_cluster_is_refused_with_both_ids_and_left_as_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running_shards(tmp_path, data_dir=str(state), lease_s=LEASE_S) as shards:
        old = shards.view().entry
        assert shards.processes[0].terminate() == 0
        content = (state / "test" / "shard-0" / "CURRENT").read_bytes()
        flush(shards)
        wait_serving(shards, shards.start(0, lease_s=LEASE_S))
        new = shards.view().entry
        assert old is not None
        assert new is not None
        assert shards.processes[1].terminate() == 0
        refused = shards.start(0, data_dir=str(state), lease_s=LEASE_S)
        assert refused.process.wait(HANG_S) == 1
        text = refused.log_text()
        assert old.cluster_id in text
        assert new.cluster_id in text
        assert "give it its folder back; or delete this folder to start empty; or use another --cluster or --data-dir" in text
        assert (state / "test" / "shard-0" / "CURRENT").read_bytes() == content
        assert shards.view().entry == new


def test_shards_that_meet_an_emptied_redis_bring_their_cluster_back(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with running_shards(tmp_path, 2, data_dir=state, lease_s=LEASE_S) as shards, pushing_client(shards) as client:
        before = shards.view()
        client.push(1)
        for shard in shards.processes:
            assert shard.terminate() == 0
        flush(shards)
        again = [shards.start(index, data_dir=state, lease_s=LEASE_S) for index in (1, 0)]
        for shard in again:
            wait_serving(shards, shard)
        after = shards.view()
        assert (after.entry, after.route_map) == (before.entry, before.route_map)
        assert {entry.lineage for entry in after.shards.values()} == {entry.lineage for entry in before.shards.values()}
        with raw_client(after) as returned:
            assert returned.info("t").table_step == 1
        with contextlib.closing(shards.valkey.client()) as connection:
            assert connection.hkeys("shardam:test:tables") == [b"t"]


def test_a_client_of_another_cluster_or_of_a_stale_epoch_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, data_dir=str(tmp_path / "state"), lease_s=LEASE_S) as shards,
        pushing_client(shards) as client,
    ):
        before = client.raw.status().header.change_number
        assert reason_of(lambda: client.raw.open(cluster_id="0" * 16)) == "WRONG_CLUSTER"
        assert reason_of(lambda: client.raw.open(epoch=7)) == "STALE_ROUTE"
        row = (client.table, [1], np.ones((1, 2)))
        assert reason_of(lambda: client.raw.push(1, *row, cluster_id="0" * 16)) == "WRONG_CLUSTER"
        assert reason_of(lambda: client.raw.push(1, *row, epoch=7)) == "STALE_ROUTE"
        assert client.raw.status().header.change_number == before
