"""Rows that are written with their steps, as an import of a table writes them: training goes on from there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.faults.oracle import Oracle
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import RawClient
from shardam_testing.shard_states import MemoryJournal, journaled_state, make_tables, replayed, seen

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import BadOption, WrongShape
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import row_pb2
from shardam_server.shard.row_writes import MAX_ROW_STEP, MAX_TABLE_STEP, RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection

BY_ROW, BY_TABLE = 1, 2
SPECS = [TableSpec("by_row", 2, step="row"), TableSpec("by_table", 2, dtype="bfloat16")]
IDS = np.array([7, 3, 5], np.int64)


def columns(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).random((3, 2)).astype(np.float32)


def steps(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def push(state: ShardState, *table_ids: int) -> None:
    ids = np.array([3, 7, 9], np.int64)
    state.push([GradientSection(state.table(table_id), ids, columns(8), AdamOptions(lr=0.1), 1.0) for table_id in table_ids])


def trained() -> tuple[ShardState, MemoryJournal]:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    for _ in range(4):
        push(state, BY_ROW, BY_TABLE)
    return state, journal


@pytest.mark.case("C066")
@pytest.mark.case("C067")
def test_a_table_that_is_written_with_its_steps_trains_on_with_the_same_bits() -> None:
    (state, _), (other, journal) = trained(), journaled_state()
    other.install(make_tables(SPECS))
    for table_id in (BY_ROW, BY_TABLE):
        rows = state.table(table_id).read(np.array([3, 7, 9], np.int64), include_optimizer=True)
        row_steps = rows.step.astype(np.uint32) if table_id == BY_ROW else None
        write = RowWrite(rows.row_ids, rows.weight, rows.exp_avg, rows.exp_avg_sq, row_steps=row_steps, table_step=4)
        other.assign(other.table(table_id), write)
        empty = np.empty((0, 2), np.float32)
        other.assign(other.table(table_id), RowWrite(IDS[:0], empty, table_step=4))  # a shard that owns no row of it
    for one in (state, other):
        push(one, BY_ROW, BY_TABLE)
    for table_id in (BY_ROW, BY_TABLE):
        first, second = (one.table(table_id).read(np.array([3, 7, 9]), include_optimizer=True) for one in (state, other))
        assert first.weight.tobytes() == second.weight.tobytes()
        assert first.step.tolist() == second.step.tolist() == [5, 5, 5]
    assert seen(replayed(journal.records()), [3, 7, 9]) == seen(other, [3, 7, 9])


def test_steps_that_are_left_out_stay_and_new_rows_count_from_zero() -> None:
    state, journal = trained()
    table = state.table(BY_ROW)
    state.assign(table, RowWrite(IDS, columns(1)))
    assert table.read(IDS, include_optimizer=False).step.tolist() == [4, 4, 0]
    state.assign(table, RowWrite(IDS, columns(1), row_steps=steps(9, 8, 7), if_absent=True))
    assert table.read(IDS, include_optimizer=False).step.tolist() == [4, 4, 0]
    state.assign(table, RowWrite(IDS, columns(1), row_steps=steps(9, 8, 7)))
    assert table.read(IDS, include_optimizer=False).step.tolist() == [9, 8, 7]
    state.assign(table, RowWrite(IDS + 10, columns(1), row_steps=steps(1, 2, 3), if_absent=True))
    assert table.read(IDS + 10, include_optimizer=False).step.tolist() == [1, 2, 3]
    assert seen(replayed(journal.records()), list(range(20))) == seen(state, list(range(20)))


def test_the_oracle_reads_the_record_as_the_shard_writes_it() -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    write = RowWrite(IDS, columns(1), columns(2), columns(3), row_steps=steps(9, 8, 7), table_step=11)
    state.assign(state.table(BY_ROW), write)
    state.assign(state.table(BY_ROW), RowWrite(IDS + 20, columns(1), row_steps=steps(4, 5, 6), if_absent=True))
    push(state, BY_ROW)
    oracle = Oracle()
    for record, data in journal.records():
        oracle.apply(record, data)
    rows = oracle.table("by_row").rows()
    found = state.table(BY_ROW).read(rows.row_ids, include_optimizer=False)
    assert rows.row_ids.size == 7
    assert rows.step.tolist() == found.step.tolist() == [9, 7, 10, 1, 5, 6, 4]
    assert rows.weight.tobytes() == found.weight.tobytes()
    assert oracle.table("by_row").step == state.table(BY_ROW).step == 12


@pytest.mark.parametrize(
    ("table_id", "row_steps", "table_step", "message"),
    [
        (BY_TABLE, steps(1, 2, 3), None, "'by_table' has one step for all rows .* leave row_steps out and set table_step"),
        (BY_ROW, steps(1, MAX_ROW_STEP + 1, 3), None, f"row_steps must be at most {MAX_ROW_STEP}; .* among ids 3"),
        (BY_ROW, None, 5, "is at step 4, table_step=5 would move it; import into a table that has not stepped"),
        (BY_TABLE, None, 3, "is at step 4, table_step=3 would move it"),
        (BY_TABLE, None, MAX_TABLE_STEP + 1, f"table_step must be at most {MAX_TABLE_STEP}, got {MAX_TABLE_STEP + 1}"),
    ],
)
def test_steps_that_do_not_fit_the_table_are_refused_and_nothing_changes(
    table_id: int, row_steps: np.ndarray[tuple[int], np.dtype[np.uint32]] | None, table_step: int | None, message: str
) -> None:
    state, journal = trained()
    before, records = seen(state, [3, 5, 7]), journal.records()
    with pytest.raises(BadOption, match=message):
        state.assign(state.table(table_id), RowWrite(IDS, columns(1), row_steps=row_steps, table_step=table_step))
    assert (seen(state, [3, 5, 7]), journal.records()) == (before, records)


def test_the_largest_steps_train_on() -> None:
    state, _ = journaled_state()
    state.install(make_tables(SPECS))
    write = RowWrite(IDS, columns(1), row_steps=steps(*[MAX_ROW_STEP] * 3), table_step=MAX_TABLE_STEP)
    state.assign(state.table(BY_ROW), write)
    state.assign(state.table(BY_TABLE), RowWrite(IDS, columns(1), table_step=MAX_TABLE_STEP))
    push(state, BY_ROW, BY_TABLE)
    assert state.table(BY_ROW).read(IDS, include_optimizer=False).step.tolist() == [MAX_ROW_STEP + 1] * 2 + [MAX_ROW_STEP]
    assert state.table(BY_TABLE).read(IDS, include_optimizer=False).last_touched_step.max() == MAX_TABLE_STEP + 1


@pytest.fixture
def shard() -> Iterator[HeldShard]:
    with held_shard() as held:
        tables = make_tables(SPECS)
        held.run(held.shard.change(lambda: held.shard.state.install(tables)))
        yield held


def request(client: RawClient, number: int, table_id: int, **fields: object) -> row_pb2.AssignRowsRequest:
    return row_pb2.AssignRowsRequest(
        header=client.header(number),
        table_id=table_id,
        row_ids=IDS.tobytes(),
        weight=columns(1).tobytes(),
        **fields,  # type: ignore[arg-type]  # fields of the message
    )


def test_a_request_carries_steps_and_says_which_length_is_wrong(shard: HeldShard) -> None:
    state = shard.shard.state
    with shard.client() as client:
        first = request(client, 1, BY_ROW, row_steps=steps(9, 8, 7).tobytes(), table_step=12)
        assert client.call(client.row.AssignRows, first).num_assigned == 3
        assert client.call(client.row.AssignRows, first).repeated_number
        assert state.table(BY_ROW).read(IDS, include_optimizer=False).step.tolist() == [9, 8, 7]
        assert state.table(BY_ROW).step == 12
        with pytest.raises(WrongShape, match="row_steps has 8 bytes; 3 rows have 12"):
            client.call(client.row.AssignRows, request(client, 2, BY_ROW, row_steps=steps(9, 8).tobytes()))
        with pytest.raises(BadOption, match="is at step 12, table_step=13 would move it"):
            client.call(client.row.AssignRows, request(client, 2, BY_ROW, table_step=13))
        assert client.call(client.row.AssignRows, request(client, 2, BY_TABLE, table_step=0)).num_assigned == 3
