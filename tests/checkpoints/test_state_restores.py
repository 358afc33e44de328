"""Restores that meet kills, lost folders and an emptied Redis: once decided, every shard finishes by itself."""

from __future__ import annotations

import contextlib
import http.client
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardam_testing.gated_loads import GATE
from shardam_testing.processes import Shards, running_shards
from shardam_testing.pushing import flush, is_lost, reason_of, wait_serving
from shardam_testing.raw_client import raw_client
from shardam_testing.restoring import (
    begin_restore,
    create,
    header,
    home_checkpoints,
    make_checkpoint,
    restored,
    table_state,
    train,
    wait_ended,
    wait_until,
)

from shardam_proto.channels import call
from shardam_proto.registry import Keys, Plan, ShardEntry
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, common_pb2, job_pb2, shard_pb2

GATED = "shardam_testing.gated_loads"

State = tuple[int, bytes, bytes, bytes, bytes]


@contextlib.contextmanager
def trained_shards(folder: Path, module: str = "shardam_server") -> Iterator[tuple[Shards, common_pb2.TableInfo, str, State]]:
    """Starts shards with a checkpoint, trained on behind it; yields them, a table, the checkpoint and what it holds."""
    root = str(folder / "checkpoints")
    with running_shards(folder, 2, module=module, data_dir=str(folder / "state"), checkpoint_dir=root) as shards:
        (table,) = create(shards, TableSpec("t", 4))
        train(shards, table)
        saved = table_state(shards, "t")
        name = make_checkpoint(shards)
        train(shards, table, 2)
        yield shards, table, name, saved


def start_again(shards: Shards, index: int, folder: Path) -> None:
    """Starts a shard that has ended, with its own folder, and waits until it serves."""
    started = shards.start(index, data_dir=str(folder / "state"), checkpoint_dir=str(folder / "checkpoints"))
    wait_serving(shards, started)


def plan_of(shards: Shards) -> Plan | None:
    with contextlib.closing(shards.valkey.client()) as connection:
        value = connection.get(Keys(shards.cluster).plan)
    return None if value is None else Plan.from_json(value)


@contextlib.contextmanager
def restore_at_the_gate(shards: Shards, name: str, folder: Path) -> Iterator[None]:
    """Begins a restore, and yields once it is decided and both shards have stopped serving, but load nothing yet."""
    gate = folder / "checkpoints" / shards.cluster / GATE
    gate.touch()
    begin_restore(shards, name)
    wait_until("the plan to be decided", lambda: plan_of(shards) is not None)
    wait_until("the shards to stop serving", lambda: all(one.lineage == 0 for one in shards.view().shards.values()))
    yield
    gate.unlink(missing_ok=True)


def test_a_lost_shard_comes_back_by_a_restore(tmp_path: Path) -> None:
    with trained_shards(tmp_path) as (shards, table, name, saved):
        shards.processes[1].kill()
        shutil.rmtree(tmp_path / "state" / "test" / "shard-1")
        shards.start(1, data_dir=str(tmp_path / "state"), checkpoint_dir=str(tmp_path / "checkpoints"))
        wait_until("the shard to be LOST", lambda: is_lost(shards, 1))
        restored(shards, name)
        assert table_state(shards, "t") == saved
        train(shards, table, 1)
        after = table_state(shards, "t")
        shards.processes[-1].kill()
        start_again(shards, 1, tmp_path)
        assert table_state(shards, "t") == after


