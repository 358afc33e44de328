"""A shard's state comes back from its folder bit for bit: from the journal, from a base, from both."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.shard_histories import (
    CLIENTS,
    CLUSTER,
    DEVICE,
    EPOCH,
    LINEAGE,
    TIMELINE,
    abandon,
    all_bits,
    begin_store,
    bits_after,
    come_back,
    every_change,
    lock_store,
    make_tables,
    new_state,
    push,
    write_base,
)

from shardam_proto.errors import JournalDamaged, SequenceError
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.reader import read_journal

FSYNC = JournalOptions(mode="fsync")
MODES: tuple[Literal["off", "write", "fsync"], ...] = ("write", "fsync", "off", "fsync", "off", "off", "write")


def must_not_run() -> Outcome:
    raise AssertionError("a repeat was applied")


@pytest.mark.parametrize("options", [JournalOptions(), FSYNC], ids=["write", "fsync"])
def test_every_kind_of_change_comes_back_from_the_journal(tmp_path: Path, options: JournalOptions) -> None:
    state = new_state()
    store = begin_store(tmp_path, state, options)
    for change in every_change():
        before = state.change_number
        change(state)
        assert state.change_number == before + 1
    abandon(store)
    assert bits_after(tmp_path, options) == all_bits(state)


def test_after_each_change_the_folder_holds_exactly_the_state_so_far(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path / "a", state)
    for number, change in enumerate(every_change(seed=1)):
        change(state)
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "a", copy)
        assert bits_after(copy) == all_bits(state)
    abandon(store)


@pytest.mark.parametrize("position", range(len(every_change()) + 1))
def test_a_base_at_any_position_of_the_history_gives_the_same_bits(tmp_path: Path, position: int) -> None:
    changes, state = every_change(seed=2), new_state()
    store = begin_store(tmp_path, state)
    for change in changes[:position]:
        change(state)
    write_base(store)
    copy = tmp_path / "base alone"
    shutil.copytree(tmp_path / "oak", copy / "oak")
    assert bits_after(copy) == all_bits(state)
    for change in changes[position:]:
        change(state)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_what_came_back_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    changes, undisturbed = every_change(seed=3), new_state()
    for change in changes:
        change(undisturbed)
    state = new_state()
    abandon(begin_store(tmp_path, state))
    for number, change in enumerate(changes):
        with come_back(tmp_path) as (store, state):
            change(state)
            if number % 5 == 4:
                write_base(store)
    assert bits_after(tmp_path) == all_bits(undisturbed)


@pytest.mark.parametrize("with_base", [False, True])
def test_a_repeat_after_a_kill_gets_the_former_answer(tmp_path: Path, with_base: bool) -> None:
    state, rng = new_state(), np.random.default_rng(4)
    store = begin_store(tmp_path, state)
    state.install(make_tables())
    state.open_client(CLIENTS[0])
    outcomes = {}
    for number in range(1, 71):
        push(rng, "words", "users")(state)
        entry = state.clients.get(CLIENTS[0])
        outcomes[number] = entry.outcomes[number][1]
    if with_base:
        write_base(store)
    abandon(store)

    with come_back(tmp_path) as (_, back):
        for number in range(7, 71):
            numbered = Origin(CLIENTS[0], number, b"digest %d" % number)
            assert back.run_number(numbered, must_not_run) == (outcomes[number], True)
        with pytest.raises(SequenceError, match="too old"):
            back.run_number(Origin(CLIENTS[0], 6, b"digest 6"), must_not_run)
        with pytest.raises(SequenceError, match="another content"):
            back.run_number(Origin(CLIENTS[0], 70, b"other"), must_not_run)


def test_limits_on_rows_hold_for_new_rows_not_for_those_that_come_back(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    for change in every_change():
        change(state)
    abandon(store)
    store, small = lock_store(tmp_path), new_state()
    small.max_rows = 1
    store.recover(small, DEVICE.make_records)
    store.release()
    assert small.num_rows == state.num_rows > 1
    assert small.max_rows == 1


def test_the_folder_says_which_state_it_holds_and_keeps_the_highest_epoch(tmp_path: Path) -> None:
    store = begin_store(tmp_path, new_state())
    store.note_epoch(9)
    store.note_epoch(8)
    abandon(store)
    store = lock_store(tmp_path)
    current = store.current
    assert current is not None
    assert (current.cluster, current.shard, current.cluster_name) == (CLUSTER, 0, "oak")
    assert (current.lineage, current.timeline, current.epoch) == (LINEAGE, TIMELINE, 9)
    assert EPOCH < 9
    store.release()


def test_a_state_that_is_not_empty_when_it_begins_gets_a_base(tmp_path: Path) -> None:
    state = new_state()
    state.install(make_tables())
    store = begin_store(tmp_path, state)
    state.open_client(CLIENTS[0])
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_a_new_lineage_replaces_what_the_folder_held(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    for change in every_change():
        change(state)
    write_base(store)
    abandon(store)
    store, state = lock_store(tmp_path), new_state()
    store.begin(CLUSTER, LINEAGE + 1, TIMELINE, EPOCH, state)
    assert sorted(path.name for path in store.path.iterdir()) == ["CURRENT", "LOCK", "journal-000003"]
    state.install(make_tables())
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_the_journal_is_read_without_a_shard_s_state(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    for change in every_change():
        change(state)
    abandon(store)
    records = [(record.change_number, record.WhichOneof("change")) for record, _ in read_journal(store.path)]
    assert [number for number, _ in records] == list(range(1, state.change_number + 1))
    kinds = {
        "push",
        "close",
        "assign",
        "delete",
        "clear_moments",
        "install",
        "steps",
        "open",
        "end",
        "forget",
        "part",
        "decision",
        "group",
    }
    assert {kind for _, kind in records} == kinds


def test_a_drained_shard_without_a_journal_comes_back_and_a_killed_one_is_refused(tmp_path: Path) -> None:
    off, state = JournalOptions(mode="off"), new_state()
    store = begin_store(tmp_path, state, off)
    for change in every_change():
        change(state)
    assert store.status().mode == shard_pb2.JOURNAL_MODE_OFF
    assert store.status().size_bytes < 200
    store.close()
    assert bits_after(tmp_path, off) == all_bits(state)  # come_back ends as a kill does
    store = lock_store(tmp_path, off)
    assert store.current is not None
    assert not store.current.complete
    store.release()


def test_a_killed_shard_without_a_journal_that_began_with_a_base_is_not_taken_for_whole(tmp_path: Path) -> None:
    state = new_state()
    state.install(make_tables())
    abandon(begin_store(tmp_path, state, JournalOptions(mode="off")))
    store = lock_store(tmp_path)
    assert store.current is not None
    assert not store.current.complete
    with pytest.raises(JournalDamaged, match="up to change 1 only"):
        store.recover(new_state(), DEVICE.make_records)
    store.release()


def test_a_base_that_cannot_be_written_at_the_end_leaves_the_folder_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(mode="off", operations=files))
    state.install(make_tables())
    files.fail("create", errno.ENOSPC)
    store.close()
    assert "the state ends incomplete" in caplog.text
    store = lock_store(tmp_path)
    assert store.current is not None
    assert not store.current.complete
    store.release()


def test_an_epoch_before_the_start_is_not_written(tmp_path: Path) -> None:
    store = lock_store(tmp_path)
    store.note_epoch(4)
    store.release()
    assert [path.name for path in store.path.iterdir()] == ["LOCK"]


def test_a_journal_that_ends_whole_starts_in_every_mode(tmp_path: Path) -> None:
    state = new_state()
    abandon(begin_store(tmp_path, state))
    for mode, change in zip(MODES, every_change(), strict=False):
        store, state = lock_store(tmp_path, JournalOptions(mode=mode)), new_state()
        store.recover(state, DEVICE.make_records)
        store.resume(state)
        change(state)
        store.close()
    assert bits_after(tmp_path) == all_bits(state)
