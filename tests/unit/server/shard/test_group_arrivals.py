"""What home decides once members have arrived: nothing, a step, or its refusal for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest
from shardam_testing.group_shard import OPTIONS, GroupShard, client_of

from shardam_proto.errors import GroupMismatch, NonFiniteGradient, StepTimeout
from shardam_proto.schema import TableSpec
from shardam_server.shard.groups.arrivals import Arrival, Proposal, give_up, missing_ranks, propose
from shardam_server.shard.groups.changes import check_step, decide
from shardam_server.shard.groups.values import Group, GroupTerms, Kind, Member, Refusal

SPECS = [TableSpec("plain", 1), TableSpec("other", 1)]
ONE_ROW = {1: ([1], [1.0])}


def proposed(shard: GroupShard, arrivals: Mapping[bytes, Arrival], *, group: Group | None = None) -> Proposal | None:
    parts = {part.origin.client_id: part for part in shard.state.groups.parts()}
    return propose(group or shard.entry.group, shard.entry.step + 1, arrivals, parts)


def staged(*kinds: Kind) -> GroupShard:
    shard = GroupShard(SPECS, len(kinds))
    for rank, kind in enumerate(kinds):
        shard.stage(rank, ONE_ROW if kind == "gradient" else None, kind=kind)
    return shard


def test_a_step_waits_for_every_member_and_then_counts_all_by_rank() -> None:
    shard = staged("gradient", "empty", "abstain")
    arrivals = shard.arrivals()
    for rank in range(3):
        assert proposed(shard, {client: one for client, one in arrivals.items() if client != client_of(rank)}) is None
    proposal = proposed(shard, dict(reversed(arrivals.items())))
    assert proposal is not None
    assert (proposal.decision.step, proposal.decision.end, proposal.needs_check) == (1, "applied", False)
    assert [(one.rank, one.client_id, one.kind) for one in proposal.decision.contributions] == [
        (0, client_of(0), "gradient"),
        (1, client_of(1), "empty"),
        (2, client_of(2), "abstain"),
    ]


def test_a_step_waits_for_ranks_that_have_never_joined_and_for_no_rank_that_is_gone() -> None:
    shard = staged("gradient", "gradient")
    never = dataclasses.replace(shard.entry.group, terms=GroupTerms("sync", 4), complete_restart_count=-1)
    assert missing_ranks(never, [client_of(1)]) == [0, 2, 3]
    assert proposed(shard, shard.arrivals(), group=never) is None
    gone = dataclasses.replace(never, complete_restart_count=0)
    assert proposed(shard, shard.arrivals(), group=gone) is not None


def test_who_has_arrived_and_is_no_member_does_not_count() -> None:
    shard = staged("gradient", "gradient")
    arrivals = shard.arrivals()
    one = dataclasses.replace(shard.entry.group, members=shard.entry.group.members[1:])
    proposal = proposed(shard, arrivals, group=one)
    assert proposal is not None
    assert [contribution.rank for contribution in proposal.decision.contributions] == [1]


def test_if_all_abstain_the_step_ends_abstained() -> None:
    proposal = staged("abstain", "abstain").propose()
    assert (proposal.decision.end, proposal.needs_check) == ("abstained", False)
    assert staged("abstain", "empty").propose().decision.end == "applied"


@pytest.mark.parametrize("number", [0, 2])
def test_an_arrival_whose_part_is_not_staged_here_decides_nothing(number: int) -> None:
    shard = staged("gradient", "gradient")
    arrivals = shard.arrivals()
    arrivals[client_of(1)] = Arrival(client_of(1), number)
    assert proposed(shard, arrivals) is None
    arrivals = shard.arrivals()
    shard.state.groups.drop_part(client_of(1))
    assert proposed(shard, arrivals) is None


# -- refusals


@pytest.mark.parametrize("staged_here", [True, False])
def test_a_part_refused_by_a_shard_refuses_the_step_for_all_with_its_reason(staged_here: bool) -> None:
    shard = staged("gradient", "gradient")
    arrivals = shard.arrivals()
    if not staged_here:
        shard.state.groups.drop_part(client_of(1))
    refusal = Refusal.of(NonFiniteGradient("table 'plain': NaN for ids 7", metadata={"row_ids": "7"}))
    arrivals[client_of(1)] = Arrival(client_of(1), 1, refusal=refusal)
    proposal = proposed(shard, arrivals)
    assert proposal is not None
    assert (proposal.decision.end, [one.rank for one in proposal.decision.contributions]) == ("refused", [0, 1])
    decide(shard.state, proposal.decision)
    for rank in range(2):
        result = shard.result(rank)
        assert result.refusal is not None
        error = result.refusal.error()
        assert isinstance(error, NonFiniteGradient)
        assert error.message == "rank 1 of group 'workers': table 'plain': NaN for ids 7"
        assert error.metadata == {"row_ids": "7", "rank": "1"}
        assert (result.end, result.num_contributions, result.steps) == ("refused", 2, {})
    assert shard.state.table(1).num_rows == 0


def ulp(value: float) -> float:
    return math.nextafter(value, math.inf)


@pytest.mark.parametrize(
    "other",
    [
        {"options": dataclasses.replace(OPTIONS, lr=ulp(OPTIONS.lr))},
        {"options": dataclasses.replace(OPTIONS, betas=(0.9, ulp(0.999)))},
        {"options": dataclasses.replace(OPTIONS, weight_decay=ulp(0.01))},
        {"options": dataclasses.replace(OPTIONS, maximize=True)},
        {"grad_scale": ulp(1.0)},
    ],
    ids=["lr", "beta2", "weight_decay", "maximize", "grad_scale"],
)
def test_hyper_parameters_that_differ_in_one_bit_refuse_the_step_with_both_values(other: Mapping[str, object]) -> None:
    shard = GroupShard(SPECS, 3)
    shard.stage(0, {2: ([1], [1.0])})
    shard.stage(1, {1: ([1], [1.0]), 2: ([1], [1.0])})
    shard.stage(2, {1: ([1], [1.0])}, **other)  # type: ignore[arg-type]
    decision = shard.propose().decision
    assert decision.end == "refused"
    assert decision.refusal is not None
    error = decision.refusal.error()
    assert isinstance(error, GroupMismatch)
    assert error.metadata == {"group": "workers", "step": "1", "table": "plain", "ranks": "1, 2"}
    for rank in (1, 2):
        part = shard.state.groups.part(client_of(rank))
        assert part is not None
        assert part.tables[1].hyper_parameters in error.message
    assert ("use shardam.GradScaler" in error.message) == ("grad_scale" in other)
    before = shard.state.change_number
    decide(shard.state, decision)
    assert shard.state.change_number == before + 1
    assert [table.step for table in shard.state.tables()] == [0, 0]


def test_zeros_of_both_signs_are_not_the_same_hyper_parameter() -> None:
    shard = GroupShard(SPECS, 2)
    shard.stage(0, ONE_ROW, options=dataclasses.replace(OPTIONS, lr=0.0))
    shard.stage(1, ONE_ROW, options=dataclasses.replace(OPTIONS, lr=-0.0))
    assert shard.propose().decision.end == "refused"


def test_tables_of_one_rank_alone_and_of_ranks_that_abstain_are_compared_with_nothing() -> None:
    shard = GroupShard(SPECS, 3)
    shard.stage(0, ONE_ROW)
    shard.stage(1, {2: ([1], [1.0])}, options=dataclasses.replace(OPTIONS, lr=0.5))
    shard.stage(2, kind="abstain")
    assert shard.propose().decision.end == "applied"


# -- what must be checked first


@pytest.mark.parametrize(
    ("peaks", "needs_check"),
    [
        ([2.0**61, 2.0**61], False),
        ([2.0**62, 2.0**62], True),
        ([2.0**63, 0.0], True),
        ([math.nan, 1.0], True),
        ([1.0, math.inf], True),
        ([math.inf, -math.inf], True),
        ([2.0**80, -(2.0**80)], True),
        ([-1.0, 1.0], True),
    ],
)
def test_peaks_that_prove_nothing_are_checked_by_the_shards(peaks: list[float], needs_check: bool) -> None:
    shard = staged("gradient", "gradient")
    arrivals = {
        client: dataclasses.replace(arrival, peaks={1: peak})
        for (client, arrival), peak in zip(shard.arrivals().items(), peaks, strict=True)
    }
    assert shard.propose(arrivals).needs_check == needs_check


def test_a_table_of_which_no_peak_was_told_is_checked_by_the_shards() -> None:
    shard = staged("gradient", "gradient")
    arrivals = shard.arrivals() | {client_of(1): Arrival(client_of(1), 1)}
    assert shard.propose(arrivals).needs_check


def test_a_check_finds_nothing_where_sums_can_be_applied() -> None:
    shard = GroupShard(SPECS, 2)
    for rank, value in enumerate((2.0**63, -(2.0**63))):
        shard.stage(rank, {1: ([1], [value])})
    proposal = shard.propose()
    assert proposal.needs_check
    check_step(shard.state, proposal.decision)
    decide(shard.state, proposal.decision)


# -- giving up


def test_a_step_that_is_given_up_names_ranks_that_did_not_arrive_and_ranks_that_did_not_join() -> None:
    shard = staged("gradient", "gradient", "gradient")
    group = dataclasses.replace(shard.entry.group, terms=GroupTerms("sync", 4), complete_restart_count=-1)
    parts = {part.origin.client_id: part for part in shard.state.groups.parts()}
    decision = give_up(group, 1, shard.arrivals(0, 2), parts, 600.0)
    assert (decision.end, [one.rank for one in decision.contributions]) == ("refused", [0, 2])
    assert decision.refusal is not None
    error = decision.refusal.error()
    assert isinstance(error, StepTimeout)
    assert "step 1 of group 'workers' was given up: ranks 1, 3 did not arrive within 600 s" in error.message
    assert error.metadata == {"group": "workers", "step": "1", "ranks": "1, 3"}
    decide(shard.state, decision)
    assert shard.result(0).refusal == shard.result(1).refusal == decision.refusal


def test_a_step_that_nobody_arrived_for_is_given_up_for_nobody() -> None:
    group = Group("workers", GroupTerms("sync", 1), 1, (Member(0, b"client"),))
    decision = give_up(group, 3, {}, {}, 1.5)
    assert (decision.contributions, decision.step) == ((), 3)
    assert decision.refusal is not None
    assert "rank 0 did not arrive within 1.5 s" in decision.refusal.message
