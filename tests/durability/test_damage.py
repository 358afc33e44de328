"""A folder that is not as it was written: refused with file and reason, unchanged; cut where it is damaged if told to."""

from __future__ import annotations

import errno
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from shardam_testing.damaged_folders import FOLDER, TRUNCATE, check_cut, flip, frames_of, refused
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.shard_histories import (
    AllBits,
    abandon,
    all_bits,
    begin_store,
    bits_after,
    every_change,
    folder_bytes,
    lock_store,
    new_state,
    try_base,
    write_base,
)

from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import Layout
from shardam_proto.errors import OutOfMemory
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.journal.frames import (
    HEADER_BYTES,
    PREAMBLE_BYTES,
    encode_frame,
)
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.records import CpuDevice, CpuRecords


@pytest.fixture(scope="module")
def three_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[AllBits]]:
    """A journal of three files without a base, and the bits after each change; two bases failed on the way."""
    data_dir, state, files = tmp_path_factory.mktemp("three"), new_state(), ScriptedFiles()
    store = begin_store(data_dir, state, JournalOptions(operations=files))
    bits = [all_bits(state)]
    files.fail("create", errno.EIO, part="base-")
    for number, change in enumerate(every_change(), start=1):
        change(state)
        bits.append(all_bits(state))
        if number in (10, 20):
            assert try_base(store) is None
    abandon(store)
    assert files.failed["create"] == 2
    return data_dir, bits


@pytest.fixture
def data_dir(three_files: tuple[Path, list[AllBits]], tmp_path: Path) -> Path:
    shutil.copytree(three_files[0] / "oak", tmp_path / "oak")
    return tmp_path


@pytest.fixture
def bits(three_files: tuple[Path, list[AllBits]]) -> list[AllBits]:
    return three_files[1]


def test_an_incomplete_record_at_the_end_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    *changes, last = every_change()
    state = new_state()
    store = begin_store(tmp_path, state)
    for change in changes:
        change(state)
    write_base(store)  # so that each of the many starts is quick
    before = all_bits(state)
    last(state)
    abandon(store)
    path = store.path / "journal-000002"
    start, data = frames_of(path)[-1][0], path.read_bytes()
    assert len(data) - start > 200
    for size in range(start, len(data)):
        path.write_bytes(data[:size])
        assert bits_after(tmp_path) == before, size
        assert path.stat().st_size == start
    path.write_bytes(data)
    assert bits_after(tmp_path) == all_bits(state)


def test_an_incomplete_record_in_a_file_that_is_not_the_last_is_damage(data_dir: Path, bits: list[AllBits]) -> None:
    path = data_dir / FOLDER / "journal-000002"
    start, data = frames_of(path)[-1][0], path.read_bytes()
    for size in (start + 1, start + HEADER_BYTES, len(data) - 1):
        path.write_bytes(data[:size])
        assert "more files follow" in refused(data_dir)
    check_cut(data_dir, path, start, bits[19])
    assert not (data_dir / FOLDER / "journal-000003").exists()


def test_a_last_file_whose_header_is_incomplete_holds_nothing(data_dir: Path, bits: list[AllBits]) -> None:
    path = data_dir / FOLDER / "journal-000003"
    end, data = frames_of(path)[1][0], path.read_bytes()
    for size in range(end):
        path.write_bytes(data[:size])
        assert bits_after(data_dir) == bits[20], size
        assert not path.exists()


