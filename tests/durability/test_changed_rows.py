"""Which rows count as changed since a read, after a start from a folder that remembers some deletes and not others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from shardam_testing.shard_histories import abandon, begin_store, come_back, every_change, new_state, write_base

from shardam_server.shard.changed_rows import changed_positions
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table

ABSENT = 777
"""An id that never had a row; a shard cannot tell it from one whose row was deleted."""


def find(state: ShardState, name: str) -> Table:
    table = state.find_table(name)
    assert table is not None
    return table


def changed_since(state: ShardState, change_number: int) -> list[int]:
    """Returns the ids that count as changed, of two that have rows and one that has none."""
    table = find(state, "items")
    row_ids = np.append(table.storage.scan(0, 2)[0], ABSENT)
    return [int(row_ids[place]) for place in changed_positions(table, row_ids, change_number, known_from=state.loaded_change)]


def test_after_a_start_rows_without_a_record_count_as_changed_up_to_the_base_and_to_later_deletes(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    for change in every_change():
        change(state)
    based = state.change_number
    assert write_base(store)
    table = find(state, "items")
    row_ids = table.storage.scan(0, 10)[0]
    state.delete(find(state, "tags"), np.array([1], np.int64))
    state.delete(table, row_ids[:1])
    state.delete(find(state, "tags"), np.array([2], np.int64))
    abandon(store)
    with come_back(tmp_path) as (_, recovered):
        assert (recovered.loaded_change, recovered.change_number) == (based, based + 3)
        assert ABSENT in changed_since(recovered, 1)  # deletes before the base are forgotten
        assert changed_since(recovered, based) == [ABSENT]  # deleted by a change of the journal
        assert changed_since(recovered, based + 1) == [ABSENT]
        assert changed_since(recovered, based + 2) == []
