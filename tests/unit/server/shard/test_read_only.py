"""Tables that were restored for reading alone: every change is refused whole, and reads go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.matrix import num_threads
from shardam_testing.shard_histories import CLUSTER, abandon, begin_store, come_back, write_base
from shardam_testing.shard_states import journaled_state, replayed, seen

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import ReadOnly
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, set_group, stage
from shardam_server.shard.groups.values import Group, GroupTerms, Member
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table, table_from_info

CLIENT = b"c" * 16
IDS = np.arange(3, dtype=np.int64)
VALUES = np.ones((3, 2), np.float32)
READ, WRITTEN = 1, 2


def tables() -> list[Table]:
    infos = [
        common_pb2.TableInfo(spec=TableSpec(name, 2).to_proto(), table_id=number, table_seed=5, read_only=number == READ)
        for name, number in (("read", READ), ("written", WRITTEN))
    ]
    return [table_from_info(info, CpuDevice(num_threads()).make_records) for info in infos]


def section(state: ShardState, table_id: int) -> GradientSection:
    return GradientSection(state.table(table_id), IDS, VALUES, AdamOptions(lr=0.1), 1.0)


def push(state: ShardState) -> object:
    return state.push([section(state, WRITTEN), section(state, READ)], Origin(CLIENT, 1, b"content"))


def void(state: ShardState) -> object:
    return state.void([WRITTEN, READ], Origin(CLIENT, 1, b"content"))


def assign(state: ShardState) -> object:
    return state.assign(state.table(READ), RowWrite(IDS, VALUES), origin=Origin(CLIENT, 1, b"content"))


def delete(state: ShardState) -> object:
    return state.delete(state.table(READ), IDS, origin=Origin(CLIENT, 1, b"content"))


def clear_moments(state: ShardState) -> object:
    return state.clear_moments(state.table(READ), IDS, origin=Origin(CLIENT, 1, b"content"))


@pytest.mark.case("C083")
@pytest.mark.parametrize("change", [push, void, assign, delete, clear_moments])
def test_a_change_of_a_read_only_table_is_refused_before_anything_changes(change: Callable[[ShardState], object]) -> None:
    state, journal = journaled_state()
    state.install(tables())
    state.open_client(CLIENT)
    before, records = seen(state, list(IDS)), journal.records()
    with pytest.raises(ReadOnly, match="'read' was restored for reading alone; restore it without --read-only to train"):
        change(state)
    assert (seen(state, list(IDS)), journal.records()) == (before, records)
    state.push([section(state, WRITTEN)], Origin(CLIENT, 1, b"content"))
    assert state.table(WRITTEN).step == 1


def test_a_part_for_a_read_only_table_is_refused_and_not_staged() -> None:
    state, journal = journaled_state()
    state.install(tables())
    state.open_client(CLIENT)
    set_group(state, Group("workers", GroupTerms("sync", 1), 1, (Member(0, CLIENT),), 0), 0)
    records = journal.records()
    sections = [section(state, WRITTEN), section(state, READ)]
    with pytest.raises(ReadOnly):
        stage(state, IncomingPart(Origin(CLIENT, 1, b"content"), 1, 0, "gradient", sections))
    assert journal.records() == records
    assert state.groups.parts() == []


def test_read_only_is_kept_by_the_journal_and_by_a_base(tmp_path: Path) -> None:
    state, journal = journaled_state()
    state.install(tables())
    assert [table.read_only for table in replayed(journal.records()).tables()] == [True, False]
    state = ShardState(CpuDevice(num_threads()))
    store = begin_store(tmp_path, state)
    assert store.current is not None
    assert store.current.cluster == CLUSTER
    state.install(tables())
    write_base(store)
    abandon(store)
    with come_back(tmp_path) as (_, again):
        assert [table.read_only for table in again.tables()] == [True, False]