def test_the_only_file_is_never_without_its_header(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    every_change()[0](state)
    abandon(store)
    path = store.path / "journal-000001"
    path.write_bytes(path.read_bytes()[:50])
    assert f"{path} is damaged at byte {PREAMBLE_BYTES}" in refused(tmp_path)
    assert bits_after(tmp_path, TRUNCATE) == all_bits(new_state())
    assert bits_after(tmp_path) == all_bits(new_state())


REGIONS = {
    "magic": (0, 4),
    "message length": (4, 8),
    "array length": (8, 16),
    "sequence": (16, 24),
    "checksum of the body": (24, 32),
    "checksum of the header": (32, 40),
}


@pytest.mark.parametrize("number", [1, 2, 3], ids=["first file", "middle file", "last file"])
@pytest.mark.parametrize("place", [0, 4, -1], ids=["file header", "middle record", "last record"])
def test_a_flipped_byte_anywhere_in_a_record_is_noticed(data_dir: Path, bits: list[AllBits], number: int, place: int) -> None:
    path = data_dir / FOLDER / f"journal-{number:06d}"
    frames, data = frames_of(path), path.read_bytes()
    start, message_bytes, array_bytes = frames[place]
    regions = {**REGIONS, "message": (HEADER_BYTES, HEADER_BYTES + message_bytes)}
    if array_bytes:
        regions["arrays"] = (HEADER_BYTES + message_bytes, HEADER_BYTES + message_bytes + array_bytes)
    for first, last in regions.values():
        for offset in {first, (first + last) // 2, last - 1}:
            flip(path, start + offset, 0x80 if offset % 2 else 0x01)
            message = refused(data_dir)
            assert f"{path} is damaged at byte {start}:" in message
            path.write_bytes(data)
    flip(path, start + HEADER_BYTES)
    records_before = max(place % len(frames) - 1, 0)
    check_cut(data_dir, path, start, bits[10 * (number - 1) + records_before])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_flipped_byte_in_a_preamble_is_noticed(data_dir: Path, bits: list[AllBits], number: int) -> None:
    path = data_dir / FOLDER / f"journal-{number:06d}"
    for offset in range(PREAMBLE_BYTES):
        data = path.read_bytes()
        flip(path, offset)
        assert f"{path} is damaged at byte 0:" in refused(data_dir)
        path.write_bytes(data)
    flip(path, 9)  # a byte of the format version, which its checksum tells from another version
    check_cut(data_dir, path, 0, bits[(number - 1) * 10])


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_file_is_noticed(data_dir: Path, bits: list[AllBits], number: int) -> None:
    path = data_dir / FOLDER / f"journal-{number:06d}"
    path.unlink()
    check_cut(data_dir, path, 0, bits[(number - 1) * 10])


def test_records_that_are_missing_between_files_are_noticed(data_dir: Path, bits: list[AllBits]) -> None:
    path = data_dir / FOLDER / "journal-000002"
    path.write_bytes(path.read_bytes()[: frames_of(path)[-1][0]])  # whole records only
    message = refused(data_dir)
    assert "journal-000003 is damaged at byte 24: a record has the sequence number" in message
    check_cut(data_dir, data_dir / FOLDER / "journal-000003", PREAMBLE_BYTES, bits[19])


@pytest.mark.parametrize("garbage", [b"\0" * 100, b"\0", b"SF", b"SFRM" + b"\0" * 8, b"\xff" * 5000], ids=len)
def test_what_no_crash_leaves_at_the_end_is_damage(data_dir: Path, bits: list[AllBits], garbage: bytes) -> None:
    path = data_dir / FOLDER / "journal-000003"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + garbage)
    if b"SFRM".startswith(garbage[:4]) and len(garbage) < HEADER_BYTES:
        assert bits_after(data_dir) == bits[-1]  # the beginning of a record
    else:
        assert f"{len(garbage)} bytes" in refused(data_dir)
        check_cut(data_dir, path, size, bits[-1])


def test_a_record_twice_or_out_of_order_is_damage(data_dir: Path, bits: list[AllBits]) -> None:
    path = data_dir / FOLDER / "journal-000003"
    data, starts = path.read_bytes(), [start for start, _, _ in frames_of(path)]
    last = data[starts[-1] :]
    path.write_bytes(data + last)
    check_cut(data_dir, path, len(data), bits[-1])
    path.write_bytes(data[: starts[-2]] + last + data[starts[-2] : starts[-1]])
    check_cut(data_dir, path, starts[-2], bits[-3])


def test_files_of_another_state_are_not_taken_for_this_one(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other, state = tmp_path_factory.mktemp("other"), new_state()
    store = lock_store(other)
    assert store.current is None
    store.release()
    store = begin_store(other, state)
    store.close()
    path = data_dir / FOLDER / "CURRENT"
    content = json.loads(path.read_text())["content"]
    content["lineage"] += 1
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"checksum": xxhash.xxh3_64_hexdigest(canonical.encode()), "content": content}))
    message = refused(data_dir)
    assert "journal-000001 is damaged at byte 0: it belongs to another state than CURRENT says" in message
    assert "lineage" in message


