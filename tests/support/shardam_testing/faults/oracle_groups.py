"""A shard's groups from its journal: members, steps, staged parts, and how each step of a sync group ended.

CONTRACT.md's order of sums is written out here once more, apart from the kernels: a rank's gradients of a row left to right,
then the ranks' sums in rank order, then unscaled, then divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from shardam_kernels.factors import Factors
from shardam_proto.v1 import common_pb2, group_pb2, journal_pb2
from shardam_testing.faults.oracle_table import Float32s, Int64s

LIMIT = 2.0**64
"""A merged, unscaled gradient of this magnitude is refused (CONTRACT.md, Refusal)."""

KINDS = {
    group_pb2.CONTRIBUTION_KIND_GRADIENT: "gradient",
    group_pb2.CONTRIBUTION_KIND_EMPTY: "empty",
    group_pb2.CONTRIBUTION_KIND_ABSTAIN: "abstain",
}
ENDS = {
    group_pb2.STEP_END_APPLIED: "applied",
    group_pb2.STEP_END_ABSTAINED: "abstained",
    group_pb2.STEP_END_REFUSED: "refused",
}


@dataclasses.dataclass(frozen=True, eq=False)
class PartTable:
    """One table's gradients within a part, as pushed."""

    row_ids: Int64s
    gradients: Float32s
    options: common_pb2.AdamOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A staged part."""

    client_id: bytes
    number: int
    group: str
    step: int
    rank: int
    kind: str
    tables: Mapping[int, PartTable]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A contribution that was counted."""

    rank: int
    client_id: bytes
    number: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Decided:
    """A step of a sync group as one shard has it.

    Attributes:
        group: the group's name.
        step: the step.
        end: "applied", "abstained" or "refused".
        counted: the contributions.
        reason: of a refusal; else empty.
        reduce_mean: a mean was asked for.
        tables: table id -> its step after it, for those that stepped.
        members: rank -> client, as the shard knew the group then.
    """

    group: str
    step: int
    end: str
    counted: tuple[Counted, ...]
    reason: str
    reduce_mean: bool
    tables: Mapping[int, int]
    members: Mapping[int, bytes]

    @property
    def told(self) -> tuple[object, ...]:
        """What home decided: equal on all shards."""
        return self.group, self.step, self.end, self.counted, self.reason, tuple(sorted(self.tables.items()))


@dataclasses.dataclass
class OracleGroup:
    """A group on one shard."""

    message: group_pb2.Group
    step: int

    @property
    def members(self) -> dict[int, bytes]:
        """Rank -> client."""
        return {member.rank: member.client_id for member in self.message.members}

    def member(self, client_id: bytes) -> group_pb2.GroupMember | None:
        """Returns a client's membership, or None."""
        return next((member for member in self.message.members if member.client_id == client_id), None)


