"""Restores into a running cluster: what is loaded, what is refused, and what becomes of those that were connected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.processes import Shards, running_shards
from shardam_testing.pushing import HANG_S
from shardam_testing.raw_client import raw_client
from shardam_testing.restoring import (
    ROW_IDS,
    all_shards,
    create,
    make_checkpoint,
    push_all,
    refused,
    restore,
    restored,
    split,
    table_state,
    train,
    wait_until,
)

import shardam
from shardam import AdamOptions
from shardam_proto.errors import ClusterRestored, ReadOnly, ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, job_pb2

LR = AdamOptions(lr=0.1)
A, B, C = TableSpec("a", 4), TableSpec("b", 4), TableSpec("c", 4)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    with running_shards(tmp_path, 2, data_dir=str(tmp_path / "state")) as running:
        yield running


def outcomes(report: job_pb2.RestoreReport) -> dict[str, str]:
    return {table.table: job_pb2.TableOutcome.Name(table.outcome).removeprefix("TABLE_OUTCOME_") for table in report.tables}


@pytest.mark.case("C079")
def test_the_same_checkpoint_restored_again_and_again_is_the_same_state(shards: Shards) -> None:
    (table,) = create(shards, A)
    train(shards, table)
    saved = table_state(shards, "a")
    name = make_checkpoint(shards)
    for timeline in (2, 3, 4):
        report = restored(shards, "latest" if timeline == 4 else name)
        assert (report.name, report.timeline, outcomes(report)) == (name, timeline, {"a": "LOADED"})
        assert (report.tables[0].num_rows, report.tables[0].table_step) == (len(ROW_IDS), 3)
        assert table_state(shards, "a") == saved
        train(shards, table, 2)
        assert table_state(shards, "a") != saved


def test_a_client_of_the_former_timeline_is_told_that_the_cluster_was_restored(shards: Shards) -> None:
    (table,) = create(shards, A)
    with all_shards(shards) as clients:
        push_all(shards, table, clients, 1)
        name = make_checkpoint(shards)
        push_all(shards, table, clients, 2)
        restored(shards, name)
        for client, row_ids in zip(clients, split(shards), strict=True):
            push = client.push_request(3, table, row_ids, np.ones((len(row_ids), A.dim)), timeline=1)
            with pytest.raises(ClusterRestored, match="on timeline 2, the client on 1"):
                client.call(client.embedding.Push, push)
            with pytest.raises(ClusterRestored, match="on timeline 2, the client on 1"):
                client.open(timeline=1)
            assert client.open().header.timeline == 2  # whoever knows of no timeline begins anew
    train(shards, table, 1)


@pytest.mark.case("C069")
def test_tables_that_do_not_fit_are_refused_by_name_and_left_out_on_request(shards: Shards) -> None:
    created = create(shards, A, B)
    for table in created:
        train(shards, table)
    saved_a = table_state(shards, "a")
    both = make_checkpoint(shards, "a-and-b")
    restored(shards, both)
    # The cluster has a and c: a checkpoint of a and b fits only where that is said.
    (other,) = create(shards, C)
    train(shards, other)
    saved_c = table_state(shards, "c")
    a_and_c = make_checkpoint(shards, "all")
    restored(shards, a_and_c, checkpoint_pb2.RestoreOptions(tables=["a", "b"]))
    reason, problem = refused(shards, both)
    assert reason == "CHECKPOINT_MISMATCH"
    assert "missing in it are 'c', unexpected are none" in problem
    kept = restored(shards, both, checkpoint_pb2.RestoreOptions(allow_missing_tables=True))
    assert outcomes(kept) == {"a": "LOADED", "b": "LOADED", "c": "KEPT"}
    assert (table_state(shards, "a"), table_state(shards, "c")) == (saved_a, saved_c)
    alone = restored(shards, both, checkpoint_pb2.RestoreOptions(tables=["a"], weights_only=True))
    assert outcomes(alone) == {"a": "LOADED", "b": "KEPT", "c": "KEPT"}
    assert alone.tables[0].moments_reset
    step, found, weight, exp_avg, exp_avg_sq = table_state(shards, "a")
    assert (step, found, weight) == (0, saved_a[1], saved_a[2])
    assert not any(exp_avg)
    assert not any(exp_avg_sq)
    assert table_state(shards, "c") == saved_c


@pytest.mark.case("C080")
def test_tables_are_created_from_the_manifest_before_any_worker_has_announced_them(tmp_path: Path) -> None:
    specs = [TableSpec(name, 4) for name in ("first", "second", "third")]
    root = str(tmp_path / "checkpoints")
    (tmp_path / "one").mkdir()
    with running_shards(tmp_path / "one", 2, checkpoint_dir=root, seed="7") as shards:
        for steps, table in enumerate(create(shards, *specs), start=1):
            train(shards, table, steps)
        saved = {spec.name: table_state(shards, spec.name) for spec in specs}
        make_checkpoint(shards, "three")
    (tmp_path / "two").mkdir()
    with running_shards(tmp_path / "two", 3, checkpoint_dir=root) as shards:
        job = restore(shards, "three", only_if_empty=True)
        assert job.state == job_pb2.JOB_STATE_DONE, job
        assert all(table.created for table in job.report.tables)
        assert [table.table_step for table in job.report.tables] == [1, 2, 3]
        assert {spec.name: table_state(shards, spec.name) for spec in specs} == saved
        entry = shards.view().entry
        assert entry is not None
        assert (entry.num_shards, entry.seed) == (3, 7)  # the checkpoint's seed wins
        # A state is not replaced by a restore for an empty cluster.
        again = restore(shards, "three", only_if_empty=True)
        assert again.reason == "CHECKPOINT_MISMATCH"
        assert "leave --restore out" in again.problem
        assert {spec.name: table_state(shards, spec.name) for spec in specs} == saved


@pytest.mark.case("C083")
def test_a_read_only_restore_serves_pulls_and_refuses_pushes(shards: Shards) -> None:
    (table,) = create(shards, A)
    train(shards, table)
    saved = table_state(shards, "a")
    name = make_checkpoint(shards)
    report = restored(shards, name, checkpoint_pb2.RestoreOptions(read_only=True))
    assert report.tables[0].read_only
    assert table_state(shards, "a") == saved
    with all_shards(shards) as clients:
        assert clients[0].info("a").read_only
        with pytest.raises(ReadOnly):
            push_all(shards, table, clients, 1)
    assert table_state(shards, "a") == saved


def test_what_cannot_be_restored_leaves_the_running_state_untouched(shards: Shards) -> None:
    (table,) = create(shards, A)
    train(shards, table)
    name = make_checkpoint(shards)
    saved, view = table_state(shards, "a"), shards.view()
    folder = shards.folder / "state" / "checkpoints" / "test" / name
    files = sorted(folder.glob("shard-1-*.rows"))
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    reason, problem = refused(shards, name)
    assert reason == "CHECKPOINT_DAMAGED"
    assert files[0].name in problem
    files[0].write_bytes(content[:-1])
    reason, problem = refused(shards, name)
    assert (reason, files[0].name in problem) == ("CHECKPOINT_DAMAGED", True)
    assert refused(shards, "no-such")[0] == "UNKNOWN_CHECKPOINT"
    assert refused(shards, "../../etc")[0] == "BAD_OPTION"
    assert refused(shards, name, checkpoint_pb2.RestoreOptions(tables=["none"]))[0] == "CHECKPOINT_MISMATCH"
    assert (table_state(shards, "a"), shards.view()) == (saved, view)
    with raw_client(view) as client:
        assert client.open().header.timeline == 1


def test_nothing_that_workers_push_meanwhile_reaches_the_restored_state(shards: Shards) -> None:
    tables = create(shards, A, B)
    for table in tables:
        train(shards, table)
    saved = [table_state(shards, name) for name in "ab"]
    name = make_checkpoint(shards)
    ended: list[BaseException] = []
    steps: list[int] = []

    def work(place: int) -> None:
        with shardam.connect(shards.valkey.url, cluster=shards.cluster) as cluster:
            table = cluster.table("ab"[place % 2])
            try:
                while True:
                    steps.append(table.push(np.arange(200), np.ones((200, A.dim), np.float32), LR).step)
            except ShardamError as error:
                ended.append(error)

    workers = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for worker in workers:
        worker.start()
    wait_until("the workers to train", lambda: len(steps) > 30)
    restored(shards, name)
    for worker in workers:
        worker.join(HANG_S)
    assert [type(error) for error in ended] == [ClusterRestored] * 3, ended
    assert [table_state(shards, one) for one in "ab"] == saved