@pytest.mark.parametrize("killed", [0, 1], ids=["home", "another shard"])
def test_a_shard_killed_after_the_decision_finishes_at_its_next_start(tmp_path: Path, killed: int) -> None:
    with trained_shards(tmp_path, GATED) as (shards, table, name, saved):
        with restore_at_the_gate(shards, name, tmp_path):
            shards.processes[killed].kill()
        start_again(shards, killed, tmp_path)
        shards.wait_ready()
        assert table_state(shards, "t") == saved
        train(shards, table, 1)
        after = table_state(shards, "t")
        for index in (0, 1):  # what was taken over is a state as any other
            shards.processes[index if index != killed else -1].kill()
        flags = {"data_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
        for started in [shards.start(index, **flags) for index in (0, 1)]:
            wait_serving(shards, started)
        assert table_state(shards, "t") == after


def test_a_state_that_a_kill_has_made_useless_is_not_missed_after_the_decision(tmp_path: Path) -> None:
    flags = {"data_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints"), "journal": "off"}
    with running_shards(tmp_path, 2, module=GATED, **flags) as shards:
        (table,) = create(shards, TableSpec("t", 4))
        train(shards, table)
        saved = table_state(shards, "t")
        name = make_checkpoint(shards)
        with restore_at_the_gate(shards, name, tmp_path):
            shards.processes[1].kill()  # what it had was in memory alone
        wait_serving(shards, shards.start(1, **flags))
        shards.wait_ready()
        assert table_state(shards, "t") == saved


def test_a_redis_emptied_after_the_decision_is_told_of_it_again(tmp_path: Path) -> None:
    with trained_shards(tmp_path, GATED) as (shards, _, name, saved):
        with restore_at_the_gate(shards, name, tmp_path):
            decided = plan_of(shards)
            flush(shards)
            wait_until("the plan to be back", lambda: plan_of(shards) == decided)
        shards.wait_ready()
        assert table_state(shards, "t") == saved
        flush(shards)
        wait_until("the plan to be back", lambda: plan_of(shards) == decided)
        shards.wait_ready()
        assert table_state(shards, "t") == saved


@pytest.mark.case("C139")
def test_a_shard_that_loads_a_checkpoint_is_live_and_not_ready(tmp_path: Path) -> None:
    with trained_shards(tmp_path, GATED) as (shards, _, name, saved):
        with raw_client(shards.view()) as raw:
            with restore_at_the_gate(shards, name, tmp_path):
                for entry in shards.view().shards.values():
                    assert not entry.ready
                    assert http_status(entry, "/healthz") == 200
                    assert http_status(entry, "/readyz") == 503
                status = raw.status()
                assert status.state == shard_pb2.SERVING_STATE_STARTING
                assert name in status.waiting_for
                assert reason_of(raw.open) == "NOT_READY"  # retryable: a worker waits
            shards.wait_ready()
        assert all(http_status(entry, "/readyz") == 200 for entry in shards.view().shards.values())
        assert table_state(shards, "t") == saved


def test_a_decided_restore_whose_files_are_gone_is_followed_by_another_one(tmp_path: Path) -> None:
    with trained_shards(tmp_path, GATED) as (shards, table, name, saved):
        other = make_checkpoint(shards)
        later = table_state(shards, "t")
        gate = tmp_path / "checkpoints" / shards.cluster / GATE
        gate.touch()
        job = begin_restore(shards, name)
        wait_until("the plan to be decided", lambda: plan_of(shards) is not None)
        assert reason_of(lambda: delete(shards, name)) == "CHECKPOINT_RUNNING"
        for path in (tmp_path / "checkpoints" / shards.cluster / name).glob("shard-1-*"):
            path.unlink()
        gate.unlink()
        with raw_client(shards.view(), 1) as raw:
            wait_until("the loss to be said", lambda: "is missing" in raw.status().waiting_for)
        restored(shards, other)
        assert table_state(shards, "t") == later != saved
        ended = wait_ended(shards, job)
        assert (ended.state, ended.reason) == (job_pb2.JOB_STATE_FAILED, "CHECKPOINT_FAILED")
        assert "another restore" in ended.problem
        train(shards, table, 1)


def delete(shards: Shards, name: str) -> None:
    with home_checkpoints(shards) as stub:
        request = checkpoint_pb2.DeleteCheckpointRequest(header=header(), name=name)
        call(stub.DeleteCheckpoint, request, timeout_s=10.0, token=None, peer="home")


def http_status(entry: ShardEntry, path: str) -> int:
    """What a shard's own listener answers."""
    connection = http.client.HTTPConnection(entry.http_address, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status
