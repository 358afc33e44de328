"""Memory as the only copy: what a shard says and saves then, and what it must not save."""

from __future__ import annotations

import errno
import logging
import os
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
    lock_store,
    make_tables,
    new_state,
    push,
    try_base,
    write_base,
)
from shardam_testing.state_changes import find
from shardam_testing.waiting import wait_for

from shardam_proto.errors import JournalDamaged, JournalFailed, OutOfMemory
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.journal import base_writer, folder
from shardam_server.shard.journal.base_writer import BaseFailed
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import StateStore
from shardam_server.shard.records import CpuRecords
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table

TRUNCATE = JournalOptions(truncate=True)


def started(data_dir: Path, **options: object) -> tuple[StateStore, ShardState, ScriptedFiles]:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(data_dir, state, JournalOptions(operations=files, spare_bytes=0, retry_s=0, **options))  # type: ignore[arg-type]
    state.install(make_tables())
    state.open_client(CLIENTS[0])
    return store, state, files


def make_push(seed: int = 1) -> Callable[[ShardState], object]:
    return push(np.random.default_rng(seed), "words", "users", "items", "tags", num_rows=30)


def suspend(state: ShardState, files: ScriptedFiles) -> None:
    """Makes a change while the disk is full."""
    files.fail("write", errno.ENOSPC)
    make_push(seed=2)(state)
    files.heal()


def fail_while_a_base_is_written(store: StateStore, state: ShardState, files: ScriptedFiles, *, base_fails: bool) -> None:
    """Suspends the journal and lets an fsync fail while a base is written that is to end it."""
    suspend(state, files)
    goes_on = False

    def script(operation: str, path: Path) -> None:
        nonlocal goes_on
        if operation == "sync" and path.name.startswith("journal-") and goes_on:
            raise OSError(errno.EIO, "EIO")
        if operation == "sync" and path.name.startswith("base-"):
            goes_on = True
            make_push(seed=3)(state)  # to the file that goes on from the base
            wait_for("the fsync to fail", lambda: store.status().state == shard_pb2.JOURNAL_STATE_FAILED)
            if base_fails:
                raise OSError(errno.EIO, "EIO")

    files.script = script
    assert (try_base(store) is None) == base_fails
    files.heal()


def test_a_suspended_journal_that_fails_says_that_memory_is_the_only_copy(tmp_path: Path) -> None:
    store, state, files = started(tmp_path, mode="fsync")
    fail_while_a_base_is_written(store, state, files, base_fails=True)
    problem = store.status().problem
    assert "comes back with every change" not in problem
    assert "in memory only: make space and stop the shard with SIGTERM, and it writes a base; if it is killed" in problem
    with pytest.raises(JournalFailed, match="in memory only"):
        make_push(seed=4)(state)
    abandon(store)
    store = lock_store(tmp_path)
    with pytest.raises(JournalDamaged, match="--truncate-journal"):
        store.recover(new_state(), store_make_records())
    store.release()


def store_make_records() -> Callable[..., CpuRecords]:
    return lambda layout, initial: CpuRecords(layout, initial, num_threads=1)


def test_an_orderly_end_saves_what_a_failed_journal_has_in_memory_only(tmp_path: Path) -> None:
    store, state, files = started(tmp_path, mode="fsync")
    fail_while_a_base_is_written(store, state, files, base_fails=True)
    store.close()
    assert bits_after(tmp_path) == all_bits(state)


def test_a_failed_journal_gets_a_base_by_itself_as_long_as_memory_is_the_only_copy(tmp_path: Path) -> None:
    store, state, files = started(tmp_path, mode="fsync")
    fail_while_a_base_is_written(store, state, files, base_fails=True)
    assert store.needs_base()
    write_base(store)
    assert not store.needs_base()
    assert store.status().state == shard_pb2.JOURNAL_STATE_FAILED
    assert "start the shard again: it comes back with every change" in store.status().problem
    with pytest.raises(JournalFailed, match="start the shard again"):
        make_push(seed=4)(state)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_a_base_that_is_written_although_the_journal_fails_meanwhile_makes_the_state_whole(tmp_path: Path) -> None:
    store, state, files = started(tmp_path, mode="fsync")
    fail_while_a_base_is_written(store, state, files, base_fails=False)
    assert store.status().state == shard_pb2.JOURNAL_STATE_FAILED
    assert "start the shard again: it comes back with every change" in store.status().problem
    assert try_base(store) is None
    store.close()
    assert bits_after(tmp_path) == all_bits(state)


def test_a_last_base_that_cannot_be_written_leaves_the_files_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, state, files = started(tmp_path, mode="fsync")
    kept = all_bits(state)
    fail_while_a_base_is_written(store, state, files, base_fails=True)
    files.fail("write", errno.ENOSPC, part="base-")
    store.close()
    assert "the state ends incomplete" in caplog.text
    assert bits_after(tmp_path, TRUNCATE) == kept


