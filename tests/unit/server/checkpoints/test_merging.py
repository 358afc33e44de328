"""What shards remembered of clients and groups, merged for another number of shards."""

from __future__ import annotations

import pytest

from shardam_server.shard.checkpoints.merging import Remembered, merge_clients, merge_groups
from shardam_server.shard.clients import ANY_CONTENT, WINDOW, ClientEntry, Outcome
from shardam_server.shard.groups.entries import GroupEntry
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member, StepResult

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def entry(outcomes: dict[int, Outcome], **fields: object) -> ClientEntry:
    made = ClientEntry(last_number=max(outcomes, default=0), outcomes={n: (b"d%d" % n, one) for n, one in outcomes.items()})
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def merged(index: int, *clients: dict[bytes, ClientEntry]) -> dict[bytes, ClientEntry]:
    return dict(merge_clients([Remembered(list(one.items()), []) for one in clients], index))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_number_keeps_its_steps_and_its_rows_are_counted_once_over_all_shards(index: int) -> None:
    one = entry({7: Outcome({5: 11, 6: 3}), 8: Outcome(num_rows=2, change_number=40)})
    other = entry({7: Outcome({5: 11, 6: 3}), 8: Outcome(num_rows=3, change_number=37)})
    found = merged(index, {A: one}, {A: other})[A]
    assert found.last_number == 8
    assert found.outcomes[7] == (ANY_CONTENT, Outcome({5: 11, 6: 3}))
    assert found.outcomes[8] == (ANY_CONTENT, Outcome(num_rows=5 if index == 0 else 0, change_number=40))


def test_the_change_number_of_a_row_change_is_that_of_a_shard_that_changed_rows() -> None:
    one = entry({1: Outcome(num_rows=0, change_number=90)})
    other = entry({1: Outcome(num_rows=1, change_number=37)})
    assert merged(0, {A: one}, {A: other})[A].outcomes[1][1].change_number == 37
    nothing = entry({1: Outcome(num_rows=0, change_number=12)})
    assert merged(0, {A: one}, {A: nothing})[A].outcomes[1][1].change_number == 90


def test_what_one_shard_knows_of_a_client_holds_for_all() -> None:
    one = entry({3: Outcome()}, heartbeats=True, clock=4)
    other = entry({3: Outcome()}, closed=True)
    found = merged(1, {A: one}, {A: other, B: entry({})})
    assert list(found) == [A, B]
    assert (found[A].closed, found[A].settled, found[A].heartbeats, found[A].clock) == (True, True, True, 4)
    assert (found[B].closed, found[B].settled, found[B].last_number) == (False, False, 0)


def test_clients_stay_in_order_of_age_and_are_kept_wherever_they_were_known() -> None:
    found = merged(0, {A: entry({}), C: entry({})}, {B: entry({}), A: entry({})})
    assert list(found) == [A, C, B]


@pytest.mark.parametrize("heartbeats", [False, True])
def test_a_row_change_that_only_some_shards_have_is_repeated_where_nobody_brings_it_level(heartbeats: bool) -> None:
    has, lacks = entry({1: Outcome(num_rows=1)}, heartbeats=heartbeats), entry({}, heartbeats=heartbeats)
    assert merged(0, {A: has}, {A: lacks})[A].last_number == (1 if heartbeats else 0)
    assert merged(0, {A: has}, {})[A].last_number == (1 if heartbeats else 0)


def test_a_push_that_only_some_shards_have_is_not_applied_twice() -> None:
    has, lacks = entry({1: Outcome({5: 9})}), entry({})
    assert merged(0, {A: has}, {A: lacks})[A].last_number == 1


def test_no_more_numbers_are_remembered_than_before() -> None:
    old = entry({number: Outcome() for number in range(1, WINDOW + 1)}, heartbeats=True)
    new = entry({number: Outcome() for number in range(2, WINDOW + 2)}, heartbeats=True)
    found = merged(0, {A: old}, {A: new})[A]
    assert list(found.outcomes) == list(range(2, WINDOW + 2))


def test_how_a_step_ended_is_taken_from_a_shard_that_saw_its_contributions() -> None:
    late, seen = StepResult(4, "applied", 0), StepResult(4, "applied", 2, {5: 9})
    one, other = entry({1: Outcome(result=late)}), entry({1: Outcome(result=seen)})
    for order in ([one, other], [other, one]):
        assert merged(0, {A: order[0]}, {A: order[1]})[A].outcomes[1][1].result == seen


def group_entry(version: int, step: int, *, decided: bool = True) -> GroupEntry:
    group = Group("train", GroupTerms("sync", 2), version, (Member(0, A),))
    decision = Decision("train", step, (Contribution(0, A, 1, "gradient"),), "applied") if decided else None
    return GroupEntry(group, step, decision)


def test_a_group_is_as_the_shard_knew_it_that_was_told_last() -> None:
    for order in ([0, 1], [1, 0]):
        entries = [group_entry(3, 7), group_entry(4, 7, decided=False)]
        [found] = merge_groups([Remembered([], [entries[place]]) for place in order])
        assert found.group.version == 4
        assert (found.step, found.decision) == (7, group_entry(3, 7).decision)


def test_groups_are_kept_wherever_they_were_known() -> None:
    assert merge_groups([Remembered([], []), Remembered([], [group_entry(1, 0)])]) == [group_entry(1, 0)]
    assert merge_groups([]) == []
