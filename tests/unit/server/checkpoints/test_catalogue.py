"""The catalogue: which checkpoints there are, which is the newest complete one, and nothing outside the root folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from shardam_testing.checkpoint_files import CLUSTER, make_states, manifest_of, push_rows, save, write_shard

from shardam_proto.errors import BadOption, CheckpointDamaged, CheckpointFailed, UnknownCheckpoint
from shardam_proto.schema import TableSpec
from shardam_server.shard.checkpoints.catalogue import ROOT_ID, Catalogue
from shardam_server.shard.checkpoints.file_names import MANIFEST
from shardam_server.shard.checkpoints.folders import read_manifest
from shardam_server.shard.state import ShardState

SPECS = (TableSpec("words", 2),)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def catalogue(root: Path) -> Catalogue:
    catalogue = Catalogue(root, CLUSTER)
    catalogue.prepare()
    return catalogue


def trained(num_shards: int = 2) -> list[ShardState]:
    states = make_states(SPECS, num_shards)
    push_rows(states, "words", range(20))
    return states


def automatic(catalogue: Catalogue, time_s: float) -> str:
    """A complete checkpoint with a name made by itself."""
    states, folder = trained(1), catalogue.new_folder()
    shard = write_shard(catalogue.root, folder, states[0], 0, 1)
    catalogue.complete(manifest_of(folder.name, states, [shard], time_s))
    return folder.name


def listed(catalogue: Catalogue) -> list[tuple[str, bool]]:
    return [(entry.name, entry.complete) for entry in catalogue.list()]


def test_a_complete_checkpoint_is_listed_and_read(catalogue: Catalogue, root: Path) -> None:
    manifest, folder = save(root, trained())
    assert folder == root / CLUSTER / "one"
    assert listed(catalogue) == [("one", True)]
    assert catalogue.read("one") == (manifest, folder)
    assert catalogue.read("latest") == (manifest, folder)
    assert catalogue.read("oak/one") == (manifest, folder)
    assert catalogue.read(str(folder)) == (manifest, folder)
    assert catalogue.relative(folder) == "oak/one"
    latest = catalogue.latest()
    assert latest is not None
    assert (latest.manifest, latest.time_s) == (manifest, 1e9)


def test_the_newest_is_the_one_that_was_cut_last(catalogue: Catalogue, root: Path) -> None:
    for name, time_s in [("b", 20.0), ("a", 30.0), ("c", 10.0)]:
        save(root, trained(1), name, time_s=time_s)
    assert listed(catalogue) == [("a", True), ("b", True), ("c", True)]
    assert catalogue.resolve("latest").name == "a"


def test_a_checkpoint_of_another_cluster_is_read_by_its_path_alone(root: Path) -> None:
    manifest, folder = save(root, trained())
    other = Catalogue(root, "elm")
    other.prepare()
    assert list(other.names()) == []
    assert other.read("oak/one") == (manifest, folder)
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 'one'"):
        other.read("one")
    with pytest.raises(UnknownCheckpoint, match="no complete checkpoint"):
        other.read("latest")


@pytest.mark.case("C073")
def test_a_checkpoint_that_lacks_a_part_is_not_complete_and_latest_is_the_one_before(catalogue: Catalogue, root: Path) -> None:
    states = trained(3)
    save(root, states, "before", time_s=1.0)
    folder = catalogue.new_folder("torn")
    for index in (0, 1):
        write_shard(root, folder, states[index], index, 3)
    entries = {entry.name: entry for entry in catalogue.list()}
    assert entries["before"].complete
    assert not entries["torn"].complete
    assert catalogue.resolve("latest").name == "before"
    with pytest.raises(CheckpointDamaged) as error:
        catalogue.read("torn")
    assert str(folder) in str(error.value)
    assert "manifest.json is missing, and of shards 0 to 2 there are files of [0, 1] only" in str(error.value)


@pytest.mark.case("C073")
@pytest.mark.case("C074")
def test_no_manifest_is_written_for_a_part_that_home_does_not_see(catalogue: Catalogue, root: Path) -> None:
    states, folder = trained(2), catalogue.new_folder("one")
    shards = [write_shard(root, folder, state, index, 2) for index, state in enumerate(states)]
    (folder / "shard-1-of-2-000.rows").unlink()
    with pytest.raises(
        CheckpointDamaged, match=r"shard-1-of-2-000.rows is damaged: it is missing.*shard 1 wrote it on host host-a"
    ):
        catalogue.complete(manifest_of("one", states, shards))
    assert not (folder / MANIFEST).exists()


@pytest.mark.case("C073")
@pytest.mark.parametrize("name", ["shard-0-of-2-000.rows", "shard-1-of-2-001.rows"])
def test_a_file_that_is_missing_or_too_short_is_named_in_the_list(catalogue: Catalogue, root: Path, name: str) -> None:
    _, folder = save(root, trained())
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    [entry] = catalogue.list()
    assert f"{folder / name} is damaged: it has {len(data) - 1} bytes, {len(data)} were written" in entry.problem
    (folder / name).unlink()
    [entry] = catalogue.list()
    assert f"{folder / name} is damaged: it is missing" in entry.problem
    assert catalogue.latest() is None


def test_a_manifest_is_written_once(catalogue: Catalogue, root: Path) -> None:
    manifest, folder = save(root, trained())
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(CheckpointFailed, match="File exists"):
        catalogue.complete(manifest)
    assert (folder / MANIFEST).read_bytes() == before
    assert sorted(path.name for path in folder.iterdir())[0] == MANIFEST
    assert not list(folder.glob("*.tmp"))


def test_a_folder_is_made_once_and_says_so(catalogue: Catalogue) -> None:
    assert catalogue.new_folder("one").name == "one"
    with pytest.raises(BadOption, match=r"'one'.*choose another name"):
        catalogue.new_folder("one")


@pytest.mark.parametrize("name", ["latest", "20261130T144426-0001", "../x", "a/b", ".hidden", "x" * 129, "a\0b"])
def test_some_names_cannot_be_given(catalogue: Catalogue, name: str) -> None:
    with pytest.raises(BadOption, match=r"name|latest"):
        catalogue.new_folder(name)
    assert list(catalogue.names()) == []


def test_names_made_by_themselves_follow_each_other(catalogue: Catalogue) -> None:
    names = [catalogue.new_folder().name for _ in range(3)]
    assert [name[-5:] for name in names] == ["-0001", "-0002", "-0003"]
    assert names == sorted(names)


@pytest.mark.case("C081")
@pytest.mark.parametrize(
    "name", ["../../etc", "/etc", "oak/../../outside", "..", ".", "", "/", "oak/../..", "a\0b", "~", "oak/one/../../../x"]
)
def test_a_path_out_of_the_root_folder_is_refused(catalogue: Catalogue, root: Path, name: str) -> None:
    (root.parent / "outside").mkdir()
    with pytest.raises((BadOption, UnknownCheckpoint)) as error:
        catalogue.read(name)
    if not isinstance(error.value, UnknownCheckpoint) and "\0" not in name:
        assert str(root) in str(error.value)
        assert "--checkpoint-dir" in str(error.value)
    assert isinstance(error.value, BadOption) or name == "~"


@pytest.mark.case("C081")
def test_a_link_out_of_the_root_folder_is_not_followed(catalogue: Catalogue, root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    save(elsewhere, trained())
    (root / CLUSTER / "link").symlink_to(elsewhere / CLUSTER / "one")
    assert list(catalogue.names()) == []
    with pytest.raises(BadOption, match="does not lie below"):
        catalogue.read("link")
    with pytest.raises(BadOption, match="does not lie below"):
        catalogue.read("oak/link")
    with pytest.raises(UnknownCheckpoint):
        catalogue.delete("link")
    assert (elsewhere / CLUSTER / "one" / MANIFEST).exists()


@pytest.mark.case("C081")
@pytest.mark.parametrize("name", [MANIFEST, "shard-0-of-2-000.rows"])
def test_a_file_that_is_a_link_is_refused(catalogue: Catalogue, root: Path, name: str) -> None:
    _, folder = save(root, trained())
    os.replace(folder / name, root.parent / "moved")
    (folder / name).symlink_to(root.parent / "moved")
    [entry] = catalogue.list()
    assert f"{folder / name} is damaged: it is a link" in entry.problem


def test_a_pipe_in_the_place_of_a_file_does_not_hang(catalogue: Catalogue, root: Path) -> None:
    _, folder = save(root, trained())
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(CheckpointDamaged, match="no plain file"):
        read_manifest(folder)


def test_a_huge_manifest_is_not_read(catalogue: Catalogue, root: Path) -> None:
    _, folder = save(root, trained())
    os.truncate(folder / MANIFEST, 2**40)
    with pytest.raises(CheckpointDamaged, match="more than 67108864 bytes"):
        read_manifest(folder)


def test_a_folder_that_was_renamed_is_not_complete(catalogue: Catalogue, root: Path) -> None:
    _, folder = save(root, trained())
    folder.rename(folder.with_name("two"))
    [entry] = catalogue.list()
    assert "manifest of 'one'" in entry.problem


def test_deleting_takes_the_manifest_first(catalogue: Catalogue, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = save(root, trained())

    def killed(path: Path) -> None:
        raise OSError(5, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(CheckpointFailed, match="cannot be deleted"):
            catalogue.delete("one")
    assert not (folder / MANIFEST).exists()
    assert catalogue.latest() is None
    catalogue.delete("one")
    assert list(catalogue.names()) == []
    with pytest.raises(UnknownCheckpoint):
        catalogue.delete("one")


@pytest.mark.parametrize("name", ["latest", "../x", "/etc", ""])
def test_only_a_name_is_deleted(catalogue: Catalogue, root: Path, name: str) -> None:
    save(root, trained())
    with pytest.raises(UnknownCheckpoint):
        catalogue.delete(name)
    assert listed(catalogue) == [("one", True)]


def test_pruning_keeps_the_newest_and_those_with_names_of_their_own(catalogue: Catalogue, root: Path) -> None:
    names = [automatic(catalogue, time_s) for time_s in (4.0, 2.0, 3.0, 1.0)]
    save(root, trained(1), "mine", time_s=0.5)
    torn = catalogue.new_folder().name
    assert catalogue.prune(0) == []
    assert catalogue.prune(3, but=[names[3]]) == [names[1]]
    assert set(catalogue.names()) == {names[0], names[2], names[3], "mine", torn}
    assert catalogue.prune(2, but=["mine"]) == [names[3]]
    assert catalogue.prune(1) == [names[2]]
    assert set(catalogue.names()) == {names[0], "mine", torn}


def test_what_never_became_a_checkpoint_is_removed_and_nothing_else(catalogue: Catalogue, root: Path) -> None:
    save(root, trained(), "whole")
    _, damaged = save(root, trained(), "damaged")
    (damaged / "shard-0-of-2-000.rows").unlink()
    torn, busy, notes = (catalogue.new_folder(name) for name in ("torn", "busy", "notes"))
    write_shard(root, torn, trained(1)[0], 0, 1)
    (torn / "cut-00000000000000ff-1").mkdir()
    (torn / "manifest.json.tmp").write_text("half")
    (notes / "readme.txt").write_text("do not delete")
    assert catalogue.remove_incomplete(but=["busy"]) == ["torn"]
    assert list(catalogue.names()) == ["busy", "damaged", "notes", "whole"]
    assert busy.is_dir()


@pytest.mark.case("C074")
def test_shards_that_see_the_same_folder_read_the_same_id(tmp_path: Path) -> None:
    one, other = Catalogue(tmp_path / "a", CLUSTER), Catalogue(tmp_path / "b", CLUSTER)
    first = one.prepare()
    assert len(first) == 16
    assert one.prepare() == first
    assert Catalogue(tmp_path / "a", "elm").prepare() == first
    assert other.prepare() != first
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [ROOT_ID, "elm", CLUSTER]


@pytest.mark.case("C074")
def test_a_folder_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match=r"file/oak cannot be used \(Not a directory.*--checkpoint-dir"):
        Catalogue(tmp_path / "file", CLUSTER).prepare()


def test_the_next_one_is_the_newest_even_if_the_clock_was_put_back(catalogue: Catalogue) -> None:
    assert catalogue.time_of_next(100.0) == 100.0
    automatic(catalogue, 5000.0)
    assert catalogue.time_of_next(6000.0) == 6000.0
    newest = automatic(catalogue, catalogue.time_of_next(100.0))
    latest = catalogue.latest()
    assert latest is not None
    assert latest.name == newest


def test_a_folder_that_may_be_anybody_s_is_not_deleted(catalogue: Catalogue) -> None:
    folder = catalogue.folder / "shard-0"
    folder.mkdir()
    (folder / "CURRENT").write_text("{}")
    with pytest.raises(BadOption, match="no checkpoint"):
        catalogue.delete("shard-0")
    assert (folder / "CURRENT").exists()


def test_what_lies_right_below_the_root_is_found_by_its_relative_folder(catalogue: Catalogue, root: Path) -> None:
    manifest, folder = save(root, trained())
    moved = folder.rename(root / "one")
    _, found = catalogue.read(str(moved))
    assert catalogue.read_relative(catalogue.relative(found)) == (manifest, moved)
    with pytest.raises(UnknownCheckpoint, match="put it back"):
        catalogue.read_relative("two")
