"""Records of a shard's journal: each kind leads to the same state again, and one that does not follow is damage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from shardam_testing.group_shard import groups_seen
from shardam_testing.shard_states import Record, journaled_state, make_tables, replayed, seen

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import JournalDamaged
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import group_pb2, journal_pb2
from shardam_server.shard.clients import IDLE_S, Clients, Origin
from shardam_server.shard.groups.changes import IncomingPart, decide, set_group, stage
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member
from shardam_server.shard.last_numbers import settle_number
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection

ROW_IDS = range(8)
CLIENT = b"c" * 16
MEMBERS = (Member(0, b"member 0" * 2), Member(1, b"member 1" * 2))
OPTIONS = AdamOptions(lr=0.1, betas=(0.8, 0.99), weight_decay=0.01, decoupled_weight_decay=True, maximize=True)

KINDS = [field.name for field in journal_pb2.JournalRecord.DESCRIPTOR.oneofs_by_name["change"].fields]

TABLE, ROW_STEP, NARROW = 1, 2, 3
SPECS = [
    TableSpec("table_step", 3, padding_idx=7),
    TableSpec("row_step", 3, step="row"),
    TableSpec("narrow", 3, dtype="float16", num_embeddings=8),
]


def gradient(num_rows: int, seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((num_rows, 3)).astype(np.float32)


def origin(number: int) -> Origin:
    return Origin(CLIENT, number, b"content %d" % number)


def sections(state: ShardState, row_ids: list[int], *table_ids: int) -> list[GradientSection]:
    gradients = gradient(len(row_ids))
    return [
        GradientSection(state.table(table_id), np.array(row_ids, np.int64), gradients, OPTIONS, 128.0) for table_id in table_ids
    ]


def all_kinds() -> tuple[ShardState, list[Record]]:
    """Makes every kind of change; returns the state and its records."""
    state, journal = journaled_state()
    tables = make_tables(SPECS)
    tables[0].step = 40  # as taken over from another shard when it was installed
    state.install(tables)
    state.open_client(CLIENT, heartbeats=True)
    state.push(sections(state, [5, 1, 5, 7], TABLE, ROW_STEP, NARROW), origin(1))
    state.push(sections(state, [1, 2], ROW_STEP), origin(2))
    state.push(sections(state, [], TABLE), origin(3))
    state.void([], origin(4))
    state.void([NARROW, TABLE], origin(5))
    state.assign(state.table(ROW_STEP), RowWrite(np.array([3, 1]), gradient(2, seed=1)), origin=origin(6))
    squares = np.square(gradient(2, seed=2))
    state.assign(state.table(NARROW), RowWrite(np.array([1, 6]), squares, squares, squares, if_absent=True), origin=origin(7))
    state.delete(state.table(TABLE), np.array([1, 6]), origin=origin(8))
    state.clear_moments(state.table(TABLE), np.array([5, 6]), origin=origin(9))
    state.push(sections(state, [3], TABLE))  # without a client
    state.raise_steps({ROW_STEP: 9})
    state.open_client(b"leaving" * 2)
    state.end_client(b"leaving" * 2)
    state.end_client(b"leaving" * 2, settled=True)
    state.end_client(b"stranger" * 2, remember=True)
    settle_number(state, b"stranger" * 2, 1, [TABLE])
    state.open_client(b"idle" * 4)
    make_steps(state)
    newest = max(entry.last_contact for _, entry in state.clients)
    assert state.forget_idle_clients(newest + IDLE_S + 1) == 2
    return state, journal.records()


def make_steps(state: ShardState) -> None:
    """A step of a sync group over a table of each kind, and a part of the next one."""
    for member in MEMBERS:
        state.open_client(member.client_id, heartbeats=True)
    set_group(state, Group("workers", GroupTerms("sync", 2), 1, MEMBERS, 0), 7)
    for step in (8, 9):
        for member in MEMBERS:
            source = Origin(member.client_id, step - 7, b"content %d" % step)
            tables = (TABLE, ROW_STEP) if member.rank else (ROW_STEP, NARROW)
            stage(state, IncomingPart(source, step, member.rank, "gradient", sections(state, [5, 1, 5, 7], *tables)))
            if (step, member.rank) == (9, 0):
                return
        contributions = tuple(Contribution(member.rank, member.client_id, 1, "gradient") for member in MEMBERS)
        decide(state, Decision("workers", 8, contributions, "applied"))


def kind_of(record: journal_pb2.JournalRecord) -> str | None:
    return record.WhichOneof("change")


def test_every_kind_of_record_leads_to_the_same_state_again() -> None:
    state, records = all_kinds()
    assert {kind_of(record) for record, _ in records} == set(KINDS)
    assert len(records) == state.change_number
    again = replayed(records)
    assert seen(again, ROW_IDS) == seen(state, ROW_IDS)
    assert groups_seen(again) == groups_seen(state)


def test_every_beginning_of_a_journal_leads_to_the_state_of_that_moment() -> None:
    _, records = all_kinds()
    for length in range(len(records)):
        assert replayed(records[:length]).change_number == length


def test_a_client_that_was_forgotten_to_make_room_is_forgotten_again() -> None:
    state, journal = journaled_state()
    state.clients = Clients(max_clients=1)
    state.open_client(b"old" * 5)
    state.end_client(b"old" * 5)
    state.open_client(CLIENT)
    again = replayed(journal.records())
    assert [client_id for client_id, _ in again.clients] == [CLIENT]
    assert seen(again, []) == seen(state, [])


def test_a_replay_takes_the_recorded_factors_and_computes_no_power() -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.push(sections(state, [1, 2], TABLE, ROW_STEP))
    records = journal.records()
    for push in records[-1][0].push.tables:
        push.options.beta1 = push.options.beta2 = 0.0  # would give other factors
    assert seen(replayed(records), ROW_IDS) == seen(state, ROW_IDS)


Damage = Callable[[journal_pb2.JournalRecord, bytes], tuple[journal_pb2.JournalRecord, bytes] | None]


def _another_kind(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.ClearField("change")


def _other_push_step(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.push.tables[0].table_step += 1


def _other_row_steps(record: journal_pb2.JournalRecord, data: bytes) -> tuple[journal_pb2.JournalRecord, bytes]:
    """The last array but one holds the row steps; each row has its s behind it."""
    num_rows = record.push.tables[1].num_row_steps
    steps = np.frombuffer(data[-8 * num_rows : -4 * num_rows], "<u4") + np.uint32(1)
    return record, data[: -8 * num_rows] + steps.tobytes() + data[-4 * num_rows :]


def _unknown_table(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.push.tables[0].table_id = 99


def _unknown_table_of_part(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.part.tables[0].table_id = 99


def _other_rank(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.part.rank += 1


def _no_kind(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.part.ClearField("kind")


def _later_part(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.part.step += 1


def _other_decision_step(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.decision.decision.step += 1


def _other_table_step(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.decision.tables[0].table_step += 1


def _other_tables(record: journal_pb2.JournalRecord, data: bytes) -> None:
    del record.decision.tables[0]


def _other_number(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.decision.decision.contributions[0].number += 1


def _not_applied(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.decision.decision.end = group_pb2.STEP_END_ABSTAINED


def _no_end(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.decision.decision.ClearField("end")


def _other_row_steps_of_decision(record: journal_pb2.JournalRecord, data: bytes) -> tuple[journal_pb2.JournalRecord, bytes]:
    steps = np.frombuffer(data[: len(data) // 2], "<u4") + np.uint32(1)
    return record, steps.tobytes() + data[len(data) // 2 :]


def _no_mode(record: journal_pb2.JournalRecord, data: bytes) -> None:
    record.group.group.terms.ClearField("mode")


def _damaged(kind: str, damage: Damage) -> None:
    """Damages the first record of a kind and asserts that the replay stops there, before any later record."""
    _, records = all_kinds()
    place = next(place for place, (record, _) in enumerate(records) if kind_of(record) == kind)
    records[place] = damage(*records[place]) or records[place]
    with pytest.raises(JournalDamaged) as error:
        replayed(records[: place + 1])
    assert error.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_another_place_or_of_an_unknown_kind_is_damage(kind: str) -> None:
    def out_of_order(record: journal_pb2.JournalRecord, data: bytes) -> None:
        record.change_number += 1

    _damaged(kind, out_of_order)
    _damaged(kind, _another_kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_with_more_bytes_than_it_counts_is_damage(kind: str) -> None:
    _damaged(kind, lambda record, data: (record, data + b"\0"))


@pytest.mark.parametrize("kind", ["push", "assign", "delete", "clear_moments", "part", "decision"])
def test_a_record_with_fewer_bytes_than_it_counts_is_damage(kind: str) -> None:
    _damaged(kind, lambda record, data: (record, data[:-1]))
    _damaged(kind, lambda record, data: (record, data[:3]))


@pytest.mark.parametrize(
    "damage", [_other_push_step, _other_row_steps, _unknown_table], ids=["table step", "row steps", "unknown table"]
)
def test_a_push_that_does_not_follow_from_the_state_before_it_is_damage(damage: Damage) -> None:
    _damaged("push", damage)


PART_DAMAGES = [_unknown_table_of_part, _other_rank, _no_kind, _later_part]
DECISION_DAMAGES = [
    _other_decision_step,
    _other_table_step,
    _other_tables,
    _other_number,
    _not_applied,
    _no_end,
    _other_row_steps_of_decision,
]


def _name(damage: Damage) -> str:
    return damage.__name__.strip("_").replace("_", " ")


@pytest.mark.parametrize("damage", PART_DAMAGES, ids=_name)
def test_a_part_that_does_not_follow_from_the_state_before_it_is_damage(damage: Damage) -> None:
    _damaged("part", damage)


@pytest.mark.parametrize("damage", DECISION_DAMAGES, ids=_name)
def test_a_decision_that_does_not_follow_from_the_parts_before_it_is_damage(damage: Damage) -> None:
    _damaged("decision", damage)


def test_a_group_that_does_not_follow_from_the_state_before_it_is_damage() -> None:
    _damaged("group", _no_mode)
    _, records = all_kinds()
    record, data = next((record, data) for record, data in records if kind_of(record) == "group")
    again = journal_pb2.JournalRecord()
    again.CopyFrom(record)
    again.change_number = len(records) + 1
    with pytest.raises(JournalDamaged, match="had no effect"):
        replayed([*records, (again, data)])


def test_a_part_of_no_client_is_damage() -> None:
    def without_origin(record: journal_pb2.JournalRecord, data: bytes) -> None:
        record.ClearField("origin")

    _damaged("part", without_origin)


def test_a_number_closed_with_other_steps_is_damage() -> None:
    _, records = all_kinds()
    place = next(place for place, (record, _) in enumerate(records) if record.close.steps)
    records[place][0].close.steps[0].table_step += 1
    with pytest.raises(JournalDamaged, match=r"took tables to \{.*\}, replayed it takes them to"):
        replayed(records)


def test_a_number_closed_for_no_client_is_damage() -> None:
    def without_origin(record: journal_pb2.JournalRecord, data: bytes) -> None:
        record.ClearField("origin")

    _damaged("close", without_origin)


def test_a_record_without_effect_is_damage() -> None:
    _, records = all_kinds()
    again = journal_pb2.JournalRecord()
    again.CopyFrom(next(record for record, _ in records if kind_of(record) == "install"))
    again.change_number = len(records) + 1
    with pytest.raises(JournalDamaged, match="had no effect"):
        replayed([*records, (again, b"")])
