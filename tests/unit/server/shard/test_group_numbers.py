"""Numbers of contributions on one shard: who may use them, repeats, steps ahead and behind, and clients that are gone."""

from __future__ import annotations

import dataclasses

from shardam_testing.group_shard import NAME, ROW_IDS, GroupShard, client_of, groups_seen
from shardam_testing.shard_states import replayed, seen

from shardam_proto.errors import ClientClosed, GroupMismatch, NotAMember, SequenceError, ShardNotReady, StaleState
from shardam_proto.schema import TableSpec
from shardam_server.shard.clients import IDLE_S, WINDOW, Origin, Outcome
from shardam_server.shard.groups.changes import decide, set_group, stage, update_group
from shardam_server.shard.groups.values import Decision, Group, GroupTerms, Member, Refusal
from shardam_server.shard.last_numbers import LastNumbers

SPECS = [TableSpec("plain", 1)]
ONE_ROW = {1: ([1], [1.0])}
REFUSAL = Refusal("STEP_TIMEOUT", "rank 1 did not arrive", {"ranks": "1"})


def check_replay(shard: GroupShard) -> None:
    again = replayed(shard.journal.records())
    assert (seen(again, ROW_IDS), groups_seen(again)) == shard.everything()[:2]


def must_not_run() -> Outcome:
    raise AssertionError("a number that is taken was given to another change")


# -- who contributes


def test_a_client_of_no_group_or_of_another_rank_is_refused() -> None:
    shard = GroupShard(SPECS, 2)
    part = shard.incoming(0, ONE_ROW)
    shard.refuses(lambda: stage(shard.state, dataclasses.replace(part, rank=1)), GroupMismatch, "is rank 0 of .* says rank 1")
    shard.state.open_client(b"stranger")
    stranger = dataclasses.replace(part, origin=Origin(b"stranger", 1, b"content"))
    shard.refuses(lambda: stage(shard.state, stranger), NotAMember, "a member of no group here")
    unknown = dataclasses.replace(part, origin=Origin(b"unknown", 1, b"content"))
    shard.refuses(lambda: stage(shard.state, unknown), ClientClosed)


def test_a_member_of_a_bounded_group_stages_nothing() -> None:
    shard = GroupShard(SPECS, 1)
    set_group(shard.state, Group(NAME, GroupTerms("bounded", 1, 3), 2, (Member(0, client_of(0)),)), 0)
    shard.refuses(lambda: shard.stage(0, ONE_ROW), GroupMismatch, r"\(bounded:3 of 1 ranks\)")


def test_a_member_after_its_drop_is_refused() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    shard.stage(1, ONE_ROW)
    without = dataclasses.replace(shard.entry.group, version=2, members=shard.entry.group.members[:1])
    set_group(shard.state, without, 0)
    decide(shard.state, shard.decision("applied", 0))
    shard.refuses(lambda: shard.stage(1, ONE_ROW), NotAMember)
    shard.state.end_client(client_of(1))
    shard.refuses(lambda: shard.stage(1, ONE_ROW), ClientClosed)


# -- repeats


def test_the_repeat_of_a_staged_part_gets_the_same_answer_and_changes_nothing() -> None:
    shard = GroupShard(SPECS, 2)
    part = shard.incoming(0, {1: ([1, 2], [3.0, -4.0])})
    first = stage(shard.state, part)
    before = shard.everything()
    again = stage(shard.state, part)
    assert (again.peaks, again.outcome, again.repeated) == (first.peaks, None, True)
    assert first.peaks == {1: 4.0}
    assert shard.everything() == before


def test_a_staged_number_with_another_content_is_refused() -> None:
    shard = GroupShard(SPECS, 2)
    part = shard.incoming(0, kind="empty")
    stage(shard.state, part)
    origin = dataclasses.replace(part.origin, digest=b"other")
    others = [
        dataclasses.replace(part, origin=origin),
        dataclasses.replace(part, kind="abstain"),
        dataclasses.replace(part, step=2),
    ]
    for other in others:
        assert shard.refuses(lambda other=other: stage(shard.state, other), SequenceError).reason == "SEQUENCE_REUSED"  # type: ignore[misc]


def test_nothing_else_closes_the_number_of_a_staged_part() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    skip = Origin(client_of(0), 1, b"close")
    error = shard.refuses(lambda: shard.state.run_number(skip, must_not_run), SequenceError, "number 1 was used with another")
    assert error.reason == "SEQUENCE_REUSED"


