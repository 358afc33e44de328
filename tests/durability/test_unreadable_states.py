"""What a journal cannot be cut for: a damaged base or CURRENT, and files of another version of shardam."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import xxhash
from shardam_testing.damaged_folders import TRUNCATE, flip, frames_of, refused
from shardam_testing.shard_histories import abandon, begin_store, every_change, new_state, write_base

from shardam_proto.errors import VersionMismatch
from shardam_server.shard.journal.frames import BASE_MAGIC, HEADER_BYTES, JOURNAL_MAGIC, PREAMBLE_BYTES
from shardam_server.shard.journal.options import JournalOptions


def with_versions(data: bytes, magic: bytes, format_version: int, arithmetic_version: int) -> bytes:
    versions = struct.pack("<8sII", magic, format_version, arithmetic_version)
    return versions + struct.pack("<Q", xxhash.xxh3_64_intdigest(versions)) + data[PREAMBLE_BYTES:]


@pytest.mark.parametrize("options", [JournalOptions(), TRUNCATE], ids=["plain", "truncate"])
def test_a_file_of_another_version_is_refused_and_never_cut(tmp_path: Path, options: JournalOptions) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    every_change()[0](state)
    write_base(store)
    abandon(store)
    for name, magic in (("journal-000002", JOURNAL_MAGIC), ("base-000002", BASE_MAGIC)):
        path = store.path / name
        data = path.read_bytes()
        path.write_bytes(with_versions(data, magic, 2, 1))
        assert f"{path} has format version 2, this shardam knows 1" in refused(tmp_path, VersionMismatch, options)
        path.write_bytes(with_versions(data, magic, 1, 7))
        assert "arithmetic version 7, this shardam has 1" in refused(tmp_path, VersionMismatch, options)
        path.write_bytes(data)
    path = store.path / "CURRENT"
    content = {**json.loads(path.read_text())["content"], "format": 5}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"checksum": xxhash.xxh3_64_hexdigest(canonical.encode()), "content": content}))
    assert f"{path} has format version 5, this shardam knows 1" in refused(tmp_path, VersionMismatch, options)


@pytest.mark.parametrize("options", [JournalOptions(), TRUNCATE], ids=["plain", "truncate"])
def test_a_damaged_base_leaves_nothing_to_start_from(tmp_path: Path, options: JournalOptions) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    for change in every_change():
        change(state)
    write_base(store)
    abandon(store)
    path = store.path / "base-000002"
    data = path.read_bytes()
    frames = frames_of(path, BASE_MAGIC)
    for start, message_bytes, array_bytes in frames:
        flip(path, start + HEADER_BYTES + message_bytes // 2)
        message = refused(tmp_path, options=options)
        assert f"{path} is damaged at byte {start}" in message
        assert "forget-shard --index 0" in message
        path.write_bytes(data)
        if array_bytes:
            flip(path, start + HEADER_BYTES + message_bytes + array_bytes // 2)
            assert f"{path} is damaged at byte {start}" in refused(tmp_path, options=options)
            path.write_bytes(data)
    for size in (0, 10, frames[0][0], frames[-1][0], len(data) - 1):
        path.write_bytes(data[:size])
        assert f"{path} is damaged" in refused(tmp_path, options=options)
    path.unlink()
    assert "cannot be opened" in refused(tmp_path, options=options)


def test_current_is_checked_byte_for_byte(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    every_change()[0](state)
    abandon(store)
    path = store.path / "CURRENT"
    data = path.read_bytes()
    for offset in range(len(data)):
        if chr(data[offset]).isspace():
            continue  # between the values it means nothing
        flip(path, offset, 0x01)
        assert f"{path} is damaged" in refused(tmp_path, options=TRUNCATE)
        path.write_bytes(data)
    path.unlink()
    assert "the file is missing" in refused(tmp_path, options=TRUNCATE)
