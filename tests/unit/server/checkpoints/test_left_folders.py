"""Folders of shards that the cluster has no more go, and no others."""

from __future__ import annotations

import dataclasses
import fcntl
from pathlib import Path

import pytest

from shardam_proto.registry import ClusterEntry
from shardam_proto.routing import RouteMap
from shardam_server.shard.checkpoints.left_folders import remove_left_folders
from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.file_names import CURRENT, LOCK, shard_folder

CLUSTER = ClusterEntry("c1", 4, 0)
MAP = RouteMap(epoch=3, num_shards=2)


def make(data_dir: Path, index: int, *, epoch: int = 2, cluster: ClusterEntry = CLUSTER) -> Path:
    folder = shard_folder(data_dir, "prod", index)
    folder.mkdir(parents=True)
    current = Current("prod", cluster, index, 5, 1, epoch, None, 1)
    (folder / CURRENT).write_text(current.to_json())
    (folder / "journal-000001").write_bytes(b"changes")
    (folder / LOCK).touch()
    return folder


def removed(data_dir: Path) -> list[Path]:
    return remove_left_folders(data_dir, "prod", CLUSTER.cluster_id, MAP)


def test_folders_from_before_the_map_whose_shards_are_no_more_are_removed(tmp_path: Path) -> None:
    folders = [make(tmp_path, index) for index in range(4)]
    assert removed(tmp_path) == folders[2:]
    assert [folder.exists() for folder in folders] == [True, True, False, False]
    assert removed(tmp_path) == []


@pytest.mark.parametrize(("epoch", "cluster"), [(3, CLUSTER), (4, CLUSTER), (2, dataclasses.replace(CLUSTER, cluster_id="c2"))])
def test_a_folder_of_another_cluster_or_not_from_before_the_map_stays(
    tmp_path: Path, epoch: int, cluster: ClusterEntry
) -> None:
    folder = make(tmp_path, 3, epoch=epoch, cluster=cluster)
    assert removed(tmp_path) == []
    assert (folder / CURRENT).exists()


def test_a_folder_that_a_process_holds_stays(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    with (folder / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert removed(tmp_path) == []
    assert removed(tmp_path) == [folder]


def test_what_cannot_be_read_or_is_no_shards_folder_stays(tmp_path: Path) -> None:
    damaged = make(tmp_path, 3)
    (damaged / CURRENT).write_text("{}")
    other = tmp_path / "prod" / "shard-next"
    other.mkdir()
    empty = shard_folder(tmp_path, "prod", 2)
    empty.mkdir()
    assert removed(tmp_path) == []
    assert damaged.exists()
    assert other.exists()
    assert empty.exists()


def test_a_data_folder_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    assert remove_left_folders(tmp_path / "none", "prod", "c1", MAP) == []