def test_a_number_that_leaves_a_gap_is_refused_and_one_that_is_forgotten_too() -> None:
    shard = GroupShard(SPECS, 1)
    shard.refuses(lambda: stage(shard.state, shard.incoming(0, number=2)), StaleState, "number 2 came after 0")
    for _ in range(WINDOW + 1):
        shard.stage(0, kind="empty")
        shard.finish_step()
    shard.refuses(lambda: stage(shard.state, shard.incoming(0, kind="empty", number=1, step=1)), SequenceError, "too old")


def test_the_repeat_of_a_decided_part_gets_how_its_step_ended() -> None:
    shard = GroupShard(SPECS, 1)
    part = shard.incoming(0, ONE_ROW)
    stage(shard.state, part)
    result = shard.finish_step()
    before = shard.everything()
    again = stage(shard.state, part)
    assert again.outcome is not None
    assert (again.outcome.result, again.repeated) == (result, True)
    assert shard.everything() == before
    other = dataclasses.replace(part, origin=dataclasses.replace(part.origin, digest=b"other"))
    shard.refuses(lambda: stage(shard.state, other), SequenceError)


def test_a_part_that_was_refused_here_gets_how_its_step_ended_if_it_comes_again() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    decide(shard.state, shard.decision("refused", 0, 1, refusal=REFUSAL))  # the part of rank 1 is staged elsewhere alone
    again = stage(shard.state, shard.incoming(1, ONE_ROW, number=1, step=1))
    assert again.outcome is not None
    assert (again.outcome.result, again.repeated) == (shard.result(0), True)
    check_replay(shard)


# -- steps ahead and behind


def test_a_part_of_a_step_ahead_waits_for_the_step_before_it() -> None:
    shard = GroupShard(SPECS, 1)
    part = shard.incoming(0, ONE_ROW, step=2)
    assert shard.refuses(lambda: stage(shard.state, part), ShardNotReady).rule.retryable
    decide(shard.state, Decision(NAME, 1, (), "refused", REFUSAL))
    assert stage(shard.state, part).outcome is None


def test_a_part_that_comes_after_its_step_was_given_up_is_closed_with_the_same_refusal() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    late = shard.incoming(1, ONE_ROW)
    decide(shard.state, shard.decision("refused", 0, refusal=REFUSAL))
    rows = seen(shard.state, ROW_IDS)["rows"]
    staging = stage(shard.state, late)
    assert staging.outcome is not None
    result = staging.outcome.result
    assert result is not None
    assert (result.step, result.end, result.num_contributions, result.steps, result.refusal) == (1, "refused", 0, {}, REFUSAL)
    assert stage(shard.state, late).outcome == staging.outcome
    assert seen(shard.state, ROW_IDS)["rows"] == rows
    check_replay(shard)


def test_a_part_that_is_staged_and_not_counted_is_closed_as_one_that_comes_late() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    shard.stage(1, ONE_ROW)
    decide(shard.state, shard.decision("refused", 0, refusal=REFUSAL))
    assert shard.state.groups.parts() == []
    assert (shard.result(0).num_contributions, shard.result(1).num_contributions) == (1, 0)
    assert shard.result(1).refusal == REFUSAL
    check_replay(shard)


def test_a_part_that_comes_after_its_step_was_applied_is_dropped_and_says_so() -> None:
    shard = GroupShard(SPECS, 2)
    for _ in range(2):
        shard.stage(0, kind="empty")
        decide(shard.state, shard.decision("applied", 0))
    for step in (1, 2):
        staging = stage(shard.state, shard.incoming(1, ONE_ROW, step=step))
        assert staging.outcome is not None
        assert staging.outcome.result is not None
        refusal = staging.outcome.result.refusal
        assert refusal is not None
        assert refusal.reason == "STEP_TIMEOUT"
        assert f"step {step} of group 'workers' was decided without rank 1" in refusal.message
        assert "goes on with step 3" in refusal.message
    check_replay(shard)


def test_a_shard_that_takes_a_group_over_at_a_step_goes_on_from_there() -> None:
    shard = GroupShard(SPECS, 1)
    set_group(shard.state, Group("taken over", GroupTerms("sync", 1), 5), 41)
    entry = shard.state.groups.find("taken over")
    assert entry is not None
    assert entry.step == 41
    decide(shard.state, Decision("taken over", 42, (), "abstained"))
    assert entry.step == 42
    check_replay(shard)


# -- clients that are gone


def test_the_part_of_a_client_that_ends_is_dropped_with_it() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    shard.stage(1, ONE_ROW)
    shard.state.end_client(client_of(0))
    assert [part.rank for part in shard.state.groups.parts()] == [1]
    decide(shard.state, shard.decision("applied", 1))
    check_replay(shard)