def break_off(state: ShardState, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Table.apply

    def apply_or_fail(table: Table, *arguments: object) -> None:
        if table.spec.name == "items":
            raise MemoryError("injected")
        apply(table, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Table, "apply", apply_or_fail)
        with pytest.raises(JournalFailed, match="could not be applied in memory"):
            make_push(seed=5)(state)


@pytest.mark.parametrize("mode", ["write", "fsync"])
def test_a_change_that_breaks_off_in_memory_comes_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    store, state, _ = started(tmp_path, mode=mode)
    twin_store, twin, _ = started(tmp_path / "twin")
    for one in (state, twin):
        make_push()(one)
    break_off(state, monkeypatch)
    make_push(seed=5)(twin)
    assert store.status().state == shard_pb2.JOURNAL_STATE_FAILED
    assert "nothing is read or changed any more: start the shard again: it comes back" in store.status().problem
    assert not store.needs_base()
    assert try_base(store) is None
    store.close()
    assert bits_after(tmp_path) == all_bits(twin)
    abandon(twin_store)


def test_half_applied_memory_is_never_saved_even_if_it_is_the_only_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state, files = started(tmp_path)
    kept = all_bits(state)
    suspend(state, files)
    break_off(state, monkeypatch)
    assert "start the shard with --truncate-journal, and it comes back as of the last change" in store.status().problem
    assert not store.needs_base()
    store.close()
    assert bits_after(tmp_path, TRUNCATE) == kept


def test_a_base_that_was_copied_before_a_change_broke_off_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, state, files = started(tmp_path)
    twin_store, twin, _ = started(tmp_path / "twin")
    suspend(state, files)
    for seed in (2, 5):
        make_push(seed)(twin)

    def script(operation: str, path: Path) -> None:
        if operation == "sync" and path.name.startswith("base-"):
            break_off(state, monkeypatch)

    files.script = script
    write_base(store)
    files.heal()
    assert "it comes back with every change" in store.status().problem
    store.close()
    assert bits_after(tmp_path) == all_bits(twin)
    abandon(twin_store)


def test_an_orderly_end_in_write_mode_waits_for_the_disk(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(operations=files))
    changes = every_change()
    for change in changes[:10]:
        change(state)
    files.fail("sync", errno.EIO, part="base-")
    assert try_base(store) is None  # leaves two files that are needed
    for change in changes[10:]:
        change(state)
    synced: list[str] = []
    files.script = lambda operation, path: synced.append(path.name) if operation == "sync" else None
    store.close()
    assert synced == ["journal-000001", "journal-000002"]
    assert bits_after(tmp_path) == all_bits(state)


def test_a_disk_that_fails_at_an_orderly_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, state, files = started(tmp_path)
    files.fail("sync", errno.EIO)
    with caplog.at_level(logging.ERROR):
        store.close()
    assert "may not be on the disk" in caplog.text
    assert bits_after(tmp_path) == all_bits(state)


def test_what_was_dropped_with_a_base_that_failed_is_not_cut_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, state, files = started(tmp_path)
    kept = all_bits(state)
    suspend(state, files)
    failing = True

    def lose_the_base(*_: object) -> None:
        """Between the record of a change and its failure the base cannot be written."""
        nonlocal failing
        failing = False
        store.journal.abandon(store.journal.suspensions)
        raise MemoryError("full")

    def script(operation: str, path: Path) -> None:
        if operation == "sync" and path.name.startswith("base-") and failing:
            with monkeypatch.context() as patch:
                patch.setattr(CpuRecords, "write", lose_the_base)
                with pytest.raises(OutOfMemory):
                    state.assign(find(state, "words"), RowWrite(np.arange(2), np.ones((2, 3), np.float32)))

    files.script = script
    truncated = files.calls["truncate"]
    assert try_base(store) is None
    assert files.calls["truncate"] == truncated
    files.heal()
    assert store.status().state == shard_pb2.JOURNAL_STATE_SUSPENDED
    make_push(seed=6)(state)
    write_base(store)
    make_push(seed=7)(state)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)
    assert kept.change_number < state.change_number


def unreadable(*_: object) -> list[Path]:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_folder_that_cannot_be_listed_fails_the_base_and_not_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state, _ = started(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(base_writer, "list_journal_files", unreadable)
        assert try_base(store) is None
        assert "no new base could be written" in store.status().problem
        with pytest.raises(BaseFailed):
            store._require_bases().copy()
    make_push()(state)
    write_base(store)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_files_that_cannot_be_listed_to_be_removed_stay_until_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, state, _ = started(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "list_unneeded", unreadable)
        write_base(store)
    assert "cannot be listed" in caplog.text
    assert (store.path / "journal-000001").exists()
    write_base(store)
    assert not (store.path / "journal-000001").exists()
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)
