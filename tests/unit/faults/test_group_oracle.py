"""The oracle of groups against shards' own states: the same journals, the same bits and decisions; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from shardam_testing.faults.comparison import RUN_FIELDS, differences, joined
from shardam_testing.faults.group_reference import GroupReference
from shardam_testing.faults.group_verification import compare_decisions
from shardam_testing.faults.group_work import CYCLE, LARGE_STEP, TOO_LARGE_STEP, digest, make_work
from shardam_testing.faults.memory_shard import MemoryShard
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.oracle_groups import merged_by_rank
from shardam_testing.faults.sequence import TABLES, Float32s, Int64s

from shardam_proto.errors import NonFiniteGradient
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups import changes
from shardam_server.shard.groups.arrivals import Arrival, propose, refuse
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member, Reduce, Refusal
from shardam_server.shard.table import GradientSection

SEED, NAME = 3, "workers"


class GroupRun:
    """Members that train on shards without processes, rows split by their id; home decides."""

    def __init__(self, num_shards: int, world_size: int, reduce: Reduce = "mean") -> None:
        self.shards = [MemoryShard() for _ in range(num_shards)]
        self.world_size = world_size
        self.pulled: dict[tuple[int, int], str] = {}
        self.numbers: dict[bytes, int] = {}
        self.group = Group(NAME, GroupTerms("sync", world_size, reduce=reduce))
        self.checks = 0
        for rank in range(world_size):
            self.join(rank)

    def client(self, rank: int) -> bytes:
        member = next(member for member in self.group.members if member.rank == rank)
        return member.client_id

    def join(self, rank: int) -> None:
        client_id = bytes([rank, self.group.version + 1]) * 8
        for shard in self.shards:
            shard.open(client_id)
        self.numbers[client_id] = 0
        member = Member(rank, client_id, first_step=self.step + 1)
        self.change(tuple(sorted((*self.group.members, member), key=lambda one: one.rank)))

    def drop(self, rank: int) -> None:
        client_id = self.client(rank)
        self.change(tuple(member for member in self.group.members if member.rank != rank))
        for shard in self.shards:
            shard.state.end_client(client_id)

    def change(self, members: tuple[Member, ...]) -> None:
        complete = 0 if len(members) == self.world_size else self.group.complete_restart_count
        self.group = Group(NAME, self.group.terms, self.group.version + 1, members, complete)
        for shard in self.shards:
            changes.set_group(shard.state, self.group, self.step)

    @property
    def step(self) -> int:
        entry = self.shards[0].state.groups.find(NAME)
        return 0 if entry is None else entry.step

    def parts_of(self, row_ids: Int64s) -> list[np.typing.NDArray[np.bool_]]:
        return [row_ids % len(self.shards) == index for index in range(len(self.shards))]

    def pull(self, name: str, row_ids: Int64s) -> Float32s:
        weights = np.empty((row_ids.size, self.shards[0].table(name).spec.dim), np.float32)
        for shard, mine in zip(self.shards, self.parts_of(row_ids), strict=True):
            weights[mine] = shard.table(name).gather(row_ids[mine])
        return weights

    def stage(self, rank: int, step: int) -> Arrival:
        """Sends a member's parts to all shards."""
        work, client_id = make_work(SEED, self.world_size, rank, step), self.client(rank)
        pulled = [self.pull(part.spec.name, part.row_ids) for part in work.tables]
        self.pulled[rank, step] = digest(pulled)
        self.numbers[client_id] += 1
        origin, peaks = Origin(client_id, self.numbers[client_id], b"digest"), dict[int, float]()
        for index, shard in enumerate(self.shards):
            sections = []
            for part, rows in zip(work.tables, pulled, strict=True):
                mine = self.parts_of(part.row_ids)[index]
                gradients = part.gradients(rows, work.grad_scale)[mine]
                table = shard.table(part.spec.name)
                sections.append(GradientSection(table, part.row_ids[mine], gradients, work.options, work.grad_scale))
            incoming = changes.IncomingPart(origin, step, rank, work.kind, sections if work.kind == "gradient" else [])
            staging = changes.stage(shard.state, incoming)
            for table_id, peak in staging.peaks.items():
                peaks[table_id] = max(peaks.get(table_id, 0.0), peak)
        return Arrival(client_id, origin.number, peaks)

    def run_step(self) -> Decision:
        """Has all members contribute to the next step, and decides it."""
        step = self.step + 1
        arrivals = {member.client_id: self.stage(member.rank, step) for member in self.group.members}
        decision = self.decision(step, arrivals)
        for shard in self.shards:
            changes.decide(shard.state, decision)
        return decision

    def decision(self, step: int, arrivals: dict[bytes, Arrival]) -> Decision:
        parts = {part.origin.client_id: part for part in self.shards[0].state.groups.parts()}
        proposal = propose(self.group, step, arrivals, parts)
        assert proposal is not None
        try:
            for shard in self.shards if proposal.needs_check else []:
                self.checks += 1
                changes.check_step(shard.state, proposal.decision)
        except NonFiniteGradient as error:
            return refuse(self.group, step, arrivals, parts, Refusal.of(error))
        return proposal.decision

    def oracles(self) -> list[Oracle]:
        return [shard.oracle() for shard in self.shards]


