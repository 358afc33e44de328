"""Damage to any byte of a checkpoint is found and named, and what is not of it is never read."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shardam_testing.checkpoint_files import (
    CHECKPOINT_ID,
    CLUSTER,
    CPU,
    check,
    make_plan,
    make_states,
    push_rows,
    restore,
    rows_of,
    save,
    trained,
    with_files,
)
from shardam_testing.damaged_folders import flip, frames_of

from shardam_proto.errors import (
    BadOption,
    CheckpointDamaged,
    ShardamError,
    UnknownCheckpoint,
    VersionMismatch,
)
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.checking import CheckFiles
from shardam_server.shard.checkpoints.file_names import MANIFEST
from shardam_server.shard.checkpoints.folders import check_sizes
from shardam_server.shard.checkpoints.loading import load
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest
from shardam_server.shard.checkpoints.segments import SEGMENT_MAGIC
from shardam_server.shard.checkpoints.tasks import Dropped, Progress
from shardam_server.shard.journal import frames as frames_module
from shardam_server.shard.state import ShardState


def all_files(manifest: Manifest) -> list[str]:
    return [file.name for shard in manifest.shards for file in shard.files]


def found_and_named(
    root: Path, manifest: Manifest, folder: Path, name: str, kind: type[ShardamError] = CheckpointDamaged
) -> None:
    """Checking refuses a file, and so does loading, with the file's name; on the numbers of shards before and others."""
    for num_shards in (1, manifest.num_shards, manifest.num_shards + 1):
        with pytest.raises(kind) as error:
            check(root, folder, num_shards)
        assert str(folder / name) in str(error.value)
        assert error.value.metadata["file"] == str(folder / name)
    plan = dataclasses.replace(make_plan(manifest, manifest.num_shards + 1), keep_clients=True)
    with pytest.raises(kind) as error:
        restore(manifest, folder, plan)
    assert str(folder / name) in str(error.value)


def regions(path: Path) -> list[int]:
    """Offsets in each region of a file: preamble, and of frames magic, lengths, sequence, checksums, message, arrays."""
    offsets = [0, 8, 12, 16]
    for offset, message_bytes, array_bytes in frames_of(path, SEGMENT_MAGIC):
        offsets += [offset, offset + 4, offset + 8, offset + 16, offset + 24, offset + 32]
        offsets += [offset + 40 + place for place in (0, message_bytes - 1) if place < message_bytes]
        offsets += [offset + 40 + message_bytes + place for place in (0, array_bytes // 2, array_bytes - 1) if array_bytes]
    return offsets


def test_a_flipped_byte_in_any_region_of_any_file_is_found_and_named(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, trained(2), segment_bytes=1500)
    for name in all_files(manifest):
        for offset in regions(folder / name):
            flip(folder / name, offset)
            found_and_named(tmp_path, manifest, folder, name)
            flip(folder / name, offset)
    check(tmp_path, folder, 2)


def test_a_file_that_is_cut_off_lengthened_or_missing_is_found_and_named(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, trained(2), segment_bytes=1500)
    for name in all_files(manifest):
        data = (folder / name).read_bytes()
        for other in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            (folder / name).write_bytes(other)
            found_and_named(tmp_path, manifest, folder, name)
        (folder / name).unlink()
        found_and_named(tmp_path, manifest, folder, name)
        (folder / name).write_bytes(data)
    check(tmp_path, folder, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, Path]:
    root = tmp_path_factory.mktemp("root")
    return root, *save(root, trained(2), segment_bytes=1500)


@given(file=st.integers(0, 99), offset=st.integers(0, 10**6), bits=st.integers(1, 255), cut=st.booleans())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_damage_is_found_and_named(
    saved: tuple[Path, Manifest, Path], file: int, offset: int, bits: int, cut: bool
) -> None:
    root, manifest, folder = saved
    names = [*all_files(manifest), MANIFEST]
    path = folder / names[file % len(names)]
    before = path.read_bytes()
    offset %= len(before.rstrip())
    try:
        if cut:
            path.write_bytes(before[:offset])
        else:
            flip(path, offset, bits)
        with pytest.raises((CheckpointDamaged, VersionMismatch)) as error:
            check(root, folder, 3)
        assert str(path) in str(error.value)
    except BaseException:
        if path.name != MANIFEST or cut or Manifest.from_json(path.read_bytes(), path) != manifest:
            raise  # only white space of the manifest may differ
    finally:
        path.write_bytes(before)


def forged(manifest: Manifest, folder: Path, name: str) -> Manifest:
    """The manifest as one would write it who puts another file in the place of this one."""
    data = (folder / name).read_bytes()
    for index, shard in enumerate(manifest.shards):
        files = [
            CheckpointFile(file.name, len(data), xxhash.xxh3_128_hexdigest(data), file.num_rows) if file.name == name else file
            for file in shard.files
        ]
        manifest = with_files(manifest, index, files)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("shard-0-of-2-000.rows", "one/shard-1-of-2-000.rows"),
        ("shard-0-of-2-001.rows", "one/shard-0-of-2-000.rows"),
        ("shard-1-of-2-000.rows", "one/shard-0-of-2-000.rows"),
        ("shard-0-of-2-000.rows", "two/shard-0-of-2-000.rows"),
    ],
)
def test_a_file_in_another_place_is_found_even_if_its_hash_was_put_into_the_manifest(
    tmp_path: Path, name: str, other: str
) -> None:
    manifest, folder = save(tmp_path, trained(2), segment_bytes=1500)
    _, two = save(tmp_path, trained(2), "two", segment_bytes=1500)
    for path in two.glob("*.rows"):
        path.write_bytes(with_id(path.read_bytes(), CHECKPOINT_ID + 1))
    shutil.copyfile(tmp_path / CLUSTER / other, folder / name)
    found_and_named(tmp_path, forged(manifest, folder, name), folder, name)


