"""Shards that come back without the state that their cluster knows: LOST until told to forget it (PROTOCOL.md, section 6)."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from shardam_testing.processes import Shards, clean_environment, running_shards
from shardam_testing.pushing import HANG_S, flush, is_lost, reason_of, wait_serving
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardLost
from shardam_proto.registry import ClusterView, Keys
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, shard_pb2
from shardam_server.shard.known_lineages import HighMark

LEASE_S = "1"
"""Until it runs out, a killed shard's name is waited for."""

REMEDY = "shardam forget-shard --index 1"


def test_a_shard_whose_folder_was_deleted_serves_nothing_and_names_the_remedy(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running_shards(tmp_path, 2, data_dir=str(state), lease_s=LEASE_S) as shards:
        view, table = train_a_little(shards)
        shards.processes[1].kill()
        shutil.rmtree(state / "test" / "shard-1")
        shard = shards.start(1, data_dir=str(state), lease_s=LEASE_S)
        wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
        with raw_client(shards.view(), 1) as client:
            own = owned_by(view, 1)
            calls = (
                client.open,
                lambda: client.pull(table, own),
                lambda: client.read(table, own),
                lambda: client.push(1, table, own, np.ones((len(own), 2))),
                lambda: client.info("t"),
            )
            for call in calls:
                with pytest.raises(ShardLost, match=REMEDY):
                    call()
            status = client.status()
            assert status.state == shard_pb2.SERVING_STATE_LOST
            assert REMEDY in status.waiting_for
            assert (status.header.lineage, status.num_rows, status.num_tables) == (0, 0, 0)
        with raw_client(shards.view(), 0) as home:
            # A table that one shard could not hold is made nowhere.
            with pytest.raises(ShardLost, match=REMEDY):
                home.create(TableSpec("new", 2))
            assert home.info("t").table_step == 2
        http = shards.view().shards[1].http_address
        assert urllib.request.urlopen(f"http://{http}/healthz", timeout=10).status == 200
        assert "shardam_queue_depth" in urllib.request.urlopen(f"http://{http}/metrics", timeout=10).read().decode()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"http://{http}/readyz", timeout=10)
        assert (error.value.code, REMEDY in error.value.read().decode()) == (503, True)
        assert REMEDY in shard.log_text()
        assert shard.terminate() == 0
        assert not (state / "test" / "shard-1" / "CURRENT").exists()


@pytest.mark.parametrize("keeps_state", [True, False], ids=["folder deleted", "memory only"])
def test_a_lost_shard_that_is_told_to_forget_serves_empty_on_a_new_lineage(tmp_path: Path, keeps_state: bool) -> None:
    state = tmp_path / "state" if keeps_state else None
    folder = str(state or "none")
    with running_shards(tmp_path, 2, data_dir=folder, lease_s=LEASE_S) as shards:
        view, table = train_a_little(shards)
        shards.processes[1].kill()
        if state is not None:
            shutil.rmtree(state / "test" / "shard-1")
        shards.start(1, data_dir=folder, lease_s=LEASE_S)
        wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
        done = forget(shards, 1)
        assert done.returncode == 0, done.stderr
        assert f"given up: all rows and moments that shard 1 held (lineage {view.shards[1].lineage})" in done.stdout
        after = shards.view()
        entry = after.shards[1]
        assert (entry.lost, entry.ready, entry.lineage != view.shards[1].lineage) == (False, True, True)
        assert (after.entry, after.route_map, after.shards[0]) == (view.entry, view.route_map, view.shards[0])
        again = forget(shards, 1)
        assert (again.returncode, "nothing was given up now" in again.stdout) == (0, True)
        with raw_client(after, 1) as client:
            answer = client.open()
            assert answer.header.lineage == entry.lineage
            own = owned_by(view, 1)
            assert client.info("t").table_step == 2  # taken over from shard 0
            assert not client.read(table, own).rows.found.strip(b"\0")
            assert client.push(1, table, own, np.ones((len(own), 2))).steps[0].table_step == 3
        # Killed again, it comes back with what it has acknowledged, if it has a folder, and is LOST if it has none.
        shards.processes[-1].kill()
        last = shards.start(1, data_dir=folder, lease_s=LEASE_S)
        if state is None:
            wait_for("the shard to be LOST again", lambda: is_lost(shards, 1), HANG_S)
        else:
            assert wait_serving(shards, last).lineage == entry.lineage
            with raw_client(shards.view(), 1) as client:
                assert client.info("t").table_step == 3


def test_a_shard_that_has_its_state_is_not_told_to_forget_it(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2, lease_s=LEASE_S) as shards:
        view, _ = train_a_little(shards)
        refused = forget(shards, 1)
        assert refused.returncode == 1
        assert "shard 1 is not LOST: it has its state, 5 rows, and keeps it" in refused.stderr
        assert shards.view().shards == view.shards
        for index, message in ((2, "there is no shard 2"), (1, "is not registered: start it first")):
            if index == 1:
                shards.processes[1].terminate()
            failed = forget(shards, index)
            assert (failed.returncode, message in failed.stderr, "Traceback" in failed.stderr) == (1, True, False)


