"""Bases: when they are written, what they replace, and that a crash at any point of one leaves a folder that recovers."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.crash_copies import Crashes
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.shard_histories import (
    CLIENTS,
    CLUSTER,
    AllBits,
    abandon,
    all_bits,
    begin_store,
    between_changes,
    bits_after,
    every_change,
    lock_store,
    make_tables,
    new_state,
    push,
    try_base,
    write_base,
)
from shardam_testing.waiting import wait_for

from shardam_proto.errors import JournalDamaged
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.journal.base_writer import BaseReport
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.sequencer import Sequencer

TRUNCATE = JournalOptions(truncate=True)


def test_a_crash_at_each_step_of_a_base_loses_nothing(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path / "live", state, JournalOptions(operations=files))
    for number, change in enumerate(every_change()):
        change(state)
        if number == 8:
            write_base(store)
    before = all_bits(state)
    crashes = Crashes(tmp_path / "live", tmp_path)
    files.script = crashes.take
    write_base(store)
    files.heal()
    for operation, copy in crashes:
        assert bits_after(copy) == before, operation
        assert bits_after(copy) == before, operation
    assert [name for name in crashes.operations if not name.startswith(("write", "free"))] == [
        "create journal-000003.tmp",
        "sync journal-000003.tmp",
        "rename journal-000003.tmp",
        "sync_folder shard-0",
        "create base-000003",
        "sync base-000003",
        "create CURRENT.tmp",
        "sync CURRENT.tmp",
        "rename CURRENT.tmp",
        "sync_folder shard-0",
        "remove base-000002",
        "remove journal-000002",
    ]
    assert sorted(path.name for path in store.path.iterdir()) == ["CURRENT", "LOCK", "base-000003", "journal-000003"]
    abandon(store)


def test_changes_go_on_while_a_base_is_written_and_a_crash_in_between_keeps_them(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path / "live", state, JournalOptions(operations=files))
    changes = every_change(seed=1)
    for change in changes[:15]:
        change(state)
    left, taken = changes[15:], list[AllBits]()
    crashes = Crashes(tmp_path / "live", tmp_path)

    def script(operation: str, path: Path) -> None:
        """Before each step of the base file and before what it replaces goes: one more change, then what a kill leaves."""
        if not path.name.startswith("base-") and operation != "remove":
            return  # the journal's own, or CURRENT, for which changes wait
        if left:
            left.pop(0)(state)
        taken.append(all_bits(state))
        crashes.take(operation, path)

    files.script = script
    write_base(store)
    files.heal()
    assert len(taken) == crashes.num_copies > 5
    for (operation, copy), bits in zip(crashes, taken, strict=True):
        assert bits_after(copy) == bits, operation
    for change in left:
        change(state)
    abandon(store)
    assert bits_after(tmp_path / "live") == all_bits(state)


def full_disk(operation: str, path: Path) -> None:
    if operation == "write":
        raise OSError(errno.ENOSPC, "ENOSPC")


def test_a_crash_at_each_step_of_the_base_that_ends_a_suspension_has_all_or_says_what_is_lost(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path / "live", state, JournalOptions(operations=files))
    changes = every_change(seed=2)
    for change in changes[:12]:
        change(state)
    kept = all_bits(state)
    files.script = full_disk
    for change in changes[12:20]:
        change(state)
    assert store.status().state == shard_pb2.JOURNAL_STATE_SUSPENDED
    after = all_bits(state)
    crashes = Crashes(tmp_path / "live", tmp_path)
    files.script = crashes.take
    write_base(store)
    files.heal()
    outcomes = []
    for operation, copy in crashes:
        try:
            assert bits_after(copy) == after, operation
            outcomes.append("all")
        except JournalDamaged:
            assert bits_after(copy, TRUNCATE) == kept, operation
            outcomes.append("lost")
    assert outcomes == sorted(outcomes, reverse=True)  # lost before CURRENT is there, all from then on
    assert crashes.operations[outcomes.index("all") - 1] == "rename CURRENT.tmp"
    for change in changes[20:]:
        change(state)
    abandon(store)
    assert bits_after(tmp_path / "live") == all_bits(state)


def test_a_disk_that_is_full_again_while_a_base_is_written_leaves_the_journal_suspended(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(operations=files))
    changes = every_change(seed=3)
    for change in changes[:10]:
        change(state)
    kept = all_bits(state)
    files.script = full_disk
    changes[10](state)
    names = sorted(path.name for path in store.path.iterdir())

    def script(operation: str, path: Path) -> None:
        if operation == "sync" and path.name.startswith("base-"):
            files.script = full_disk
            changes[11](state)
            files.heal()

    files.script = script
    assert try_base(store) is None
    assert "full again" in store.status().problem
    assert store.status().state == shard_pb2.JOURNAL_STATE_SUSPENDED
    assert sorted(path.name for path in store.path.iterdir()) == names
    changes[12](state)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "oak", copy / "oak")
    assert bits_after(copy, TRUNCATE) == kept
    write_base(store)
    assert store.status().state == shard_pb2.JOURNAL_STATE_OK
    changes[13](state)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_a_disk_that_becomes_full_while_a_base_is_written_suspends_the_journal(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(operations=files))
    changes = every_change(seed=4)
    for change in changes[:10]:
        change(state)
    kept = all_bits(state)

    def script(operation: str, path: Path) -> None:
        if operation == "sync" and path.name.startswith("base-"):
            files.script = full_disk
            changes[10](state)
            files.heal()

    files.script = script
    assert try_base(store) is None
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "oak", copy / "oak")
    assert bits_after(copy, TRUNCATE) == kept
    write_base(store)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_folder"])
@pytest.mark.parametrize("part", ["journal-", "base-", "CURRENT", "shard-0"])
def test_a_base_that_fails_at_any_operation_leaves_what_was_and_the_next_one_succeeds(
    tmp_path: Path, operation: str, part: str, suspended: bool
) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(operations=files, retry_s=0, spare_bytes=0))
    changes = every_change(seed=5)
    for change in changes[:10]:
        change(state)
    if suspended:
        files.script = full_disk
        changes[10](state)
    files.fail(operation, errno.ENOSPC, part=part, times=1)
    report = try_base(store)
    files.heal()
    if files.failed[operation] > suspended and report is None:
        assert "no new base could be written" in store.status().problem
        if suspended:
            assert store.status().state == shard_pb2.JOURNAL_STATE_SUSPENDED
    for change in changes[10 + suspended : 20]:
        change(state)
    write_base(store)
    assert store.status().state == shard_pb2.JOURNAL_STATE_OK
    assert store.status().problem == ""
    for change in changes[20:]:
        change(state)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)
    assert len([path for path in store.path.iterdir() if path.name.startswith("base-")]) == 1


def test_a_crash_at_each_step_of_a_new_lineage_has_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    files, old = ScriptedFiles(), new_state()
    store = begin_store(tmp_path / "live", old)
    for change in every_change():
        change(old)
    abandon(store)
    store, state = lock_store(tmp_path / "live", JournalOptions(operations=files)), new_state()
    crashes = Crashes(tmp_path / "live", tmp_path)
    files.script = crashes.take
    store.begin(CLUSTER, 99, 1, 1, state)
    files.heal()
    abandon(store)
    found = [bits_after(copy) for _, copy in crashes]
    switch = crashes.operations.index("rename CURRENT.tmp") + 1
    assert found == [all_bits(old)] * switch + [all_bits(new_state())] * (len(found) - switch)


def test_a_crash_at_each_step_of_a_first_start_leaves_nothing_or_an_empty_state(tmp_path: Path) -> None:
    files = ScriptedFiles()
    store = lock_store(tmp_path / "live", JournalOptions(operations=files))
    crashes = Crashes(tmp_path / "live", tmp_path)
    files.script = crashes.take
    store.begin(CLUSTER, 99, 1, 1, new_state())
    abandon(store)
    for operation, copy in crashes:
        store, state = lock_store(copy), new_state()
        assert store.current is None or store.current.lineage == 99, operation
        store.begin(CLUSTER, 100, 1, 1, state)
        state.install(make_tables())
        abandon(store)
        assert bits_after(copy) == all_bits(state)


def test_the_journal_gets_a_base_by_itself_at_its_limit(tmp_path: Path) -> None:
    options = JournalOptions(limit_bytes=20_000, spare_bytes=0)
    state = new_state()
    store = begin_store(tmp_path, state, options)
    rng = np.random.default_rng(1)

    async def run() -> None:
        sequencer = Sequencer()
        keeping = asyncio.create_task(store.keep_bases(sequencer.change))
        await sequencer.change(lambda: state.install(make_tables()))
        await sequencer.change(lambda: state.open_client(CLIENTS[0]))
        reports: set[BaseReport | None] = set()
        deadline = time.monotonic() + 60
        while len(reports) < 3 and time.monotonic() < deadline:  # None, and two bases
            change = push(rng, "words", "users", num_rows=20)
            await sequencer.change(lambda change=change: change(state))  # type: ignore[misc]
            await store.journal.durable()
            reports.add(store.status().last_base)
            await asyncio.sleep(0.02)  # a worker computes between its pushes
        assert len(reports) == 3
        keeping.cancel()
        await asyncio.to_thread(sequencer.close)

    asyncio.run(run())
    report = store.status().last_base
    assert report is not None
    assert report.num_rows == state.num_rows
    assert 0 < report.held_s <= report.seconds
    assert report.size_bytes > report.num_rows * 40
    store.close()
    assert bits_after(tmp_path) == all_bits(state)


def test_a_base_that_needs_more_room_than_there_is_waits(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(limit_bytes=100, operations=files, retry_s=0, spare_bytes=1000))
    for change in every_change():
        change(state)
    files.free = 1000
    assert not store.needs_base()
    assert "a new base needs" in store.status().problem
    files.free = 10**9
    assert store.needs_base()
    write_base(store)
    assert store.status().problem == ""
    assert not store.needs_base()  # the journal is smaller than the base
    abandon(store)


def test_a_failed_base_is_not_tried_again_at_once(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(limit_bytes=100, operations=files, retry_s=3600, spare_bytes=0))
    for change in every_change():
        change(state)
    assert store.needs_base()
    files.fail("create", errno.EIO, part="base-")
    assert try_base(store) is None
    assert not store.needs_base()
    abandon(store)


def test_closing_waits_for_a_base_that_is_being_written(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(operations=files))
    for change in every_change():
        change(state)
    reached, go_on = threading.Event(), threading.Event()

    def script(operation: str, path: Path) -> None:
        if operation == "sync" and path.name.startswith("base-"):
            reached.set()
            assert go_on.wait(60)

    files.script = script

    async def run() -> None:
        writing = asyncio.create_task(store.write_base(between_changes))
        await asyncio.to_thread(reached.wait, 60)
        writing.cancel()
        closing = asyncio.create_task(asyncio.to_thread(store.close))
        go_on.set()
        await closing

    asyncio.run(run())
    wait_for("the folder to be free", lambda: all_bits(state) == bits_after(tmp_path))
    assert (tmp_path / "oak" / "shard-0" / "base-000002").exists()
