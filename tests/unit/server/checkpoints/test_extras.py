"""What trainers add comes in parts, in any number of tries, and is moved whole."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import xxhash

from shardam_proto.errors import BadOption, CheckpointDamaged, UnknownCheckpoint
from shardam_server.shard.checkpoints.extras import PART_BYTES, UPLOADS, Extras, read_part
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest

ID = b"i" * 16


def manifest(files: dict[int, CheckpointFile]) -> Manifest:
    return Manifest("c", 1, 0.0, 0.0, "0", "default", "id", 0, 1, 1, 1, (), (), extra=files)


def test_parts_may_be_repeated_and_overlap(tmp_path: Path) -> None:
    extras, whole = Extras(tmp_path), os.urandom(1000)
    assert extras.put(ID, 0, 1000, whole[:400]) == 400
    assert extras.put(ID, 0, 1000, whole[:400]) == 400
    assert extras.put(ID, 300, 1000, whole[300:700]) == 700
    assert extras.put(ID, 700, 1000, whole[700:]) == 1000
    folder = tmp_path / "c"
    folder.mkdir()
    file = extras.take(ID, 3, folder)
    assert (folder / file.name).read_bytes() == whole
    assert (file.name, file.size_bytes, file.xxh3) == ("extra-rank-3.safetensors", 1000, xxhash.xxh3_128_hexdigest(whole))
    assert read_part(manifest({3: file}), folder, 3, 0) == (whole, 1000)
    assert read_part(manifest({3: file}), folder, 3, 990) == (whole[990:], 1000)


def test_a_part_after_a_gap_or_beyond_the_whole_is_refused(tmp_path: Path) -> None:
    extras = Extras(tmp_path)
    with pytest.raises(BadOption, match="after 0 bytes"):
        extras.put(ID, 5, 10, b"x")
    with pytest.raises(BadOption, match="end within"):
        extras.put(ID, 5, 6, b"xx")
    with pytest.raises(BadOption):
        extras.put(ID, 0, 2 * PART_BYTES, bytes(PART_BYTES + 1))


@pytest.mark.parametrize("extra_id", [b"", b"x", b"../../../../etc/pa", b"y" * 17])
def test_an_id_is_16_bytes_and_never_a_path(tmp_path: Path, extra_id: bytes) -> None:
    with pytest.raises(BadOption, match="16 random bytes"):
        Extras(tmp_path).put(extra_id, 0, 1, b"x")


def test_what_nobody_takes_is_removed(tmp_path: Path) -> None:
    extras = Extras(tmp_path)
    extras.put(ID, 0, 1, b"x")
    extras.remove_old()
    assert extras.size(ID) == 1
    old = time.time() - 7200
    os.utime(tmp_path / UPLOADS / ID.hex(), (old, old))
    extras.remove_old()
    with pytest.raises(BadOption, match="bring it again"):
        extras.size(ID)


def test_a_rank_that_added_nothing_and_a_file_that_is_gone_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownCheckpoint, match="rank 1 added nothing"):
        read_part(manifest({}), tmp_path, 1, 0)
    with pytest.raises(CheckpointDamaged, match=r"extra\.x"):
        read_part(manifest({1: CheckpointFile("extra.x", 3, "")}), tmp_path, 1, 0)


def test_a_part_that_comes_twice_at_once_is_there_once(tmp_path: Path) -> None:
    extras, part = Extras(tmp_path), bytes(100_000)
    for number in range(50):
        extra_id, ready = number.to_bytes(16, "big"), threading.Barrier(4)

        def put(extra_id: bytes = extra_id, ready: threading.Barrier = ready) -> None:
            ready.wait()
            extras.put(extra_id, 0, 2 * len(part), part)

        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert extras.size(extra_id) == len(part)


def test_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abc")
    (tmp_path / "extra.x").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointDamaged, match="link"):
        read_part(manifest({0: CheckpointFile("extra.x", 3, "")}), tmp_path, 0, 0)


def test_behind_the_end_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "extra.x").write_bytes(b"abc")
    assert read_part(manifest({0: CheckpointFile("extra.x", 3, "")}), tmp_path, 0, 2**64 - 1) == (b"", 3)
