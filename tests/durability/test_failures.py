"""Writes, cuts, renames and fsyncs that fail: what the journal promises then, and what comes back afterwards."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.shard_histories import (
    CLIENTS,
    abandon,
    all_bits,
    begin_store,
    bits_after,
    every_change,
    make_tables,
    new_state,
    push,
    try_base,
    write_base,
)
from shardam_testing.state_changes import find

from shardam_proto.errors import JournalFailed, JournalFull, OutOfMemory
from shardam_proto.v1 import journal_pb2, shard_pb2
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import StateStore
from shardam_server.shard.records import CpuRecords
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState

Push = Callable[[ShardState], object]


def started(data_dir: Path, **options: object) -> tuple[StateStore, ShardState, ScriptedFiles]:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(data_dir, state, JournalOptions(operations=files, spare_bytes=0, retry_s=0, **options))  # type: ignore[arg-type]
    state.install(make_tables())
    state.open_client(CLIENTS[0])
    return store, state, files


@pytest.fixture
def one_push() -> Push:
    return push(np.random.default_rng(1), "words", "users", "items", "tags", num_rows=30)


@pytest.mark.parametrize("most_bytes", [1, 7, 40, 1000])
def test_short_writes_are_completed(tmp_path: Path, most_bytes: int) -> None:
    files, state = ScriptedFiles(), new_state()
    files.most_bytes = most_bytes
    store = begin_store(tmp_path, state, JournalOptions(operations=files))
    for change in every_change():
        change(state)
    assert files.calls["write"] > 30
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_refuse_keeps_the_state_as_it_was_until_there_is_space(tmp_path: Path, one_push: Push, number: int) -> None:
    store, state, files = started(tmp_path, on_full="refuse")
    one_push(state)
    before, size = all_bits(state), store.status().size_bytes
    files.fail("write", number)
    for _ in range(2):
        with pytest.raises(JournalFull, match="make space, the next change tries again"):
            one_push(state)
        assert all_bits(state) == before
        assert store.status().state == shard_pb2.JOURNAL_STATE_FULL
        assert store.status().size_bytes == size
        assert not store.needs_base()
    files.heal()
    one_push(state)
    assert store.status().state == shard_pb2.JOURNAL_STATE_OK
    assert store.status().problem == ""
    abandon(store)
    assert files.failed["write"] == 2
    assert bits_after(tmp_path) == all_bits(state)


def fail_after(files: ScriptedFiles, num_writes: int) -> None:
    """Lets a write take 50 bytes at a time, and fail after some of them."""
    files.most_bytes, left = 50, num_writes

    def script(operation: str, path: Path) -> None:
        nonlocal left
        if operation == "write":
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, "ENOSPC")

    files.script = script


@pytest.mark.parametrize("num_writes", [0, 1, 5])
def test_a_record_that_was_written_in_part_is_cut_back(tmp_path: Path, one_push: Push, num_writes: int) -> None:
    store, state, files = started(tmp_path, on_full="refuse")
    size = (store.path / "journal-000001").stat().st_size
    fail_after(files, num_writes)
    with pytest.raises(JournalFull):
        one_push(state)
    assert (store.path / "journal-000001").stat().st_size == size
    files.heal()
    one_push(state)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_another_error_refuses_the_change_and_the_next_one_tries_again(tmp_path: Path, one_push: Push) -> None:
    store, state, files = started(tmp_path)
    before = all_bits(state)
    files.fail("write", errno.EIO, times=1)
    with pytest.raises(JournalFailed, match="nothing was changed, the next change tries again"):
        one_push(state)
    assert all_bits(state) == before
    one_push(state)
    assert store.status().state == shard_pb2.JOURNAL_STATE_OK
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def fail_write_and_cut(files: ScriptedFiles) -> None:
    fail_after(files, 2)
    failing_write = files.script

    def script(operation: str, path: Path) -> None:
        if operation == "truncate":
            raise OSError(errno.EIO, "EIO")
        failing_write(operation, path)

    files.script = script


@pytest.mark.parametrize("on_full", ["suspend", "refuse"])
def test_a_write_that_cannot_be_cut_back_ends_all_changes(tmp_path: Path, one_push: Push, on_full: str) -> None:
    store, state, files = started(tmp_path, on_full=on_full)
    one_push(state)
    before = all_bits(state)
    fail_write_and_cut(files)
    with pytest.raises(JournalFailed, match="could not be cut back"):
        one_push(state)
    files.heal()
    for _ in range(2):
        with pytest.raises(JournalFailed, match="start the shard again"):
            one_push(state)
    assert all_bits(state) == before
    assert store.status().state == shard_pb2.JOURNAL_STATE_FAILED
    assert not store.needs_base()
    assert try_base(store) is None
    store.close()
    assert bits_after(tmp_path) == before  # what could not be cut back is an incomplete record, which no one was told of


def test_a_change_that_finds_no_room_is_taken_back_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, state, files = started(tmp_path)
    before, size = all_bits(state), store.status().size_bytes

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    def assign() -> None:
        state.assign(find(state, "words"), RowWrite(np.arange(2), np.ones((2, 3), np.float32)))

    with monkeypatch.context() as patch:
        patch.setattr(CpuRecords, "write", fail)
        with pytest.raises(OutOfMemory):
            assign()
        assert store.status().size_bytes == size
        files.fail("truncate", errno.EIO)
        with pytest.raises(JournalFailed):
            assign()
    assert store.status().state == shard_pb2.JOURNAL_STATE_FAILED
    assert all_bits(state).tables["words"][4] == before.tables["words"][4]
    abandon(store)


def test_a_failed_fsync_ends_all_changes_and_is_never_repeated(tmp_path: Path, one_push: Push) -> None:
    store, state, files = started(tmp_path, mode="fsync")

    async def run() -> None:
        await store.journal.durable()
        files.fail("sync", errno.EIO, times=1)
        one_push(state)
        waiting = [asyncio.ensure_future(store.journal.durable()) for _ in range(3)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [JournalFailed] * 3
        assert "may not be on the disk" in str(results[0])
        with pytest.raises(JournalFailed):
            await store.journal.durable()

    asyncio.run(run())
    syncs = files.calls["sync"]
    with pytest.raises(JournalFailed, match="start the shard again"):
        one_push(state)
    assert store.status().state == shard_pb2.JOURNAL_STATE_FAILED
    store.close()
    assert files.failed["sync"] == 1
    assert files.calls["sync"] == syncs
    assert store.kept_change < state.change_number
    assert bits_after(tmp_path) == all_bits(state)  # written, not acknowledged: it may come back


def test_acknowledgements_never_precede_the_fsync(tmp_path: Path, one_push: Push) -> None:
    store, state, files = started(tmp_path, mode="fsync")

    async def run() -> None:
        await store.journal.durable()
        synced: list[int] = []
        files.script = lambda operation, path: (
            synced.append((store.path / "journal-000001").stat().st_size) if operation == "sync" else None
        )
        for _ in range(20):
            one_push(state)
            await store.journal.durable()
            assert max(synced) == store.status().size_bytes
            assert store.kept_change == state.change_number

    asyncio.run(run())
    store.close()
    assert bits_after(tmp_path) == all_bits(state)


def test_a_change_in_write_mode_is_acknowledged_without_an_fsync(tmp_path: Path, one_push: Push) -> None:
    store, state, files = started(tmp_path)
    syncs = files.calls["sync"]
    one_push(state)
    asyncio.run(store.journal.durable())
    assert files.calls["sync"] == syncs
    assert store.kept_change == state.change_number
    abandon(store)


def test_a_change_that_was_taken_back_does_not_count_as_kept(tmp_path: Path, one_push: Push) -> None:
    store, state, _ = started(tmp_path)
    one_push(state)
    store.journal.append(journal_pb2.JournalRecord(change_number=state.change_number + 1), [])
    assert store.kept_change == state.change_number + 1
    store.journal.retract()
    assert store.kept_change == state.change_number
    abandon(store)


def test_a_suspension_that_cannot_be_noted_ends_all_changes(tmp_path: Path, one_push: Push) -> None:
    store, state, files = started(tmp_path)
    one_push(state)
    before = all_bits(state)

    def script(operation: str, path: Path) -> None:
        if operation in ("write", "rename"):
            raise OSError(errno.ENOSPC, "ENOSPC")

    files.script = script
    with pytest.raises(JournalFailed, match="could not be noted"):
        one_push(state)
    files.heal()
    with pytest.raises(JournalFailed):
        one_push(state)
    assert all_bits(state) == before
    store.close()
    assert bits_after(tmp_path) == before


def test_an_epoch_that_cannot_be_written_goes_with_the_next_base(tmp_path: Path) -> None:
    store, state, files = started(tmp_path)
    files.fail("write", errno.ENOSPC, part="CURRENT")
    store.note_epoch(12)
    files.heal()
    write_base(store)
    abandon(store)
    assert find(state, "words").step == 0
    assert '"epoch": 12' in (store.path / "CURRENT").read_text()