def check(run: GroupRun) -> list[Oracle]:
    """Compares the shards with their journals, and all of them with one process."""
    oracles = run.oracles()
    assert compare_decisions(oracles, NAME) == []
    tables = {spec.name: run.shards[0].table(spec.name).schema_info(with_step=True) for spec in TABLES}
    reference = GroupReference(SEED, run.world_size, tables)
    expected = reference.run(oracles[0].groups.decisions)
    assert reference.mismatches == []
    for spec in TABLES:
        for shard, oracle in zip(run.shards, oracles, strict=True):
            assert differences(shard.rows(spec.name), oracle.table(spec.name).rows()) == []
            assert oracle.table(spec.name).step == shard.table(spec.name).step == reference.steps()[spec.name]
        together = joined([shard.rows(spec.name) for shard in run.shards])
        assert differences(expected[spec.name], together, RUN_FIELDS) == []
    assert reference.pulled == run.pulled
    return oracles


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("world_size", "reduce"), [(2, "mean"), (3, "mean"), (4, "sum")])
def test_a_replay_and_one_process_give_the_bits_of_all_shards(num_shards: int, world_size: int, reduce: Reduce) -> None:
    run = GroupRun(num_shards, world_size, reduce)
    ends = [run.run_step().end for _ in range(2 * CYCLE)]
    assert ends[TOO_LARGE_STEP - 1 :: CYCLE] == ["refused"] * 2
    assert ends[LARGE_STEP - 1 :: CYCLE] == ["applied"] * 2
    assert run.checks == 4 * num_shards  # also of the refused ones: the shard of the large row is the last that is asked
    assert "abstained" in ends
    check(run)


def test_members_that_join_late_and_leave_change_what_is_counted_and_no_more() -> None:
    run = GroupRun(2, 3)
    for _ in range(5):
        run.run_step()
    run.drop(1)
    for _ in range(5):
        run.run_step()
    run.join(1)
    for _ in range(10):
        run.run_step()
    decisions = check(run)[0].groups.decisions
    assert [len(decision.counted) for decision in decisions] == [3] * 5 + [2] * 5 + [3] * 10


def test_the_part_of_a_member_that_is_dropped_before_the_decision_is_on_no_shard() -> None:
    run = GroupRun(2, 3)
    run.run_step()
    arrivals = {run.client(rank): run.stage(rank, 2) for rank in (0, 2)}
    run.stage(1, 2)
    run.drop(1)
    decision = run.decision(2, arrivals)
    for shard in run.shards:
        changes.decide(shard.state, decision)
    del run.pulled[1, 2]
    assert [one.rank for one in decision.contributions] == [0, 2]
    assert all(oracle.groups.parts == {} for oracle in check(run))


def test_a_contribution_that_comes_after_its_step_uses_its_number_up_and_changes_nothing() -> None:
    run = GroupRun(1, 2)
    late, shard = run.client(1), run.shards[0]
    arrivals = {run.client(0): run.stage(0, 1)}
    refusal = Refusal("STEP_TIMEOUT", "rank 1 did not come")
    changes.decide(shard.state, refuse(run.group, 1, arrivals, {}, refusal))
    run.stage(1, 1)
    oracle = shard.oracle()
    assert oracle.clients[late].last_number == 1
    assert [applied.kind for applied in oracle.applied] == ["decision", "close"]
    assert oracle.groups.decisions[0].reason == "STEP_TIMEOUT"
    assert all(oracle.table(spec.name).rows().row_ids.size == 0 for spec in TABLES)


