"""Checkpoints as a program makes them and goes back to them, on real shards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardam
from shardam.errors import (
    BadOption,
    CheckpointMismatch,
    ClusterRestored,
    ReadOnly,
    SchemaMismatch,
    UnknownCheckpoint,
)

OPTIONS = shardam.AdamOptions(lr=0.1)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shardam.LocalCluster]:
    with shardam.LocalCluster(2, checkpoint_dir=tmp_path_factory.mktemp("checkpoints"), device="cpu") as local:
        yield local


def bits(rows: shardam.Rows) -> list[bytes]:
    return [getattr(rows, name).tobytes() for name in ("row_ids", "weight", "exp_avg", "exp_avg_sq", "step", "found")]


def train(table: shardam.Table, seed: int, steps: int = 5) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        row_ids = rng.integers(0, 10**12, 50)
        table.push(row_ids, rng.normal(size=(50, table.dim)).astype(np.float32), OPTIONS)


def all_ids(table: shardam.Table) -> np.ndarray:
    return np.sort(np.concatenate([rows.row_ids for rows in table.scan()]))


def test_a_program_goes_back_to_a_checkpoint_and_trains_on_to_the_same_bits(local: shardam.LocalCluster) -> None:
    table = local.create_table(shardam.TableSpec("resumed", 4))
    train(table, 1)
    job = local.checkpoint({"epoch": 3, "w": torch.arange(3, dtype=torch.bfloat16)}, name="first")
    assert (job.name, job.state, job.problem) == ("first", "done", "")
    assert job.done_bytes > 0
    train(table, 2)
    expected, row_ids = bits(table.rows(all_ids(table))), all_ids(table)
    report = local.restore("first")
    assert report.table("resumed").outcome == "loaded"
    assert report.table("resumed").table_step == 5
    assert report.table("resumed").last_options == OPTIONS
    train(table, 2)  # the same object goes on
    assert bits(table.rows(row_ids)) == expected
    extra = local.extra("first")
    assert isinstance(extra, dict)
    assert extra["epoch"] == 3
    assert torch.equal(extra["w"], torch.arange(3, dtype=torch.bfloat16))


def test_other_clients_of_the_former_timeline_are_told(local: shardam.LocalCluster) -> None:
    table = local.create_table(shardam.TableSpec("told", 4))
    train(table, 1)
    local.checkpoint(name="told")
    with shardam.connect(local.redis_url, cluster=local.name) as other:
        others_table = other.table("told")
        train(others_table, 3)
        local.restore("told", allow_missing_tables=True)
        with pytest.raises(ClusterRestored, match="connect again"):
            train(others_table, 3)
    assert table.stats().table_step == 5


def test_modules_and_their_optimizer_train_on_after_a_restore(local: shardam.LocalCluster) -> None:
    items = shardam.Embedding(None, 4, table="items", cluster=local)
    sparse = shardam.SparseAdam([items], lr=0.1)

    def step() -> None:
        items(torch.arange(10)).square().sum().backward()
        sparse.step()
        sparse.zero_grad()

    step()
    local.checkpoint(name="modules")
    step()
    sparse.synchronize()
    expected = bits(local.table("items").rows(range(10)))
    local.restore("modules", allow_missing_tables=True)
    step()
    sparse.synchronize()
    assert bits(local.table("items").rows(range(10))) == expected


def test_queued_pushes_are_in_a_checkpoint(local: shardam.LocalCluster) -> None:
    items = shardam.Embedding(None, 4, table="queued", cluster=local)
    sparse = shardam.SparseAdam([items], lr=0.1)
    for _ in range(5):
        items(torch.arange(1000)).sum().backward()
        sparse.step()
        sparse.zero_grad()
    local.checkpoint(name="queued", wait=False).wait()
    local.restore("queued", tables=["queued"], allow_missing_tables=True, allow_unexpected_tables=True)
    assert local.table("queued").stats().table_step == 5


def test_checkpoints_are_listed_verified_and_deleted(local: shardam.LocalCluster) -> None:
    train(local.create_table(shardam.TableSpec("listed", 4)), 1)
    local.checkpoint(b"x", name="listed")
    newest = local.checkpoints()[0]
    assert (newest.name, newest.complete, newest.num_shards, newest.extra_ranks) == ("listed", True, 2, (0,))
    verified = local.verify("latest")
    assert verified.name == "listed"
    assert "listed" in verified.tables
    local.delete_checkpoint("listed")
    assert "listed" not in [info.name for info in local.checkpoints()]
    with pytest.raises(UnknownCheckpoint, match="listed"):
        local.restore("listed")


def test_a_restore_that_does_not_fit_changes_nothing(local: shardam.LocalCluster) -> None:
    train(local.create_table(shardam.TableSpec("old", 4)), 1)
    local.checkpoint(name="before")
    table = local.create_table(shardam.TableSpec("new", 4))
    train(table, 1)
    with pytest.raises(CheckpointMismatch, match="new"):
        local.restore("before")
    assert table.stats().table_step == 5
    for name in ("../../etc", "/etc"):
        with pytest.raises(BadOption):
            local.restore(name)
    report = local.restore("before", allow_missing_tables=True)
    assert report.table("new").outcome == "kept"


def test_an_addition_of_many_parts_comes_back(local: shardam.LocalCluster) -> None:
    extra = np.random.default_rng(0).integers(0, 256, 9 * 2**20 + 17, dtype=np.uint8)
    local.checkpoint(extra, name="large")
    found = local.extra("large")
    assert isinstance(found, np.ndarray)
    assert (found == extra).all()
    with pytest.raises(UnknownCheckpoint, match="rank 3 added nothing"):
        local.extra("large", rank=3)


def test_an_addition_that_cannot_be_stored_begins_nothing(local: shardam.LocalCluster) -> None:
    before = local.checkpoints()
    with pytest.raises(TypeError, match=r"extra\['model'\] is a torch.nn.modules.linear.Linear"):
        local.checkpoint({"model": torch.nn.Linear(1, 1)})
    assert local.checkpoints() == before


def test_restored_tables_may_be_read_only(local: shardam.LocalCluster) -> None:
    table = local.create_table(shardam.TableSpec("served", 4))
    train(table, 1)
    local.checkpoint(name="served")
    report = local.restore("served", tables=["served"], read_only=True)
    assert report.table("served").read_only
    assert table.pull([1, 2]).shape == (2, 4)
    with pytest.raises(ReadOnly, match="served"):
        train(table, 2)


def test_members_of_a_group_ask_together_each_with_its_own_addition(tmp_path: Path) -> None:
    with shardam.LocalCluster(2, checkpoint_dir=tmp_path, device="cpu") as local:
        table = local.create_table(shardam.TableSpec("group", 4))
        names: dict[int, str] = {}

        def work(rank: int) -> None:
            with shardam.connect(local.redis_url, cluster=local.name, mode="sync", rank=rank, world_size=2) as member:
                mine = member.table("group")
                train(mine, rank, 3)
                names[rank] = member.checkpoint({"rank": rank}).name
                train(mine, rank, 2)

        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert names[0] == names[1]
        assert [local.extra(names[0], rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
        assert local.checkpoints()[0].extra_ranks == (0, 1)
        assert table.stats().table_step == 5
        local.restore()
        assert table.stats().table_step == 3


def test_another_cluster_restores_the_tables_that_it_has_created_itself(tmp_path: Path) -> None:
    with shardam.LocalCluster(2, data_dir=tmp_path / "a", checkpoint_dir=tmp_path / "all", device="cpu") as local:
        table = local.create_table(shardam.TableSpec("moved", 4))
        train(table, 1)
        folder = Path(local.verify(local.checkpoint(name="here").name).folder)
        expected = bits(table.rows(all_ids(table)))
    with shardam.LocalCluster(3, checkpoint_dir=tmp_path / "all", device="cpu") as other:
        table = other.create_table(shardam.TableSpec("moved", 4))
        other.restore(os.path.relpath(folder, tmp_path / "all"))
        assert bits(table.rows(all_ids(table))) == expected
        other.create_table(shardam.TableSpec("wide", 8))
        other.checkpoint(name="wide")
    with shardam.LocalCluster(1, checkpoint_dir=tmp_path / "all", device="cpu") as third:
        third.create_tables([shardam.TableSpec("moved", 4), shardam.TableSpec("wide", 16)])
        with pytest.raises(SchemaMismatch, match="wide"):
            third.restore("wide")


def test_a_cluster_without_a_folder_says_how_to_have_one() -> None:
    with shardam.LocalCluster(1, device="cpu") as local:
        with pytest.raises(BadOption, match="pass checkpoint_dir=, or data_dir=, to LocalCluster"):
            local.checkpoint()
        with pytest.raises(BadOption, match="--checkpoint-dir"):
            local.checkpoints()
