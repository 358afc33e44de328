"""Damage to a shard's folder, and what a start with it says and leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardam_proto.errors import JournalDamaged
from shardam_server.shard.journal.frames import JOURNAL_MAGIC, FrameReader
from shardam_server.shard.journal.options import JournalOptions
from shardam_testing.shard_histories import DEVICE, AllBits, bits_after, folder_bytes, lock_store, new_state

TRUNCATE = JournalOptions(truncate=True)

FOLDER = Path("oak", "shard-0")


def frames_of(path: Path, magic: bytes = JOURNAL_MAGIC) -> list[tuple[int, int, int]]:
    """Offset, message bytes and array bytes of each frame."""
    frames = []
    with FrameReader(path, magic) as reader:
        reader.read_preamble()
        while (frame := reader.next(None)) is not None:
            frames.append((frame.offset, len(frame.message), len(frame.arrays)))
    return frames


def flip(path: Path, offset: int, bits: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def look(data_dir: Path, options: JournalOptions | None) -> None:
    store = lock_store(data_dir, options)
    try:
        store.recover(new_state(), DEVICE.make_records)
    finally:
        store.release()


def refused(data_dir: Path, kind: type[Exception] = JournalDamaged, options: JournalOptions | None = None) -> str:
    """Starts with a folder that is refused; returns why, having checked that nothing was changed."""
    before = folder_bytes(data_dir / FOLDER)
    with pytest.raises(kind) as error:
        look(data_dir, options)
    assert folder_bytes(data_dir / FOLDER) == before
    return str(error.value)


def check_cut(data_dir: Path, path: Path, offset: int, kept: AllBits) -> None:
    """A damage at an offset is refused; with --truncate-journal the shard starts with what is before it, and then without."""
    message = refused(data_dir)
    assert f"{path} is damaged at byte {offset}:" in message
    assert f"Changes up to {kept.change_number} can be read" in message
    assert "--truncate-journal" in message
    assert bits_after(data_dir, TRUNCATE) == kept
    assert bits_after(data_dir) == kept