def test_a_client_whose_part_waits_for_a_decision_is_not_forgotten() -> None:
    shard = GroupShard(SPECS, 1)
    state = shard.state
    state.open_client(b"silent")
    members = (*shard.entry.group.members, Member(1, b"silent"))
    set_group(state, Group(NAME, GroupTerms("sync", 2), 2, members, 0), 0)
    part = dataclasses.replace(shard.incoming(0, kind="empty"), origin=Origin(b"silent", 1, b"content"), rank=1)
    stage(state, part)
    later = max(entry.last_contact for _, entry in state.clients) + IDLE_S + 1
    assert state.forget_idle_clients(later) == 0
    state.end_client(b"silent", settled=True)
    assert state.forget_idle_clients(later) == 1
    check_replay(shard)


def test_tables_step_with_one_of_the_numbers_that_a_decision_closes() -> None:
    """A gone client's numbers are made up for on shards that lack them: together these step the tables once."""
    shard = GroupShard(SPECS, 2)
    for rank in range(2):
        shard.stage(rank, ONE_ROW)
    assert shard.finish_step().steps == {1: 1}
    numbers = [LastNumbers.of(shard.state.end_client(client_of(rank))) for rank in range(2)]
    assert [(one.last_number, one.tables) for one in numbers] == [(1, {1: (1,)}), (1, {1: ()})]


def test_a_decision_that_counts_a_client_which_is_unknown_here_closes_the_others() -> None:
    shard = GroupShard(SPECS, 1)
    decision = shard.decision("refused", 0, refusal=REFUSAL)
    unknown = dataclasses.replace(decision.contributions[0], rank=1, client_id=b"unknown")
    decide(shard.state, dataclasses.replace(decision, contributions=(*decision.contributions, unknown)))
    assert shard.result(0).num_contributions == 2
    assert shard.state.clients.find(b"unknown") is None
    check_replay(shard)


def test_a_decision_never_takes_a_client_back() -> None:
    shard = GroupShard(SPECS, 1)
    for _ in range(3):
        shard.stage(0, kind="empty")
        shard.finish_step()
    stale = shard.decision("refused", 0, refusal=REFUSAL)
    stale = dataclasses.replace(stale, contributions=(dataclasses.replace(stale.contributions[0], number=2),))
    decide(shard.state, stale)
    assert (shard.number(0), shard.result(0, 2).end) == (4, "applied")


# -- members


def test_an_older_version_of_a_group_changes_nothing() -> None:
    shard = GroupShard(SPECS, 2)
    before = shard.everything()
    set_group(shard.state, dataclasses.replace(shard.entry.group, members=()), 9)
    assert shard.everything() == before


def test_a_decision_is_carried_out_with_the_members_and_terms_that_it_was_made_for() -> None:
    """A whole group restarts with other terms before a shard has heard of the last step of the old one."""
    shard, twin = GroupShard(SPECS, 2), GroupShard(SPECS, 2)
    for one in (shard, twin):
        for rank in range(2):
            one.stage(rank, ONE_ROW)
    decision = shard.propose().decision
    restarted = Group(NAME, GroupTerms("sync", 1, reduce="sum"), 2, (Member(0, b"new", 1, 2),))
    update_group(shard.state, restarted, 1, decision)
    decide(twin.state, decision)
    set_group(twin.state, restarted, 1)
    assert shard.everything() == twin.everything()
    again = shard.everything()
    update_group(shard.state, restarted, 1, decision)
    assert shard.everything() == again


def test_a_shard_that_does_not_know_the_group_takes_it_over_behind_its_last_step() -> None:
    shard = GroupShard(SPECS, 1)
    entry = update_group(shard.state, Group("others", GroupTerms("sync", 1), 1), 7, Decision("others", 7, (), "abstained"))
    assert (entry.step, entry.decision) == (7, None)


def test_a_shard_that_is_taken_past_steps_drops_their_parts_and_closes_their_numbers() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW)
    last = Decision(NAME, 5, (), "abstained")
    entry = update_group(shard.state, dataclasses.replace(shard.entry.group, version=2), 5, last)
    assert (entry.step, entry.decision, shard.state.groups.parts()) == (5, None, [])
    assert (shard.result(0).num_contributions, shard.result(0).step) == (0, 1)
    assert shard.stage(1, ONE_ROW).outcome is None
    check_replay(shard)


def test_members_are_found_by_their_client() -> None:
    shard = GroupShard(SPECS, 3)
    groups = shard.state.groups
    found = groups.of_client(client_of(2))
    assert found is not None
    assert (found[0], found[1].rank) == (shard.entry, 2)
    set_group(shard.state, dataclasses.replace(shard.entry.group, version=2, members=shard.entry.group.members[:2]), 0)
    assert groups.of_client(client_of(2)) is None
    assert groups.require_member(client_of(1))[1].rank == 1