def decided(change: Callable[[journal_pb2.DecisionRecord], None]) -> Callable[[], Oracle]:
    """Returns the replay of a run whose last decision is told otherwise."""
    run = GroupRun(1, 2)
    while run.run_step().end != "applied" or not _last(run).decision.tables:
        pass
    record = _last(run)
    change(record.decision)
    data = run.shards[0].journal.records.pop()[1]
    run.shards[0].journal.records.append((record.SerializeToString(), data))
    return run.shards[0].oracle


def _last(run: GroupRun) -> journal_pb2.JournalRecord:
    return journal_pb2.JournalRecord.FromString(run.shards[0].journal.records[-1][0])


def _doubled(record: journal_pb2.DecisionRecord) -> None:
    record.decision.contributions.append(record.decision.contributions[0])


def _without_one(record: journal_pb2.DecisionRecord) -> None:
    del record.decision.contributions[1]


def _of_the_next_step(record: journal_pb2.DecisionRecord) -> None:
    record.decision.step += 1


def _of_another_number(record: journal_pb2.DecisionRecord) -> None:
    record.decision.contributions[0].number += 1


def _divided_by_three(record: journal_pb2.DecisionRecord) -> None:
    record.tables[0].factors.divisor = 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_doubled, "counts ranks"),
        (_without_one, "the options give"),
        (_of_the_next_step, "was decided after step"),
        (_of_another_number, "is not"),
        (_divided_by_three, "the options give"),
    ],
)
def test_a_decision_that_cannot_be_is_found(change: Callable[[journal_pb2.DecisionRecord], None], problem: str) -> None:
    replay = decided(change)
    with pytest.raises(AssertionError, match=problem):
        replay()


def test_shards_that_decided_differently_are_found() -> None:
    run, other = GroupRun(2, 2), GroupRun(2, 2)
    for _ in range(3):
        run.run_step()
        other.run_step()
    assert compare_decisions(run.oracles(), NAME) == []
    contributions = tuple(Contribution(rank, other.client(rank), 4, "empty") for rank in range(2))
    refused = Decision(NAME, 4, contributions, "refused", Refusal("STEP_TIMEOUT", "nobody"))
    changes.decide(other.shards[1].state, refused)
    run.run_step()
    mixed = [run.shards[0].oracle(), other.shards[1].oracle()]
    assert [line.split(" is ")[0] for line in compare_decisions(mixed, NAME)] == ["step 4"]
    behind = [run.shards[0].oracle(), run.shards[1].oracle(-1)]
    assert compare_decisions(behind, NAME) == ["group workers is at steps [3, 4] on different shards"]


def test_clocks_of_a_bounded_group_go_up_by_one() -> None:
    shard = MemoryShard()
    client = b"c" * 16
    shard.open(client)
    group = Group(NAME, GroupTerms("bounded", 1, max_staleness=1), 1, (Member(0, client, first_step=5),))
    changes.set_group(shard.state, group, 0)
    for number, clock in ((1, 5), (2, 6)):
        shard.state.push([], Origin(client, number, b"digest", clock))
    assert [applied.clock for applied in shard.oracle().applied] == [5, 6]
    shard.state.push([], Origin(client, 3, b"digest", 8))
    with pytest.raises(AssertionError, match="clock 8"):
        shard.oracle()


def test_ranks_are_summed_one_after_the_other_and_each_rank_s_rows_before() -> None:
    tiny, large = np.float32(1), np.float32(2**25)

    def rank(ids: Sequence[int], values: Sequence[np.float32]) -> tuple[Int64s, Float32s]:
        return np.array(ids, np.int64), np.array(values, np.float32).reshape(-1, 1)

    row_ids, sums = merged_by_rank([rank([7, 3], [large, tiny]), rank([7, 7, 7, 7], [tiny] * 4), rank([7], [-large])])
    assert row_ids.tolist() == [3, 7]
    assert sums.ravel().tolist() == [1, 4]  # the four ones of rank 1 survive beside 2**25 only because they are summed first
    _, negative_zero = merged_by_rank([rank([1], [np.float32(-0.0)])])
    assert np.signbit(negative_zero).all()
