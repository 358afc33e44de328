"""Parts and steps that a shard refuses: nothing changes, and no step is applied by half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardam_testing.group_shard import NAME, OPTIONS, ROW_IDS, GroupShard, client_of, groups_seen
from shardam_testing.shard_states import replayed, seen

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import (
    BadOption,
    GroupMismatch,
    IdOutOfRange,
    JournalFailed,
    JournalFull,
    NonFiniteGradient,
    NotAMember,
    ShardamError,
    ShardNotReady,
)
from shardam_proto.schema import TableSpec
from shardam_server.shard.groups.changes import check_step, decide, set_group
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table

SPECS = [TableSpec("plain", 1), TableSpec("bounded", 1, num_embeddings=10, step="row")]


@pytest.mark.case("C019")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**64, -(2.0**64)])
def test_a_part_that_is_not_finite_or_too_large_is_refused_with_its_rows(value: float) -> None:
    shard = GroupShard(SPECS, 2)
    gradients = {2: ([1], [1.0]), 1: ([4, 7, 5], [1.0, value, 1.0])}
    error = shard.refuses(lambda: shard.stage(0, gradients), NonFiniteGradient, "'plain'.* ids 7 ")
    assert error.metadata["row_ids"] == "7"
    assert shard.state.table(1).nonfinite_pushes == 1


def test_a_gradient_is_measured_unscaled() -> None:
    shard = GroupShard(SPECS, 1)
    shard.refuses(lambda: shard.stage(0, {1: ([1], [2.0**60])}, grad_scale=2.0**-4), NonFiniteGradient)
    shard.stage(0, {1: ([1], [2.0**70])}, grad_scale=2.0**10)


@pytest.mark.parametrize(
    ("gradients", "options", "kind"),
    [
        ({2: ([10], [1.0])}, OPTIONS, IdOutOfRange),
        ({1: ([10], [1.0])}, AdamOptions(lr=-1.0), BadOption),
        ({1: ([10], [1.0])}, AdamOptions(eps=0.0), BadOption),
    ],
    ids=["id", "lr", "eps"],
)
def test_a_part_that_a_push_would_not_be_allowed_is_refused(
    gradients: Mapping[int, tuple[list[int], list[float]]], options: AdamOptions, kind: type[ShardamError]
) -> None:
    shard = GroupShard(SPECS, 1)
    shard.refuses(lambda: shard.stage(0, {1: ([1], [1.0])} | dict(gradients), options=options), kind)


def test_an_empty_or_abstaining_part_names_no_table() -> None:
    shard = GroupShard(SPECS, 1)
    shard.refuses(lambda: shard.stage(0, {1: ([1], [1.0])}, kind="abstain"), BadOption, "names no table, this one names 1")


# -- sums over the ranks


@pytest.mark.parametrize("grad_scale", [1.0, 2.0**70, 2.0**-20])
def test_a_sum_that_overflows_only_across_ranks_is_found_before_any_table_changes(grad_scale: float) -> None:
    shard = GroupShard(SPECS, 2)
    large = min(2.0**63 * grad_scale, 2.0**127)  # with 2**70 the sum overflows before it is unscaled
    shard.stage(0, {1: ([1], [1.0]), 2: ([3], [large])}, grad_scale=grad_scale)
    shard.stage(1, {1: ([2], [1.0]), 2: ([3], [large])}, grad_scale=grad_scale)
    proposal = shard.propose()
    assert (proposal.decision.end, proposal.needs_check) == ("applied", True)
    shard.refuses(lambda: check_step(shard.state, proposal.decision), NonFiniteGradient, "'bounded'.* ids 3 ")
    shard.refuses(lambda: decide(shard.state, proposal.decision), NonFiniteGradient)


magnitudes = st.floats(-2.0, 127.9).map(lambda exponent: 2.0**exponent)


@given(
    parts=st.lists(st.lists(magnitudes, min_size=1, max_size=3), min_size=1, max_size=4),
    grad_scale=st.sampled_from([1.0, 2.0**-100, 2.0**-4, 2.0**16, 2.0**70, 3.0]),
)
def test_peaks_that_need_no_check_prove_that_the_sum_can_be_applied(parts: list[list[float]], grad_scale: float) -> None:
    shard = GroupShard(SPECS[:1], len(parts))
    try:
        for rank, values in enumerate(parts):
            shard.stage(rank, {1: ([1] * len(values), values)}, grad_scale=grad_scale)
    except NonFiniteGradient:
        return
    proposal = shard.propose()
    if not proposal.needs_check:
        decide(shard.state, proposal.decision)


# -- rows


def limited(num_ranks: int, *, table: int = 0, shard: int = 0) -> GroupShard:
    specs = [TableSpec("first", 1, max_rows_per_shard=table), TableSpec("second", 1, max_rows_per_shard=table)]
    return GroupShard(specs, num_ranks, max_rows=shard)


def row_limit(shard: GroupShard, action: Callable[[], object]) -> None:
    assert shard.refuses(action, ShardamError).reason == "ROW_LIMIT"


def test_rows_of_all_staged_parts_count_towards_a_table_s_limit_each_once() -> None:
    shard = limited(3, table=4)
    shard.stage(0, {1: ([1, 2, 3], [1.0] * 3)})
    row_limit(shard, lambda: shard.stage(1, {1: ([4, 5], [1.0] * 2)}))
    shard.stage(1, {1: ([3, 2, 4], [1.0] * 3)})
    shard.stage(2, {1: ([1, 2, 3, 4], [1.0] * 4)})
    shard.finish_step()
    assert shard.state.table(1).num_rows == 4


def test_rows_of_staged_parts_count_towards_the_shard_s_limit_whatever_their_table() -> None:
    shard = limited(2, shard=4)
    shard.stage(0, {1: ([1, 2, 3], [1.0] * 3)})
    row_limit(shard, lambda: shard.stage(1, {2: ([1, 2], [1.0] * 2)}))
    shard.stage(1, {2: ([1], [1.0])})
    shard.finish_step()
    assert shard.state.num_rows == 4


def write(shard: GroupShard, rank: int, *row_ids: int) -> object:
    state = shard.state
    rows = RowWrite(np.array(row_ids), np.ones((len(row_ids), 1), np.float32))
    return state.assign(state.table(1), rows, origin=shard.incoming(rank).origin)


def test_a_change_of_rows_leaves_room_for_those_of_staged_parts() -> None:
    shard = limited(2, table=4)
    shard.stage(0, {1: ([1, 2, 3], [1.0] * 3)})
    row_limit(shard, lambda: write(shard, 1, 4, 5))
    write(shard, 1, 3, 4)  # one of them is a row of the part
    row_limit(shard, lambda: write(shard, 1, 5))
    shard.stage(1, kind="empty")
    shard.finish_step()
    assert shard.state.table(1).num_rows == 4


def test_rows_that_are_deleted_behind_a_staged_part_still_have_their_room() -> None:
    shard = limited(2, table=3)
    write(shard, 1, 1, 2, 3)
    shard.stage(0, {1: ([1, 2, 3], [1.0] * 3)})
    shard.state.delete(shard.state.table(1), np.array([1, 2]), origin=shard.incoming(1).origin)
    row_limit(shard, lambda: write(shard, 1, 4))
    row_limit(shard, lambda: shard.stage(1, {1: ([4], [1.0])}))
    shard.stage(1, {1: ([3], [1.0])})
    shard.finish_step()
    assert shard.state.table(1).num_rows == 3


def test_rows_of_a_part_that_is_dropped_leave_their_room() -> None:
    shard = limited(2, table=3)
    shard.stage(0, {1: ([1, 2, 3], [1.0] * 3)})
    shard.state.end_client(client_of(0))
    shard.stage(1, {1: ([4, 5, 6], [1.0] * 3)})
    decide(shard.state, shard.decision("applied", 1))
    assert shard.state.table(1).num_rows == 3


# -- steps


def two_staged() -> GroupShard:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, {1: ([1], [1.0]), 2: ([3], [2.0])})
    shard.stage(1, {2: ([3], [1.0])})
    return shard


def test_a_decision_that_counts_a_part_which_is_not_here_changes_nothing() -> None:
    shard = two_staged()
    decision = shard.decision("applied", 0, 1)
    shard.state.end_client(client_of(1))
    shard.refuses(lambda: decide(shard.state, decision), ShardamError, "the part of rank 1 .* is not here")
    shard.refuses(lambda: check_step(shard.state, decision), ShardamError, "the part of rank 1 .* is not here")
    other_number = Decision(NAME, 1, (Contribution(0, client_of(0), 7, "gradient"),), "applied")
    shard.refuses(lambda: decide(shard.state, other_number), ShardamError, "number 7")


def test_a_decision_of_a_later_step_or_an_unknown_group_waits() -> None:
    shard = two_staged()
    for decision in (Decision(NAME, 2, (), "abstained"), Decision("others", 1, (), "abstained")):
        assert shard.refuses(lambda decision=decision: decide(shard.state, decision), ShardNotReady).rule.retryable  # type: ignore[misc]


def test_another_decision_of_a_step_that_is_carried_out_is_noticed() -> None:
    shard = two_staged()
    decide(shard.state, shard.decision("applied", 0, 1))
    other = Decision(NAME, 1, (), "abstained")
    shard.refuses(lambda: decide(shard.state, other), GroupMismatch, "step 1 .* was carried out here as")


@pytest.mark.parametrize("action", ["stage", "decide"])
def test_what_the_journal_does_not_take_is_not_applied(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    shard, twin = two_staged(), two_staged()
    if action == "stage":
        shard, twin = GroupShard(SPECS, 1), GroupShard(SPECS, 1)

    def act(shard: GroupShard) -> None:
        if action == "stage":
            shard.stage(0, {1: ([1, 2], [1.0, 2.0])})
        else:
            shard.finish_step()

    def full(*_: object) -> None:
        raise JournalFull("no room on the disk")

    with monkeypatch.context() as patch:
        patch.setattr(shard.journal, "append", full)
        shard.refuses(lambda: act(shard), JournalFull)
    act(shard)
    act(twin)
    assert shard.everything() == twin.everything()


def test_a_step_that_breaks_off_in_memory_is_whole_when_the_shard_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, twin = two_staged(), two_staged()
    apply = Table.apply

    def break_off(table: Table, *arguments: object) -> None:
        if table.table_id == 2:
            raise RuntimeError("injected")
        apply(table, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Table, "apply", break_off)
        with pytest.raises(JournalFailed, match="could not be applied in memory"):
            shard.finish_step()
    twin.finish_step()
    again = replayed(shard.journal.records())
    assert (seen(again, ROW_IDS), groups_seen(again)) == (seen(twin.state, ROW_IDS), groups_seen(twin.state))


@pytest.mark.parametrize("staged", [0, 1, 2])
def test_a_crash_between_parts_and_decision_loses_neither(staged: int) -> None:
    def contribute(shard: GroupShard, rank: int) -> None:
        shard.stage(rank, {2: ([3, 3], [1.0, 2.0 + rank])})

    shard, twin = GroupShard(SPECS, 2), GroupShard(SPECS, 2)
    for rank in range(staged):
        contribute(shard, rank)
    shard.state = replayed(shard.journal.records())
    for rank in range(2):
        if rank >= staged:
            contribute(shard, rank)
        contribute(twin, rank)
    shard.finish_step()
    twin.finish_step()
    assert seen(shard.state, ROW_IDS) == seen(twin.state, ROW_IDS)
    assert groups_seen(shard.state) == groups_seen(twin.state)


# -- changes from outside


def outside(state: ShardState) -> list[Callable[[], object]]:
    table, ids = state.table(1), np.array([1])
    section = GradientSection(table, ids, np.ones((1, 1), np.float32), OPTIONS, 1.0)
    rows = RowWrite(ids, np.ones((1, 1), np.float32))
    return [
        lambda: state.push([section]),
        lambda: state.assign(table, rows),
        lambda: state.delete(table, ids),
        lambda: state.clear_moments(table, ids),
    ]


def test_changes_from_outside_a_sync_group_are_refused_while_it_has_members() -> None:
    shard = GroupShard(SPECS, 2)
    for change in outside(shard.state):
        error = shard.refuses(change, NotAMember, r"group 'workers' trains in sync \(reduce=mean\) of 2 ranks \(joined: 0, 1\)")
        assert error.metadata["group"] == NAME
    set_group(shard.state, Group(NAME, GroupTerms("sync", 2), 2), 0)
    for change in outside(shard.state):
        change()


def test_a_member_changes_rows_and_pushes_only_by_its_steps() -> None:
    shard = GroupShard(SPECS, 2)
    write(shard, 1, 5)
    section = GradientSection(shard.state.table(1), np.array([1]), np.ones((1, 1), np.float32), OPTIONS, 1.0)
    origin = shard.incoming(0).origin
    shard.refuses(lambda: shard.state.push([section], origin), NotAMember)


def test_a_bounded_group_refuses_nothing_from_outside() -> None:
    shard = GroupShard(SPECS, 0)
    members = (Member(0, b"bounded"),)
    set_group(shard.state, Group("loose", GroupTerms("bounded", 2), 1, members), 0)
    for change in outside(shard.state):
        change()
