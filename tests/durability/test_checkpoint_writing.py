"""A shard's part of a checkpoint: whole where it belongs, or nothing of it and a message that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardam_testing.checkpoint_files import (
    CHECKPOINT_ID,
    CLUSTER,
    CLUSTER_ID,
    make_plan,
    make_states,
    manifest_of,
    push_rows,
    restore,
    rows_of,
)
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.small_disk import small_disk

from shardam_proto.errors import BadOption, CheckpointFailed
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.file_messages import decode_shard
from shardam_server.shard.checkpoints.tasks import Dropped, Progress
from shardam_server.shard.checkpoints.writing import WriteCut, WriteTerms, remove_left_cuts
from shardam_server.shard.journal.file_operations import FileOperations
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.snapshots import Snapshot

DISK_BYTES = 64 * 1024


class Place:
    """A root folder with a checkpoint that is being made, and a shard with its own folder."""

    def __init__(self, root: Path, own: Path | None) -> None:
        self.root = root
        self.catalogue = Catalogue(root, CLUSTER)
        self.catalogue.prepare()
        self.folder = self.catalogue.new_folder("one")
        self.own = own
        if own is not None:
            own.mkdir(parents=True, exist_ok=True)
        [self.state] = make_states([TableSpec("words", 8), TableSpec("users", 4, dtype="bfloat16")], 1)
        push_rows([self.state], "words", range(200))
        push_rows([self.state], "users", range(50))
        self.cut = Snapshot(self.state)

    def terms(self, operations: FileOperations | None = None, spare_bytes: int = 0, folder: str = "oak/one") -> WriteTerms:
        return WriteTerms(
            CLUSTER_ID,
            CHECKPOINT_ID,
            0,
            1,
            self.root,
            folder,
            self.own,
            "host-a",
            spare_bytes,
            segment_bytes=3_000,
            operations=operations or FileOperations(),
        )

    def write(self, operations: FileOperations | None = None) -> WriteCut:
        work, progress = WriteCut(self.cut, self.terms(operations)), Progress()
        shard = decode_shard(work.run(progress))
        assert progress.done_bytes
        manifest = manifest_of("one", [self.state], [shard])
        self.catalogue.complete(manifest)
        assert shard.folder == str(self.folder)
        assert (shard.host_name, shard.change_number) == ("host-a", self.state.change_number)
        assert [rows_of(restore(manifest, self.folder, make_plan(manifest, 1)))] == [rows_of([self.state])]
        return work

    def assert_nothing_is_left(self) -> None:
        assert self.cut.closed
        assert list(self.folder.iterdir()) == []
        assert self.own is None or list(self.own.iterdir()) == []


@pytest.fixture(params=["own folder", "no folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path / "root", tmp_path / "data" if request.param == "own folder" else None)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


def test_a_part_is_written_to_the_own_folder_and_then_moved(place: Place) -> None:
    operations = ScriptedFiles()
    seen: list[tuple[str, str]] = []
    operations.script = lambda operation, path: seen.append((operation, path.parent.name))
    place.write(operations)
    assert place.cut.closed
    working = f"cut-{CHECKPOINT_ID:016x}-0"
    assert {folder for operation, folder in seen if operation in ("create", "write", "sync", "rename")} == {working}
    assert seen[-1] == ("sync_folder", CLUSTER)
    assert place.own is None or list(place.own.iterdir()) == []
    assert not (place.folder / working).exists()


def test_work_that_is_discarded_leaves_nothing(place: Place) -> None:
    work = WriteCut(place.cut, place.terms())
    work.run(Progress())
    assert list(place.folder.iterdir())
    work.discard()
    place.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("failing", "times"),
    [(operation, times) for operation in ("create", "write", "sync", "rename") for times in (1, 3)] + [("sync_folder", 1)],
)
def test_a_file_system_that_fails_leaves_nothing_and_the_message_names_the_folder(
    place: Place, failing: str, times: int
) -> None:
    operations, shown = ScriptedFiles(), 0

    def script(operation: str, path: Path) -> None:
        nonlocal shown
        shown += operation == failing
        if operation == failing and shown == times:
            raise OSError(errno.EIO, "Input/output error")

    operations.script = script
    with pytest.raises(CheckpointFailed, match=r"Input/output error.*--checkpoint-dir") as error:
        WriteCut(place.cut, place.terms(operations)).run(Progress())
    assert operations.failed == {failing: 1}
    assert str(place.own or place.folder) in str(error.value) or str(place.folder) in str(error.value)
    place.assert_nothing_is_left()


def test_a_full_disk_that_cannot_cut_back_leaves_nothing(place: Place) -> None:
    operations = ScriptedFiles()

    def script(operation: str, path: Path) -> None:
        if operation == "truncate" or (operation == "write" and path.name.endswith("001.rows")):
            raise OSError(errno.ENOSPC, "No space left on device")

    operations.script = script
    with pytest.raises(CheckpointFailed, match="could not be cut back"):
        WriteCut(place.cut, place.terms(operations)).run(Progress())
    place.assert_nothing_is_left()


def test_other_file_systems_are_copied_to(tmp_path: Path) -> None:
    place, operations = Place(tmp_path / "root", tmp_path / "data"), ScriptedFiles()
    operations.fail("rename", errno.EXDEV)
    work = place.write(operations)
    assert operations.failed["rename"] > 2
    assert list((tmp_path / "data").iterdir()) == []
    (place.folder / "manifest.json").unlink()  # the files of a whole checkpoint would stay
    work.discard()
    assert list(place.folder.iterdir()) == []


def test_a_full_disk_of_the_checkpoints_is_named_with_the_bytes(disk: Path, tmp_path: Path) -> None:
    place = Place(disk / "root", tmp_path / "data")
    with pytest.raises(CheckpointFailed, match=r"one has \d+ bytes free, shard 0 needs \d+: .*--checkpoint-dir") as error:
        WriteCut(place.cut, place.terms(spare_bytes=DISK_BYTES)).run(Progress())
    assert error.value.metadata["folder"] == str(place.folder)
    place.assert_nothing_is_left()


@pytest.mark.parametrize("full", ["root", "data"])
def test_a_disk_that_becomes_full_meanwhile_fails_the_checkpoint_alone(disk: Path, tmp_path: Path, full: str) -> None:
    root, own = (disk / "root", tmp_path / "data") if full == "root" else (tmp_path / "root", disk / "data")
    place = Place(root, own)
    place.cut.size_bytes = 0  # more is written than was expected
    (disk / "filler").write_bytes(b"x" * (DISK_BYTES - 24 * 1024))
    with pytest.raises(CheckpointFailed, match=r"is full: this checkpoint is not made.*make space") as error:
        WriteCut(place.cut, place.terms()).run(Progress())
    assert str(place.folder if full == "root" else own) in str(error.value)
    place.assert_nothing_is_left()
    (disk / "filler").unlink()
    place.cut = Snapshot(place.state)
    place.write()


def test_work_that_is_given_up_leaves_nothing(place: Place) -> None:
    progress = Progress()
    operations = ScriptedFiles()

    def script(operation: str, path: Path) -> None:
        if operation == "create" and path.name.endswith("001.rows"):
            progress.drop()

    operations.script = script
    with pytest.raises(Dropped):
        WriteCut(place.cut, place.terms(operations)).run(progress)
    assert operations.calls["create"] > 1
    place.assert_nothing_is_left()


class ShortCut(Snapshot):
    """A cut that loses a chunk of rows."""

    def records(self, *, parts: bool) -> Iterator[tuple[journal_pb2.BaseRecord, Arrays]]:
        lost = False
        for record, arrays in super().records(parts=parts):
            if record.HasField("rows") and not lost:
                lost = True
                continue
            yield record, arrays


def test_a_cut_that_loses_rows_makes_no_checkpoint(place: Place) -> None:
    place.cut = ShortCut(place.state)
    with pytest.raises(CheckpointFailed, match="250 rows in the cut, 200 were written"):
        WriteCut(place.cut, place.terms()).run(Progress())
    place.assert_nothing_is_left()


@pytest.mark.case("C074")
def test_a_shard_that_does_not_see_the_folder_of_home_says_so(place: Place) -> None:
    with pytest.raises(CheckpointFailed, match=r"shard 0 does not see .*two on host host-a.*--checkpoint-dir"):
        WriteCut(place.cut, place.terms(folder="oak/two")).run(Progress())
    place.assert_nothing_is_left()


@pytest.mark.case("C081")
def test_nothing_is_written_outside_the_root_folder(place: Place) -> None:
    with pytest.raises(BadOption, match="does not lie below"):
        WriteCut(place.cut, place.terms(folder="../data")).run(Progress())
    place.assert_nothing_is_left()


def test_what_a_killed_shard_had_written_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f"cut-{CHECKPOINT_ID:016x}-3"
    left.mkdir()
    (left / "shard-3-of-4-000.rows").write_bytes(b"half")
    (tmp_path / "cut-notes").mkdir()
    (tmp_path / "CURRENT").write_text("{}")
    (tmp_path / "cut-00000000000000ff-1").symlink_to(tmp_path)
    remove_left_cuts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CURRENT", "cut-00000000000000ff-1", "cut-notes"]


def test_the_state_is_as_it_was(place: Place) -> None:
    before = rows_of([place.state])
    place.write()
    assert rows_of([place.state]) == before