def test_a_folder_that_was_given_up_does_not_come_back(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with running_shards(tmp_path, 2, data_dir=state, lease_s=LEASE_S) as shards:
        train_a_little(shards)
        shards.processes[1].kill()
        other = shards.start(1, lease_s=LEASE_S)
        wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
        assert forget(shards, 1).returncode == 0
        assert other.terminate() == 0
        current = (Path(state) / "test" / "shard-1" / "CURRENT").read_bytes()
        old = shards.start(1, data_dir=state, lease_s=LEASE_S)
        wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
        with raw_client(shards.view(), 1) as client:
            assert reason_of(client.open) == "SHARD_LOST"
            assert client.status().num_rows == 0
        assert old.terminate() == 0
        assert (Path(state) / "test" / "shard-1" / "CURRENT").read_bytes() == current


def test_a_shard_is_lost_though_redis_was_emptied_because_its_peers_remember(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2, lease_s=LEASE_S) as shards:
        view, _ = train_a_little(shards)
        shards.processes[1].kill()
        flush(shards)
        shards.start(1, lease_s=LEASE_S)
        wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
        assert shards.view().entry == view.entry


def test_home_without_its_folder_is_lost_when_a_shard_with_its_own_brings_the_cluster_back(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running_shards(tmp_path, 2, data_dir=str(state), lease_s=LEASE_S) as shards:
        view, _ = train_a_little(shards)
        for shard in shards.processes:
            assert shard.terminate() == 0
        shutil.rmtree(state / "test" / "shard-0")
        flush(shards)
        wait_serving(shards, shards.start(1, data_dir=str(state), lease_s=LEASE_S))
        shards.start(0, data_dir=str(state), lease_s=LEASE_S)
        wait_for("home to be LOST", lambda: is_lost(shards, 0), HANG_S)
        assert shards.view().entry == view.entry
        assert forget(shards, 0).returncode == 0
        with raw_client(shards.view(), 0) as home:
            assert home.info("t").table_step == 2
            home.create(TableSpec("new", 2))


def test_no_shard_starts_empty_while_another_is_away_because_it_takes_over_its_steps(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running_shards(tmp_path, 2, data_dir=str(state), lease_s=LEASE_S) as shards:
        train_a_little(shards)
        for shard in shards.processes:
            shard.kill()
        shutil.rmtree(state / "test" / "shard-1")
        shards.start(1, data_dir=str(state), lease_s=LEASE_S)
        wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
        wait_for("the lease of home to run out", lambda: 0 not in shards.view().shards, HANG_S)
        refused = forget(shards, 1)
        assert refused.returncode == 1
        assert "shards [0] do not: start them and try again" in refused.stderr
        assert is_lost(shards, 1)
        wait_serving(shards, shards.start(0, data_dir=str(state), lease_s=LEASE_S))
        assert forget(shards, 1).returncode == 0
        assert steps(shards) == [2, 2]


def test_shards_that_are_lost_together_name_each_other_and_are_given_up_together_if_told_so(tmp_path: Path) -> None:
    with running_shards(tmp_path, 3, lease_s=LEASE_S) as shards:
        train_a_little(shards)
        for index in (1, 2):
            shards.processes[index].kill()
            shards.start(index, lease_s=LEASE_S)
        wait_for("both to be LOST", lambda: is_lost(shards, 1) and is_lost(shards, 2), HANG_S)
        refused = forget(shards, 1)
        assert refused.returncode == 1
        assert "shards [2] are LOST, too" in refused.stderr
        assert "tell each of shards [1, 2] `shardam forget-shard --without-lost`" in refused.stderr
        assert forget(shards, 1, "--without-lost").returncode == 0
        assert forget(shards, 2).returncode == 0
        assert steps(shards) == [2, 2, 2]


def test_a_forgotten_shard_ends_all_clients_and_keys_of_before_everywhere_and_says_so(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2, lease_s=LEASE_S) as shards:
        view = shards.view()
        with raw_client(view, 0) as home, raw_client(view, 1) as other:
            table = home.create(TableSpec("t", 2))[0]
            other.client_id = home.client_id
            push_twice(home, table, owned_by(view, 0))
            other.open()
            other.push(1, table, owned_by(view, 1), np.ones((5, 2)))
            shards.processes[1].kill()
            shards.start(1, lease_s=LEASE_S)
            wait_for("the shard to be LOST", lambda: is_lost(shards, 1), HANG_S)
            done = forget(shards, 1)
            assert done.returncode == 0, done.stderr
            assert "programs that were connected before raise ShardLost or ClientClosed" in done.stdout
            assert "Idempotency-Keys of before are refused: use new ones" in done.stdout
            third = (3, table, owned_by(view, 0), np.ones((5, 2)))
            assert reason_of(lambda: home.push(*third)) == "CLIENT_CLOSED"
            with raw_client(shards.view(), 1) as empty:
                empty.client_id = home.client_id
                assert reason_of(empty.open) == "CLIENT_CLOSED"
            home.leave()
            assert steps(shards) == [2, 2]


def test_an_older_copy_of_its_folder_is_lost_unless_the_loss_is_accepted(tmp_path: Path) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    with running_shards(tmp_path, 2, data_dir=str(state), lease_s=LEASE_S) as shards:
        view, table = train_a_little(shards)
        assert shards.processes[1].terminate() == 0
        shutil.copytree(state, copy)
        owner = shards.start(1, data_dir=str(state), lease_s=LEASE_S)
        wait_serving(shards, owner)
        with raw_client(shards.view(), 1) as client:
            push_twice(client, table, owned_by(view, 1))
            seen = client.status().header.change_number
        wait_for("the change to be known", lambda: mark_of(shards, 1) == seen, HANG_S)
        owner.kill()
        wait_renewed(shards, 0)
        flush(shards)  # home remembers
        wait_for("home to write it again", lambda: mark_of(shards, 1) == seen, HANG_S)
        old = shards.start(1, data_dir=str(copy), lease_s=LEASE_S)
        wait_for("the copy to be LOST", lambda: is_lost(shards, 1), HANG_S)
        with raw_client(shards.view(), 1) as client:
            message = rf"up to change \d+, and the cluster has seen change {seen};.*newer folder.*--truncate-journal.*{REMEDY}"
            with pytest.raises(ShardLost, match=message):
                client.open()
        newest = shards.start(1, data_dir=str(state), lease_s=LEASE_S)  # takes the name from the LOST process
        wait_serving(shards, newest)
        assert steps(shards) == [2, 4]
        assert old.process.wait(HANG_S) == 1
        newest.kill()
        shards.environment = {"SHARDAM_TRUNCATE_JOURNAL": "true"}
        accepted = shards.start(1, data_dir=str(copy), lease_s=LEASE_S)
        wait_serving(shards, accepted)
        assert "what came between is lost" in accepted.log_text()
        accepted.kill()
        shards.environment = {}
        wait_serving(shards, shards.start(1, data_dir=str(copy), lease_s=LEASE_S))
        assert steps(shards) == [2, 2]


def steps(shards: Shards) -> list[int]:
    """Returns the step of table "t" on each shard."""
    view, found = shards.view(), []
    for index in range(shards.count):
        with raw_client(view, index) as client:
            found.append(client.info("t").table_step)
    return found


def wait_renewed(shards: Shards, index: int) -> None:
    """Waits until a shard has read in Redis what is there now."""
    with contextlib.closing(shards.valkey.client()) as connection:
        for _ in range(2):  # the first may have been under way
            connection.hdel(Keys(shards.cluster).marks, str(index))
            wait_for("the shard to renew its name", lambda: mark_of(shards, index) is not None, HANG_S)


def mark_of(shards: Shards, index: int) -> int | None:
    """Returns the highest change that Redis knows of a shard's folder."""
    with contextlib.closing(shards.valkey.client()) as connection:
        marks = cast("dict[bytes, bytes]", connection.hgetall(Keys(shards.cluster).marks))
    text = marks.get(str(index).encode())
    return None if text is None else HighMark.from_text(text.decode()).change_number


def train_a_little(shards: Shards) -> tuple[ClusterView, common_pb2.TableInfo]:
    """Pushes two steps of table "t" to both shards; shard 1 then has five rows."""
    view = shards.view()
    with raw_client(view, 0) as home, raw_client(view, 1) as other:
        table = home.create(TableSpec("t", 2))[0]
        for client, index in ((home, 0), (other, 1)):
            push_twice(client, table, owned_by(view, index))
    return view, table


def push_twice(client: RawClient, table: common_pb2.TableInfo, row_ids: list[int]) -> None:
    client.open()
    for number in (1, 2):
        client.push(number, table, row_ids, np.ones((len(row_ids), 2)))


def owned_by(view: ClusterView, shard: int) -> list[int]:
    assert view.route_map is not None
    row_ids = np.arange(100, dtype=np.int64)
    return [int(row_id) for row_id in row_ids[view.route_map.shards_of(row_ids) == shard][:5]]


def forget(shards: Shards, index: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs `shardam forget-shard`."""
    command = ["forget-shard", "--index", str(index), "--redis", shards.valkey.url, "--cluster", shards.cluster, *flags]
    return subprocess.run(
        [sys.executable, "-m", "shardam_server", *command],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