class OracleGroups:
    """All groups of one shard.

    Attributes:
        groups: by name.
        parts: client id -> staged part.
        decisions: in order.
    """

    def __init__(self) -> None:
        self.groups: dict[str, OracleGroup] = {}
        self.parts: dict[bytes, Part] = {}
        self.decisions: list[Decided] = []

    def bounded_member(self, client_id: bytes) -> group_pb2.GroupMember | None:
        """Returns a client's membership in a bounded group, or None."""
        members = (
            group.member(client_id)
            for group in self.groups.values()
            if group.message.terms.mode == group_pb2.GROUP_MODE_BOUNDED
        )
        return next((member for member in members if member is not None), None)

    def sync_members(self) -> set[bytes]:
        """Returns the clients of sync groups; while there are any, nobody else changes anything."""
        groups = (group for group in self.groups.values() if group.message.terms.mode == group_pb2.GROUP_MODE_SYNC)
        return {client_id for group in groups for client_id in group.members.values()}

    def set_group(self, record: journal_pb2.GroupRecord) -> None:
        """Takes over a group's members.

        Raises:
            AssertionError: the version does not grow, a rank or a client is there twice, or sync groups meet others.
        """
        new, former = record.group, self.groups.get(record.group.name)
        assert former is None or new.version > former.message.version, f"group {new.name}: version {new.version} comes late"
        ranks, clients = [one.rank for one in new.members], [one.client_id for one in new.members]
        assert ranks == sorted(set(ranks)), f"group {new.name}: ranks {ranks}"
        assert len(set(clients)) == len(clients), f"group {new.name}: a client has two ranks"
        assert all(rank < new.terms.world_size for rank in ranks), f"group {new.name}: ranks {ranks} of {new.terms}"
        with_members = [group for name, group in self.groups.items() if name != new.name and group.members]
        modes = {new.terms.mode, *(group.message.terms.mode for group in with_members)}
        exclusive = bool(new.members) and bool(with_members) and group_pb2.GROUP_MODE_SYNC in modes
        assert not exclusive, f"group {new.name} has members beside {[group.message.name for group in with_members]}"
        self.groups[new.name] = OracleGroup(new, record.step if former is None else former.step)

    def stage(self, part: Part) -> None:
        """Keeps a part.

        Raises:
            AssertionError: it is not a member's next one, or not for the group's next step.
        """
        group = self.groups[part.group]
        member = group.member(part.client_id)
        assert member is not None, f"client {part.client_id.hex()} staged a part and is no member"
        assert member.rank == part.rank, f"client {part.client_id.hex()} is rank {member.rank}, its part says {part.rank}"
        assert part.step == group.step + 1, f"a part of step {part.step} was staged after step {group.step}"
        assert part.step >= member.first_step, f"rank {part.rank} begins at step {member.first_step}, not {part.step}"
        former = self.parts.get(part.client_id)
        assert former is None, f"client {part.client_id.hex()} staged number {part.number} beside another part: {former}"
        self.parts[part.client_id] = part

    def drop_part(self, client_id: bytes) -> None:
        """Drops the part of a client that has ended."""
        self.parts.pop(client_id, None)

    def decided(self, record: journal_pb2.DecisionRecord) -> tuple[Decided, list[Part]]:
        """Takes a decision over; returns it and its parts with gradients, in rank order.

        Raises:
            AssertionError: it is not the next one, or counts what is not here.
        """
        message = record.decision
        group = self.groups[message.group]
        assert message.step == group.step + 1, f"step {message.step} was decided after step {group.step}"
        counted = tuple(Counted(one.rank, one.client_id, one.number, KINDS[one.kind]) for one in message.contributions)
        ranks = [one.rank for one in counted]
        assert ranks == sorted(set(ranks)), f"step {message.step} counts ranks {ranks}"
        for one in counted:
            assert group.members.get(one.rank) == one.client_id, f"step {message.step} counts {one}, who is no member"
        decision = Decided(
            message.group,
            message.step,
            ENDS[message.end],
            counted,
            message.refusal.reason if message.HasField("refusal") else "",
            group.message.terms.reduce == group_pb2.REDUCE_MEAN,
            {push.table_id: push.table_step for push in record.tables},
            group.members,
        )
        parts = self._counted_parts(decision)
        assert bool(decision.reason) == (decision.end == "refused"), f"step {message.step}: {decision.end} {decision.reason}"
        named = {table_id for part in parts for table_id in part.tables} if decision.end == "applied" else set()
        assert set(decision.tables) == named, f"step {message.step} stepped tables {set(decision.tables)}, it names {named}"
        group.step = message.step
        self.parts = {
            client_id: part for client_id, part in self.parts.items() if part.group != message.group or part.step > message.step
        }
        self.decisions.append(decision)
        return decision, parts

    def _counted_parts(self, decision: Decided) -> list[Part]:
        if decision.end == "refused":
            return []
        parts = []
        for one in decision.counted:
            part = self.parts.get(one.client_id)
            assert part is not None, f"step {decision.step} counts {one}, whose part is not here"
            assert (part.number, part.step, part.kind) == (one.number, decision.step, one.kind), f"{one} is not {part}"
            parts.append(part)
        if decision.end == "abstained":
            assert all(part.kind == "abstain" for part in parts), f"step {decision.step} has gradients and was not applied"
        else:
            assert any(part.kind != "abstain" for part in parts), f"step {decision.step} was applied and all abstained"
        return [part for part in parts if part.kind == "gradient"]


def merged_by_rank(gradients: Sequence[tuple[Int64s, Float32s]]) -> tuple[Int64s, Float32s]:
    """Sums gradients by row: each rank's left to right from the first one, then the ranks' sums in rank order.

    Args:
        gradients: ids [N] and rows [N, dim] of each rank, in rank order; at least one.

    Returns:
        Distinct ids, ascending, and their sums, float32.
    """
    sums: dict[int, Float32s] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for row_ids, rows in gradients:
            of_rank: dict[int, Float32s] = {}
            for row_id, row in zip(row_ids.tolist(), rows, strict=True):
                of_rank[row_id] = of_rank[row_id] + row if row_id in of_rank else row
            for row_id, row in of_rank.items():
                sums[row_id] = sums[row_id] + row if row_id in sums else row
    ids = np.array(sorted(sums), np.int64)
    dim = gradients[0][1].shape[1]
    return ids, np.array([sums[row_id] for row_id in ids.tolist()], np.float32).reshape(ids.size, dim)


def unscaled(sums: Float32s, factors: Factors) -> Float32s:
    """Returns sums times float32(1 / grad_scale); what the refusal rule looks at."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sums * np.float32(factors.unscale)


def is_refused(values: Float32s) -> bool:
    """Returns whether unscaled sums may not be applied."""
    return not bool((np.abs(values) < np.float32(LIMIT)).all())
