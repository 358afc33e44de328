"""What a checkpoint brings back, on any number of shards."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.checkpoint_files import (
    CPU,
    IDS,
    SPECS,
    USERS,
    check,
    make_plan,
    make_states,
    make_table,
    push_rows,
    restore,
    rows_of,
    save,
    steps_of,
    trained,
)
from shardam_testing.journal_samples import sample_changes
from shardam_testing.shard_histories import CLIENTS, all_bits, every_change, new_state
from shardam_testing.state_changes import find

from shardam_proto.errors import (
    CheckpointMismatch,
)
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_server.shard.checkpoints.loading import load
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.clients import ANY_CONTENT
from shardam_server.shard.state import ShardState


def test_a_state_comes_back_in_every_bit_but_its_staged_parts(tmp_path: Path) -> None:
    state = new_state()
    for change in sample_changes():
        change(state)
    assert state.groups.parts()
    manifest, folder = save(tmp_path, [state])
    plan = dataclasses.replace(make_plan(manifest, 1), keep_clients=True)
    [loaded] = restore(manifest, folder, plan)
    assert all_bits(loaded) == dataclasses.replace(all_bits(state), parts=[])
    check(tmp_path, folder, 1)


@pytest.mark.parametrize("loaded", [1, 2, 3, 5])
@pytest.mark.parametrize("written", [1, 2, 4])
def test_any_number_of_shards_loads_what_any_number_wrote(tmp_path: Path, written: int, loaded: int) -> None:
    states = trained(written)
    manifest, folder = save(tmp_path, states, segment_bytes=2000)
    assert sum(len(shard.files) for shard in manifest.shards) > written + 1, "several files of rows"
    found = restore(manifest, folder, make_plan(manifest, loaded))
    assert rows_of(found) == rows_of(states)
    assert manifest.num_rows == sum(state.num_rows for state in states)
    for index, state in enumerate(found):
        assert steps_of(state) == steps_of(states[0])
        assert state.change_number == max(one.change_number for one in states)
        for table in state.tables():
            row_ids, _ = table.storage.scan(0, 1000)
            assert (RouteMap(1, loaded).shards_of(row_ids) == index).all()
            assert table.last_options == find(states[0], table.spec.name).last_options
    check(tmp_path, folder, loaded)


def test_trained_on_two_and_resumed_on_three_and_one_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    straight = trained(2)
    manifest, folder = save(tmp_path, trained(2), "on-two")
    three = restore(manifest, folder, make_plan(manifest, 3))
    push_rows(three, "users", USERS, seed=8)
    push_rows(three, "items", IDS, seed=9)
    manifest, folder = save(tmp_path, three, "on-three")
    one = restore(manifest, folder, make_plan(manifest, 1))
    push_rows(one, "words", IDS, seed=10)
    push_rows(straight, "users", USERS, seed=8)
    push_rows(straight, "items", IDS, seed=9)
    push_rows(straight, "words", IDS, seed=10)
    assert rows_of(one) == rows_of(straight)
    assert steps_of(one[0]) == steps_of(straight[0])


@pytest.mark.case("C071")
@pytest.mark.parametrize(("num_rows", "num_shards"), [(5, 4), (1, 3), (0, 2)])
def test_shards_without_rows_are_saved_and_loaded(tmp_path: Path, num_rows: int, num_shards: int) -> None:
    states = make_states([TableSpec("words", 3)], num_shards)
    push_rows(states, "words", range(num_rows))
    manifest, folder = save(tmp_path, states)
    for loaded in (1, num_shards, num_shards + 3):
        check(tmp_path, folder, loaded)
        found = restore(manifest, folder, make_plan(manifest, loaded))
        assert rows_of(found) == rows_of(states)
        assert [steps_of(state) for state in found] == [{"words": 1}] * loaded


def test_a_cluster_without_tables_is_saved_and_loaded(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, make_states([], 2))
    check(tmp_path, folder, 3)
    assert rows_of(restore(manifest, folder, make_plan(manifest, 3))) == {}


@pytest.mark.case("C025")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_moments_of_narrow_weights_come_back_as_float32(tmp_path: Path, dtype: str) -> None:
    states = make_states([TableSpec("words", 5, dtype="float16" if dtype == "float16" else "bfloat16")], 1)
    for seed in range(4):
        push_rows(states, "words", range(30), seed)
    manifest, folder = save(tmp_path, states)
    [loaded] = restore(manifest, folder, make_plan(manifest, 1))
    before, after = find(states[0], "words"), find(loaded, "words")
    ids = np.arange(30)
    for name in ("exp_avg", "exp_avg_sq"):
        moments = after.storage.read(name, after.storage.lookup(ids))
        assert moments.tobytes() == before.storage.read(name, before.storage.lookup(ids)).tobytes()
        assert (moments.astype(np.float16) != moments).any(), "more than the weights' dtype holds"


@pytest.mark.case("C079")
def test_the_same_checkpoint_loads_to_the_same_state_each_time(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, trained(2))
    plan = make_plan(manifest, 2)
    first = restore(manifest, folder, plan)
    expected = rows_of(first)
    push_rows(first, "words", IDS, seed=20)
    assert rows_of(first) != expected
    again = restore(manifest, folder, plan)
    assert rows_of(again) == expected
    push_rows(again, "words", IDS, seed=20)
    assert rows_of(again) == rows_of(first)
    assert rows_of(restore(manifest, folder, plan)) == expected


@pytest.mark.case("C080")
def test_tables_are_made_from_the_manifest_by_their_names(tmp_path: Path) -> None:
    states = make_states([TableSpec(name, 3) for name in ("a", "b", "c")], 2)
    for seed, name in enumerate("cab"):
        push_rows(states, name, range(seed * 4, 20), seed)
    manifest, folder = save(tmp_path, states)
    found = restore(manifest, folder, make_plan(manifest, 2))
    assert rows_of(found) == rows_of(states)
    for table in found[0].tables():
        before = find(states[0], table.spec.name)
        assert (table.spec, table.table_id, table.table_seed) == (before.spec, before.table_id, before.table_seed)


@pytest.mark.case("C080")
def test_a_table_that_is_asked_for_and_missing_is_named(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, trained(1))
    plan = dataclasses.replace(make_plan(manifest, 1), load=("words", "wrods"))
    with pytest.raises(CheckpointMismatch, match=r"it lacks the tables .'wrods'."):
        restore(manifest, folder, plan)


def test_only_the_tables_that_are_named_are_loaded_beside_those_that_stay(tmp_path: Path) -> None:
    states = trained(2)
    manifest, folder = save(tmp_path, states)
    plan = dataclasses.replace(make_plan(manifest, 1), load=("users",))
    state = ShardState(CPU)
    state.put_tables([make_table(TableSpec("other", 2), 900)])
    load(state, manifest, folder, plan, 0, CPU.make_records, Progress())
    found = rows_of([state])
    assert found == {"other": {}, "users": rows_of(states)["users"]}


def test_a_table_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    manifest, folder = save(tmp_path, trained(1))
    state = ShardState(CPU)
    state.put_tables([make_table(TableSpec("words", 3), 900)])
    with pytest.raises(CheckpointMismatch, match=r"the shard has .'words'. already"):
        load(state, manifest, folder, make_plan(manifest, 1), 0, CPU.make_records, Progress())
    assert rows_of([state]) == {"words": {}}


def test_weights_alone_begin_with_new_moments_and_steps(tmp_path: Path) -> None:
    states = trained(2)
    manifest, folder = save(tmp_path, states)
    loaded = restore(manifest, folder, dataclasses.replace(make_plan(manifest, 3), weights_only=True))
    for name, rows in rows_of(states).items():
        for row_id, row in rows_of(loaded)[name].items():
            assert row[0] == rows[row_id][0]
            assert row[1:] == (bytes(len(rows[row_id][1])), bytes(len(rows[row_id][2])), 0, 0)
    assert set(steps_of(loaded[0]).values()) == {0}


@pytest.mark.case("C083")
@pytest.mark.parametrize("read_only", [True, False])
def test_tables_refuse_changes_where_they_are_loaded_to_be_read(tmp_path: Path, read_only: bool) -> None:
    states = trained(2)
    manifest, folder = save(tmp_path, states)
    loaded = restore(manifest, folder, dataclasses.replace(make_plan(manifest, 1), read_only=read_only))
    assert [table.read_only for table in loaded[0].tables()] == [read_only] * len(SPECS)
    assert rows_of(loaded) == rows_of(states)


def test_counters_count_once_over_all_shards(tmp_path: Path) -> None:
    states = trained(3)
    for state in states:
        find(state, "words").nonfinite_pushes = 2
        find(state, "items").storage.finish_restore(5)
    manifest, folder = save(tmp_path, states)
    for loaded in (1, 2, 3, 4):
        found = restore(manifest, folder, make_plan(manifest, loaded))
        assert sum(find(state, "words").nonfinite_pushes for state in found) == 6
        assert sum(find(state, "items").storage.saturated_values for state in found) == 15


def test_clients_and_groups_go_on_with_their_numbers_on_other_shards(tmp_path: Path) -> None:
    states = []
    for _ in range(2):
        state = new_state()
        for change in every_change():
            change(state)
        states.append(state)
    manifest, folder = save(tmp_path, make_states(SPECS, 2), "without")
    plan = dataclasses.replace(make_plan(manifest, 3), keep_clients=True)
    assert [len(state.clients) for state in restore(manifest, folder, plan)] == [0, 0, 0]
    # Both shards hold all rows here, as no real ones do: clients alone are loaded.
    manifest, folder = save(tmp_path, states, "with")
    plan = dataclasses.replace(make_plan(manifest, 3), keep_clients=True, load=())
    for index, state in enumerate(restore(manifest, folder, plan)):
        assert list(state.groups) == list(states[0].groups)
        for client_id, before in states[0].clients:
            found = state.clients.find(client_id)
            assert found is not None
            assert (found.last_number, found.closed, found.clock) == (before.last_number, before.closed, before.clock)
            for number, (digest, outcome) in found.outcomes.items():
                assert digest == ANY_CONTENT
                assert outcome.num_rows == (2 * before.outcomes[number][1].num_rows if index == 0 else 0)
        assert state.clients.num_open == states[0].clients.num_open
    assert CLIENTS[0] in dict(state.clients)


def test_one_record_is_in_memory_at_a_time(tmp_path: Path) -> None:
    states = make_states([TableSpec("words", 64)], 1)
    push_rows(states, "words", range(30_000))
    manifest, folder = save(tmp_path, states)
    assert manifest.size_bytes > 23e6
    tracemalloc.start()
    try:
        restore(manifest, folder, make_plan(manifest, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 14e6, "a record of 4 MiB, the next one while it is read, and counters of the rows"
