"""A disk that is really full: a small tmpfs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from shardam_testing.shard_histories import (
    CLIENTS,
    DEVICE,
    abandon,
    all_bits,
    begin_store,
    between_changes,
    bits_after,
    lock_store,
    make_tables,
    new_state,
    push,
    try_base,
)
from shardam_testing.small_disk import small_disk
from shardam_testing.waiting import wait_for

from shardam_proto.errors import JournalDamaged, JournalFull
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import StateStore
from shardam_server.shard.state import ShardState

DISK_BYTES = 256 * 1024
FILLER_BYTES = 128 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


def started(disk: Path, on_full: Literal["suspend", "refuse"]) -> tuple[StateStore, ShardState]:
    """A shard on a disk that half is taken of by something else."""
    (disk / "filler").write_bytes(b"x" * FILLER_BYTES)
    state = new_state()
    store = begin_store(disk, state, JournalOptions(on_full=on_full, retry_s=0, spare_bytes=32 * 1024))
    state.install(make_tables())
    state.open_client(CLIENTS[0])
    return store, state


def fill(store: StateStore, state: ShardState, rng: np.random.Generator, until: shard_pb2.JournalState.ValueType) -> None:
    """Pushes until the journal is in a state."""
    for _ in range(1000):
        push(rng, "words", "users", num_rows=40)(state)
        if store.status().state == until:
            return
    raise AssertionError("the disk did not become full")


def test_a_full_disk_refuses_changes_until_there_is_space(disk: Path) -> None:
    store, state = started(disk, "refuse")
    rng = np.random.default_rng(1)
    with pytest.raises(JournalFull):
        fill(store, state, rng, shard_pb2.JOURNAL_STATE_FAILED)
    before = all_bits(state)
    with pytest.raises(JournalFull, match="make space"):
        push(rng, "words", num_rows=40)(state)
    assert all_bits(state) == before
    (disk / "filler").unlink()
    push(rng, "words", num_rows=40)(state)
    assert store.status().state == shard_pb2.JOURNAL_STATE_OK
    abandon(store)
    assert bits_after(disk) == all_bits(state)


def test_a_full_disk_suspends_the_journal_and_a_base_resumes_it(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, state = started(disk, "suspend")
    rng = np.random.default_rng(2)
    fill(store, state, rng, shard_pb2.JOURNAL_STATE_SUSPENDED)
    for _ in range(20):
        push(rng, "words", "users", num_rows=40)(state)
    assert sum("DEGRADED" in record.message for record in caplog.records) == 1
    assert "make space" in store.status().problem
    assert not store.needs_base()
    assert "a new base needs" in store.status().problem
    (disk / "filler").unlink()
    assert store.needs_base()
    assert try_base(store) is not None
    assert store.status().state == shard_pb2.JOURNAL_STATE_OK
    assert store.status().problem == ""
    push(rng, "words", num_rows=40)(state)
    assert store.kept_change == state.change_number
    abandon(store)
    assert bits_after(disk) == all_bits(state)


def test_a_base_is_written_by_itself_when_there_is_space_again(disk: Path) -> None:
    store, state = started(disk, "suspend")
    fill(store, state, np.random.default_rng(3), shard_pb2.JOURNAL_STATE_SUSPENDED)

    async def run() -> None:
        keeping = asyncio.create_task(store.keep_bases(between_changes))
        (disk / "filler").unlink()
        await asyncio.to_thread(wait_for, "the journal to go on", lambda: store.status().state == shard_pb2.JOURNAL_STATE_OK)
        keeping.cancel()

    asyncio.run(run())
    abandon(store)
    assert bits_after(disk) == all_bits(state)


@pytest.mark.parametrize("num_lost", [0, 25])
def test_a_shard_that_is_killed_while_suspended_says_what_is_lost(disk: Path, num_lost: int) -> None:
    store, state = started(disk, "suspend")
    rng = np.random.default_rng(4)
    kept = None
    for _ in range(1000):
        before = all_bits(state)
        push(rng, "words", "users", num_rows=40)(state)
        if store.status().state == shard_pb2.JOURNAL_STATE_SUSPENDED:
            kept = before
            break
    assert kept is not None
    for _ in range(num_lost):
        push(rng, "words", num_rows=40)(state)
    assert store.kept_change == kept.change_number
    abandon(store)
    store = lock_store(disk)
    assert store.current is not None
    assert not store.current.complete
    message = f"holds the state up to change {kept.change_number} only.*--truncate-journal starts it as of change"
    with pytest.raises(JournalDamaged, match=message):
        store.recover(new_state(), DEVICE.make_records)
    store.release()
    assert bits_after(disk, JournalOptions(truncate=True)) == kept
    assert bits_after(disk) == kept


def test_a_drained_shard_ends_its_suspension_with_a_base_if_there_is_space(disk: Path) -> None:
    store, state = started(disk, "suspend")
    fill(store, state, np.random.default_rng(5), shard_pb2.JOURNAL_STATE_SUSPENDED)
    (disk / "filler").unlink()
    store.close()
    assert bits_after(disk) == all_bits(state)


def test_a_base_that_finds_no_space_leaves_the_suspended_state_as_it_was(disk: Path) -> None:
    store, state = started(disk, "suspend")
    rng = np.random.default_rng(6)
    fill(store, state, rng, shard_pb2.JOURNAL_STATE_SUSPENDED)
    before = sorted(path.name for path in store.path.iterdir())
    for _ in range(3):
        assert try_base(store) is None
        push(rng, "words", num_rows=40)(state)
        assert store.status().state == shard_pb2.JOURNAL_STATE_SUSPENDED
    assert sorted(path.name for path in store.path.iterdir()) == before
    (disk / "filler").unlink()
    assert try_base(store) is not None
    push(rng, "words", num_rows=40)(state)
    abandon(store)
    assert bits_after(disk) == all_bits(state)
