"""Any history, killed at any byte of its journal, comes back as a prefix of itself; and goes on from there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from shardam_testing.group_changes import MEMBERS, step_on
from shardam_testing.shard_histories import (
    CLIENTS,
    SPECS,
    abandon,
    all_bits,
    assign,
    begin_store,
    bits_after,
    clear_moments,
    come_back,
    delete,
    make_tables,
    new_state,
    push,
    void,
    write_base,
)
from shardam_testing.state_changes import Change, find, origin

from shardam_server.shard.journal.frames import JOURNAL_MAGIC, FrameReader
from shardam_server.shard.state import ShardState

NAMES = [spec.name for spec in SPECS]

Draw = Callable[[np.random.Generator, list[str]], Change]

KINDS: dict[str, Draw] = {
    "push": lambda rng, names: push(rng, *names),
    "push of many": lambda rng, names: push(rng, *names, client_id=CLIENTS[1], num_rows=40),
    "void": lambda rng, names: void(*names, client_id=CLIENTS[0]),
    "assign": lambda rng, names: assign(rng, names[0], moments=bool(rng.integers(2)), if_absent=bool(rng.integers(2))),
    "delete": lambda rng, names: delete(rng, names[0]),
    "clear": lambda rng, names: clear_moments(rng, names[0]),
    "steps": lambda rng, names: lambda state: raise_one_step(state, names[0]),
    "base": lambda rng, names: lambda state: None,
}


def raise_one_step(state: ShardState, name: str) -> None:
    table = find(state, name)
    state.raise_steps({table.table_id: table.step + 3})


GROUP_KINDS: dict[str, Draw] = {
    "step on": lambda rng, names: step_on(rng, *names),
    "step on again": lambda rng, names: step_on(rng, *names),
    "clear as a member": lambda rng, names: clear_as_member(rng, names[0]),
    "base": lambda rng, names: lambda state: None,
}


def clear_as_member(rng: np.random.Generator, name: str) -> Change:
    """A change of rows by a member whose number is free; if both parts are staged, their decision."""
    row_ids, decided = rng.integers(0, 12, 4), step_on(rng, name)

    def change(state: ShardState) -> object:
        free = [client_id for client_id in MEMBERS if state.groups.part(client_id) is None]
        return state.clear_moments(find(state, name), row_ids, origin=origin(state, free[0])) if free else decided(state)

    return change


table_names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
seeds = st.integers(0, 2**32 - 1)


def some(kinds: dict[str, Draw]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=12)


@settings(max_examples=40)
@given(kinds=some(KINDS), names=table_names, seed=seeds, where=st.floats(0, 1))
def test_a_crash_at_any_byte_leaves_a_prefix_and_the_rest_makes_it_whole(
    kinds: list[str], names: list[str], seed: int, where: float
) -> None:
    rng = np.random.default_rng(seed)
    opened: list[Change] = [
        lambda state: state.open_client(CLIENTS[0]),
        lambda state: state.open_client(CLIENTS[1], heartbeats=True),
    ]
    check_crash([*zip(opened, ["", ""], strict=True), *((KINDS[kind](rng, names), kind) for kind in kinds)], where)


@settings(max_examples=40)
@given(kinds=some(GROUP_KINDS), names=table_names, seed=seeds, where=st.floats(0, 1))
def test_a_crash_at_any_byte_of_a_group_s_history_leaves_a_prefix_and_the_rest_makes_it_whole(
    kinds: list[str], names: list[str], seed: int, where: float
) -> None:
    rng = np.random.default_rng(seed)
    begun = [(step_on(rng, *names), "") for _ in range(4)]  # clients, members and a first part
    check_crash([*begun, *((GROUP_KINDS[kind](rng, names), kind) for kind in kinds)], where)


def check_crash(changes: list[tuple[Change, str]], where: float) -> None:
    """Makes changes, with a base behind those of that kind, and cuts the last file at a place from 0, its beginning, to 1."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir, state = Path(folder), new_state()
        store = begin_store(data_dir, state)
        changes = [(lambda state: state.install(make_tables()), ""), *changes]
        history = [all_bits(state)]
        for change, kind in changes:
            change(state)
            history.append(all_bits(state))
            if kind == "base":
                write_base(store)
        abandon(store)
        path = max(store.path.glob("journal-*"))
        data, first = path.read_bytes(), end_of_header(path)
        size = first + round(where * (len(data) - first))
        path.write_bytes(data[:size])
        with come_back(data_dir) as (_, back):
            num_kept = history.index(all_bits(back))
            assert size < len(data) or history[num_kept] == history[-1]
            for change, _ in changes[num_kept:]:
                change(back)
        assert bits_after(data_dir) == history[-1]


def end_of_header(path: Path) -> int:
    with FrameReader(path, JOURNAL_MAGIC) as frames:
        frames.read_preamble()
        frames.next(None)
        return frames.offset
