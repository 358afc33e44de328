"""A folder that another state takes over, with rows from the start: whole or not at all, at any crash."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from shardam_testing.crash_copies import Crashes
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.shard_histories import (
    CLUSTER,
    abandon,
    all_bits,
    begin_store,
    bits_after,
    every_change,
    lock_store,
    new_state,
)

from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.state import ShardState

TIMELINE, EPOCH, LINEAGE = 2, 3, 99
PLAN = '{"plan_id": "aa"}'


def loaded_state() -> ShardState:
    """Returns a state that no journal has seen, as a checkpoint leaves it."""
    state = new_state()
    for change in every_change(seed=5):
        change(state)
    return state


def test_a_crash_at_each_step_of_taking_a_folder_over_leaves_the_former_state_or_the_new_one(tmp_path: Path) -> None:
    files, old, new = ScriptedFiles(), new_state(), loaded_state()
    store = begin_store(tmp_path / "live", old, JournalOptions(operations=files))
    for change in every_change():
        change(old)
    former = all_bits(old)
    crashes = Crashes(tmp_path / "live", tmp_path)
    files.script = crashes.take
    store.give_up()
    store.begin(CLUSTER, LINEAGE, TIMELINE, EPOCH, new, PLAN)
    files.heal()
    current = store.current
    assert current is not None
    assert (current.lineage, current.timeline, current.epoch, current.plan) == (LINEAGE, TIMELINE, EPOCH, PLAN)
    found = [bits_after(copy) for _, copy in crashes]
    switch = crashes.operations.index("rename CURRENT.tmp") + 1
    assert found == [former] * switch + [all_bits(new)] * (len(found) - switch)
    state_before = all_bits(new)
    new.raise_steps({new.tables()[0].table_id: new.tables()[0].step + 1})
    assert all_bits(new) != state_before
    abandon(store)
    assert bits_after(tmp_path / "live") == all_bits(new)


def test_a_crash_at_each_step_of_a_first_start_with_rows_leaves_a_folder_that_begins_again(tmp_path: Path) -> None:
    files, new = ScriptedFiles(), loaded_state()
    store = lock_store(tmp_path / "live", JournalOptions(operations=files))
    crashes = Crashes(tmp_path / "live", tmp_path)
    files.script = crashes.take
    store.begin(CLUSTER, LINEAGE, TIMELINE, EPOCH, new)
    files.heal()
    abandon(store)
    unfinished = 0
    for operation, copy in crashes:
        store = lock_store(copy)
        current = store.current
        if current is not None and current.is_unfinished:
            unfinished += 1
            assert store.recover(new_state(), new_state().device.make_records).change_number == 0, operation
        if current is not None and not current.is_unfinished:
            store.release()
            assert bits_after(copy) == all_bits(new), operation
            continue
        again = loaded_state()
        store.begin(CLUSTER, LINEAGE + 1, TIMELINE, EPOCH, again)
        abandon(store)
        assert bits_after(copy) == all_bits(again), operation
    assert unfinished


@pytest.mark.parametrize("failing", ["create", "write", "rename"])
def test_a_folder_that_cannot_be_taken_over_keeps_what_it_held_and_is_tried_again(tmp_path: Path, failing: str) -> None:
    files, old, new = ScriptedFiles(), new_state(), loaded_state()
    store = begin_store(tmp_path / "live", old, JournalOptions(operations=files))
    for change in every_change():
        change(old)
    store.give_up()

    def fail(operation: str, path: Path) -> None:
        if operation == failing and (failing != "rename" or path.name == "CURRENT.tmp"):
            raise OSError(errno.ENOSPC, "no space")

    files.script = fail
    with pytest.raises(OSError, match="no space"):
        store.begin(CLUSTER, LINEAGE, TIMELINE, EPOCH, new)
    files.heal()
    assert store.current is not None
    assert store.current.lineage != LINEAGE
    store.begin(CLUSTER, LINEAGE, TIMELINE, EPOCH, new)
    abandon(store)
    assert bits_after(tmp_path / "live") == all_bits(new)