def with_id(data: bytes, checkpoint_id: int) -> bytes:
    """A segment as of another checkpoint, with checksums that fit."""
    start = frames_module.PREAMBLE_BYTES + frames_module.HEADER_BYTES
    message_bytes = frames_module._HEADER.unpack_from(data, frames_module.PREAMBLE_BYTES)[1]
    header = journal_pb2.SegmentHeader.FromString(data[start : start + message_bytes])
    header.checkpoint_id = checkpoint_id
    frame = frames_module.encode_frame(0, header.SerializeToString())
    return data[: frames_module.PREAMBLE_BYTES] + b"".join(frame) + data[start + message_bytes :]


@pytest.mark.parametrize(("format_version", "arithmetic"), [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_a_file_of_another_version_is_refused_and_named(tmp_path: Path, format_version: int, arithmetic: int) -> None:
    manifest, folder = save(tmp_path, trained(2))
    path = folder / "shard-1-of-2-000.rows"
    data = path.read_bytes()
    versions = frames_module._VERSIONS.pack(SEGMENT_MAGIC, format_version, arithmetic)
    preamble = versions + frames_module._CHECKSUM.pack(xxhash.xxh3_64_intdigest(versions))
    path.write_bytes(preamble + data[len(preamble) :])
    found_and_named(tmp_path, forged(manifest, folder, path.name), folder, path.name, VersionMismatch)


@pytest.mark.case("C078")
@pytest.mark.parametrize("spec", [TableSpec("words", 4), TableSpec("words", 2)])
def test_records_of_another_dim_than_the_manifest_has_are_refused(tmp_path: Path, spec: TableSpec) -> None:
    states = make_states([TableSpec("words", 3)], 1)
    push_rows(states, "words", range(10))
    manifest, folder = save(tmp_path, states)
    manifest = dataclasses.replace(manifest, tables=(dataclasses.replace(manifest.tables[0], spec=spec),))
    with pytest.raises(CheckpointDamaged, match=r"shard-0-of-1-000.rows"):
        restore(manifest, folder, make_plan(manifest, 1))


@pytest.mark.case("C078")
def test_rows_outside_a_bounded_table_are_refused(tmp_path: Path) -> None:
    states = make_states([TableSpec("words", 3)], 1)
    push_rows(states, "words", range(10))
    manifest, folder = save(tmp_path, states)
    spec = TableSpec("words", 3, num_embeddings=5)
    table = dataclasses.replace(manifest.tables[0], spec=spec, num_rows=5)
    with pytest.raises(CheckpointDamaged, match=r"shard-0-of-1-000.rows.*num_embeddings=5"):
        restore(dataclasses.replace(manifest, tables=(table,)), folder, make_plan(manifest, 1))


def test_rows_that_two_shards_wrote_are_refused(tmp_path: Path) -> None:
    states = trained(1)
    manifest, folder = save(tmp_path, [states[0], states[0]])
    with pytest.raises(CheckpointDamaged, match=r"rows that its shard does not own"):
        restore(manifest, folder, make_plan(manifest, 1))


def test_huge_counts_do_not_take_memory(tmp_path: Path) -> None:
    states = make_states([TableSpec("words", 3)], 1)
    push_rows(states, "words", range(10))
    manifest, folder = save(tmp_path, states)
    table = dataclasses.replace(manifest.tables[0], num_rows=2**50)
    (folder / MANIFEST).write_text(dataclasses.replace(manifest, tables=(table,)).to_json(), encoding="utf-8")
    with pytest.raises(CheckpointDamaged, match="its tables have"):
        check(tmp_path, folder, 1)


# -- what is not of the checkpoint


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._marker,)


@pytest.mark.case("C081")
def test_a_pickle_in_the_folder_is_never_opened(tmp_path: Path) -> None:
    root, marker = tmp_path / "root", tmp_path / "ran"
    manifest, folder = save(root, trained(2))
    payload = pickle.dumps(Payload(marker))
    (folder / "weights.pkl").write_bytes(payload)
    (folder / "extra-rank-0.safetensors").write_bytes(payload)
    check(root, folder, 2)
    restore(manifest, folder, make_plan(manifest, 2))
    assert [entry.problem for entry in Catalogue(root, CLUSTER).list()] == [""]
    for name in ("shard-1-of-2-000.rows", MANIFEST):
        (folder / name).write_bytes(payload)
        with pytest.raises(CheckpointDamaged) as error:
            check(root, folder, 2)
        assert str(folder / name) in str(error.value)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload would have run"


@pytest.mark.case("C081")
@pytest.mark.parametrize("folder", ["../outside", "/etc", "oak/../../outside", "."])
def test_a_folder_outside_the_root_folder_is_not_read(tmp_path: Path, folder: str) -> None:
    save(tmp_path / "outside", trained(1))
    (tmp_path / "root").mkdir()
    with pytest.raises(BadOption, match="does not lie below"):
        CheckFiles(tmp_path / "root", folder, 0, 1).run(Progress())


@pytest.mark.case("C074")
def test_a_shard_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownCheckpoint, match=r"shard 2 does not see .*--checkpoint-dir"):
        CheckFiles(tmp_path, "oak/one", 2, 3).run(Progress())


@pytest.mark.parametrize("damage", [b"other", None])
def test_what_trainers_added_is_checked_with_the_rest(tmp_path: Path, damage: bytes | None) -> None:
    manifest, folder = save(tmp_path, trained(2))
    path, data = folder / "extra-rank-3.safetensors", b"right"
    path.write_bytes(data)
    extra = {3: CheckpointFile(path.name, len(data), xxhash.xxh3_128_hexdigest(data))}
    manifest = dataclasses.replace(manifest, extra=extra)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    check(tmp_path, folder, 2)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(CheckpointDamaged, match=r"extra-rank-3.safetensors"):
        check(tmp_path, folder, 2)
    if damage is None:
        with pytest.raises(CheckpointDamaged, match="what rank 3 added"):
            check_sizes(manifest, folder)


def test_work_that_is_given_up_ends(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, trained(1))
    progress = Progress()
    progress.drop()
    with pytest.raises(Dropped):
        CheckFiles(tmp_path, "oak/one", 0, 1).run(progress)
    state = ShardState(CPU)
    with pytest.raises(Dropped):
        load(state, manifest, folder, make_plan(manifest, 1), 0, CPU.make_records, progress)
    assert rows_of([state]) == {}