def test_a_new_lineage_that_a_crash_kept_from_being_named_is_passed_over(data_dir: Path, bits: list[AllBits]) -> None:
    elsewhere = data_dir / "elsewhere"
    store = lock_store(elsewhere)
    shutil.copytree(data_dir / FOLDER, store.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("LOCK"))
    store.release()
    files = ScriptedFiles()
    store = lock_store(elsewhere, JournalOptions(operations=files))
    files.fail("rename", errno.EIO, part="CURRENT")
    before = folder_bytes(store.path)
    with pytest.raises(OSError, match="EIO"):
        store.begin(store.current.cluster, 77, 1, 1, new_state())  # type: ignore[union-attr]
    store.release()
    assert folder_bytes(store.path) == before
    files.script = lambda operation, path: leave(operation, path, elsewhere)
    store = lock_store(elsewhere, JournalOptions(operations=files))
    with pytest.raises(OSError, match="EIO"):
        store.begin(store.current.cluster, 77, 1, 1, new_state())  # type: ignore[union-attr]
    store.release()
    assert (store.path / "journal-000004").exists()
    assert bits_after(elsewhere) == bits[-1]


def leave(operation: str, path: Path, folder: Path) -> None:
    """A crash before CURRENT is renamed: nothing is cleaned up."""
    if (operation == "rename" and path.name.startswith("CURRENT")) or (operation == "remove" and path.name == "journal-000004"):
        raise OSError(errno.EIO, "EIO")


def test_a_record_that_does_not_follow_from_the_state_is_refused_and_cut(data_dir: Path, bits: list[AllBits]) -> None:
    path = data_dir / FOLDER / "journal-000003"
    data, (start, message_bytes, _) = path.read_bytes(), frames_of(path)[-1]
    message = data[start + HEADER_BYTES : start + HEADER_BYTES + message_bytes]
    arrays = np.frombuffer(data[start + HEADER_BYTES + message_bytes :], np.uint8)
    sequence = struct.unpack_from("<Q", data, start + 16)[0]
    for change in OTHER_MEANINGS:
        record = journal_pb2.JournalRecord.FromString(message)
        change(record)
        path.write_bytes(data[:start] + b"".join(encode_frame(sequence, record.SerializeToString(), [arrays])))
        check_cut(data_dir, path, start, bits[-2])


def repeat_number(record: journal_pb2.JournalRecord) -> None:
    record.origin.number -= 1


def skip_change(record: journal_pb2.JournalRecord) -> None:
    record.change_number += 1


def skip_step(record: journal_pb2.JournalRecord) -> None:
    record.push.tables[0].table_step += 1


def count_more_rows(record: journal_pb2.JournalRecord) -> None:
    record.push.tables[0].num_rows += 1


def count_fewer_row_steps(record: journal_pb2.JournalRecord) -> None:
    record.push.tables[1].num_row_steps -= 1


def name_no_table(record: journal_pb2.JournalRecord) -> None:
    record.push.tables[0].table_id = 5


def close_instead(record: journal_pb2.JournalRecord) -> None:
    record.close.SetInParent()


def say_nothing(record: journal_pb2.JournalRecord) -> None:
    record.ClearField("push")


OTHER_MEANINGS = (
    repeat_number,
    skip_change,
    skip_step,
    count_more_rows,
    count_fewer_row_steps,
    name_no_table,
    close_instead,
    say_nothing,
)


def test_more_memory_than_there_is_is_no_damage(data_dir: Path) -> None:
    class SmallDevice(CpuDevice):
        def make_records(self, layout: Layout, initial: InitialRows) -> CpuRecords:
            return SmallRecords(layout, initial, 1)

    class SmallRecords(CpuRecords):
        def reserve(self, num_slots: int) -> None:
            raise MemoryError("small has no room")

    store = lock_store(data_dir, TRUNCATE)
    with pytest.raises(OutOfMemory, match="small has no room"):
        store.recover(new_state(), SmallDevice(1).make_records)
    store.release()
