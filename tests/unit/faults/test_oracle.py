"""The oracle of the fault tests against a shard's own state: the same journal, the same bits; and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from shardam_testing.faults.comparison import RUN_FIELDS, differences
from shardam_testing.faults.fault_free import expected_rows
from shardam_testing.faults.memory_shard import MemoryShard
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.sequence import TABLES, Assign, Change, Delete, make_change

from shardam_proto.v1 import journal_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.last_numbers import CLOSED_BY_HOME, settle_number
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.table import GradientSection

CLIENT, OTHER = b"c" * 16, b"d" * 16


class Trained(MemoryShard):
    """A shard that is changed as workers change it."""

    def change(self, client_id: bytes, number: int, change: Change) -> None:
        origin = Origin(client_id, number, b"digest")
        match change:
            case Delete(spec, row_ids):
                self.state.delete(self.table(spec.name), row_ids, origin=origin)
            case Assign(spec, row_ids, weight, exp_avg, if_absent):
                write = RowWrite(row_ids, weight, exp_avg, None, if_absent)
                self.state.assign(self.table(spec.name), write, origin=origin)
            case _:
                sections = [
                    GradientSection(self.table(part.spec.name), part.row_ids, part.gradients, part.options, part.grad_scale)
                    for part in change.tables
                ]
                self.state.push(sections, origin)

    def replay(self, places: Sequence[int]) -> Oracle:
        """Replays the records at some places of the journal."""
        oracle = Oracle()
        for place in places:
            message, data = self.journal.records[place]
            oracle.apply(journal_pb2.JournalRecord.FromString(message), data)
        return oracle


def test_a_replay_in_numpy_gives_the_bits_steps_and_counters_of_the_state() -> None:
    trained = Trained()
    trained.open(CLIENT, OTHER)
    for number in range(1, 201):
        trained.change(CLIENT, number, make_change(1, number))
        trained.change(OTHER, number, make_change(2, number))
    trained.state.clear_moments(trained.table("plain"), np.array([0, -20_000_060], np.int64))
    trained.state.raise_steps({100: 1000})
    oracle = trained.oracle()
    assert oracle.change_number == trained.state.change_number
    for spec in TABLES:
        expected, got = trained.rows(spec.name), oracle.table(spec.name).rows()
        assert expected.row_ids.size > 20
        assert differences(expected, got) == []
        assert oracle.table(spec.name).step == trained.table(spec.name).step
    assert oracle.numbers_of(CLIENT) == oracle.numbers_of(OTHER) == list(range(1, 201))


def test_numbers_that_home_closed_after_the_end_are_told_apart() -> None:
    trained = Trained()
    trained.open(CLIENT)
    trained.change(CLIENT, 1, make_change(1, 2))
    trained.state.void([], Origin(CLIENT, 2, b"skip"))
    trained.state.end_client(CLIENT)
    settle_number(trained.state, CLIENT, 3, [101])
    trained.state.end_client(CLIENT, settled=True)
    oracle = trained.oracle()
    assert [(applied.number, applied.after_end) for applied in oracle.applied] == [(1, False), (2, False), (3, True)]
    assert oracle.table("by_row").step == trained.table("by_row").step
    assert oracle.clients[CLIENT].settled
    assert CLOSED_BY_HOME == b"closed by home"


def test_a_missing_a_doubled_and_a_moved_record_are_found() -> None:
    trained = Trained()
    trained.open(CLIENT)
    for number in range(1, 6):
        trained.change(CLIENT, number, make_change(1, number))
    num_records = len(trained.journal.records)
    for places in ([*range(3), *range(4, num_records)], [*range(4), *range(3, num_records)], [1, 0]):
        with pytest.raises(AssertionError):
            trained.replay(places)


def test_a_number_applied_twice_is_found_even_if_change_numbers_fit() -> None:
    trained = Trained()
    trained.open(CLIENT)
    trained.change(CLIENT, 1, make_change(1, 2))
    again = journal_pb2.JournalRecord.FromString(trained.journal.records[-1][0])
    again.change_number += 1
    oracle = trained.oracle()
    with pytest.raises(AssertionError, match="number 1 comes after 1"):
        oracle.apply(again, trained.journal.records[-1][1])


def test_a_factor_that_is_not_what_the_options_give_is_found() -> None:
    trained = Trained()
    trained.open(CLIENT)
    trained.change(CLIENT, 1, make_change(1, 2))
    message, data = trained.journal.records.pop()
    record = journal_pb2.JournalRecord.FromString(message)
    record.push.tables[0].factors.s *= 2
    oracle = trained.oracle()
    with pytest.raises(AssertionError, match="the options give"):
        oracle.apply(record, data)


def test_a_single_other_bit_is_a_difference() -> None:
    trained = Trained()
    trained.open(CLIENT)
    for number in range(1, 20):
        trained.change(CLIENT, number, make_change(1, number))
    rows, other = trained.rows("plain"), trained.rows("plain")
    other.exp_avg.view(np.uint32)[0, 0] ^= 1
    other.step[1] += 1
    assert differences(rows, rows) == []
    found = differences(rows, other)
    assert [line.split(":")[0] for line in found] == ["exp_avg", "step"]


def test_a_sequence_through_numpy_alone_gives_the_bits_of_a_shard() -> None:
    trained = Trained()
    trained.open(CLIENT)
    for number in range(1, 151):
        trained.change(CLIENT, number, make_change(5, number))
    tables = {spec.name: trained.table(spec.name).schema_info(with_step=True) for spec in TABLES}
    expected = expected_rows(5, 150, tables)
    for spec in TABLES:
        assert differences(expected[spec.name], trained.rows(spec.name), RUN_FIELDS) == []
