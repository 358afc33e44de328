"""Bases that are copied while changes go on: what a change meets, and what is left of a base that is given up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from shardam_testing.scripted_files import ScriptedFiles
from shardam_testing.shard_histories import (
    abandon,
    all_bits,
    begin_store,
    bits_after,
    every_change,
    new_state,
    try_base,
    write_base,
)

from shardam_server.shard.journal.base_writer import BaseCopy, BaseReport
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.storage import RowStorage


@pytest.mark.case("C075")
def test_a_push_completes_while_a_base_is_held_at_a_gate_and_the_base_is_without_it(tmp_path: Path) -> None:
    files, state = ScriptedFiles(), new_state()
    store = begin_store(tmp_path, state, JournalOptions(operations=files))
    changes = every_change(seed=6)
    for change in changes[:15]:
        change(state)
    at_gate, gate = threading.Event(), threading.Event()
    num_writes = 0

    def script(operation: str, path: Path) -> None:
        nonlocal num_writes
        if operation == "write" and path.name.startswith("base-"):
            num_writes += 1
            if num_writes == 3:  # behind the header and the first table
                at_gate.set()
                assert gate.wait(60)

    files.script = script

    async def run() -> BaseReport | None:
        sequencer = Sequencer()
        writing = asyncio.create_task(store.write_base(sequencer.change))
        await asyncio.to_thread(at_gate.wait, 60)
        for change in changes[15:20]:
            await asyncio.wait_for(sequencer.change(lambda change=change: change(state)), 60)  # type: ignore[misc]
        assert state.snapshots.kept_bytes > 0
        gate.set()
        report = await writing
        await asyncio.to_thread(sequencer.close)
        return report

    report = asyncio.run(run())
    assert report is not None
    assert report.change_number == 15
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_a_base_that_is_given_up_before_it_is_written_keeps_no_change_waiting(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    changes = every_change(seed=7)
    for change in changes[:15]:
        change(state)

    async def run(*, begins_before: bool) -> None:
        begun, given_up = asyncio.Event(), asyncio.Event()

        async def change_late(copy: Callable[[], BaseCopy]) -> BaseCopy:
            """As a sequencer does it: what is taken in is carried out, whoever waits for it."""
            if begins_before:
                copied = copy()
                begun.set()
                await given_up.wait()
                return copied
            begun.set()
            try:
                await given_up.wait()
            finally:
                late.append(copy)
            return copy()

        late: list[Callable[[], BaseCopy]] = []
        writing = asyncio.create_task(store.write_base(change_late))
        await begun.wait()
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
        for copy in late:
            assert copy().state.closed

    for begins_before in (True, False):
        asyncio.run(run(begins_before=begins_before))
        for change in changes[15:17] if begins_before else changes[17:20]:
            change(state)
        assert state.snapshots.kept_bytes == 0
    write_base(store)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def test_a_base_that_cannot_be_copied_is_no_base_and_the_next_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = new_state()
    store = begin_store(tmp_path, state, JournalOptions(retry_s=0))
    for change in every_change(seed=8):
        change(state)
    with monkeypatch.context() as patch:
        patch.setattr(RowStorage, "copy_page", _no_room)
        assert try_base(store) is None
    assert "no new base could be written: no room for a page" in store.status().problem
    assert [path.name for path in store.path.iterdir() if path.name.startswith("base-")] == []
    assert state.snapshots.kept_bytes == 0
    write_base(store)
    abandon(store)
    assert bits_after(tmp_path) == all_bits(state)


def _no_room(*_: object) -> None:
    raise MemoryError("no room for a page")
