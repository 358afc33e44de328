"""Clocks of a bounded group's members on one shard: how many steps each has made there (PROTOCOL.md, section 5)."""

from __future__ import annotations

from shardam_proto.errors import GroupMismatch
from shardam_proto.v1 import common_pb2
from shardam_server.shard.groups.values import Group, Member
from shardam_server.shard.state import ShardState


def clock_of(state: ShardState, member: Member) -> int:
    """Returns a member's clock: its pushes here, applied, skipped or voided, and the clock it joined with."""
    entry = state.clients.find(member.client_id)
    return max(0 if entry is None else entry.clock, member.first_step - 1)


def slowest_clock(state: ShardState, group: Group) -> int:
    """Returns the lowest clock of a group that has members; ranks that are still to come stand where its first one began."""
    clocks = [clock_of(state, member) for member in group.members]
    if group.missing_ranks():
        clocks.append(min(member.first_step for member in group.members) - 1)
    return min(clocks)


def ranks_behind(state: ShardState, group: Group, member: Member) -> tuple[list[int], list[int]]:
    """Returns the ranks that a training pull of a member waits for here, ascending; and of these those still to come."""
    clock, bound = clock_of(state, member), group.terms.max_staleness
    late = [one.rank for one in group.members if clock - clock_of(state, one) > bound]
    absent = group.missing_ranks()
    if absent and clock - (min(one.first_step for one in group.members) - 1) <= bound:
        absent = []
    return sorted({*late, *absent}), absent


def check_clock_of_push(state: ShardState, header: common_pb2.RequestHeader) -> None:
    """Checks that a push, or the close of one, brings the clock of a bounded group's member forward by one.

    Raises:
        NotAMember: it names a step, and its client is a member of no group.
        GroupMismatch: its step is not the next one of its client.
    """
    found = state.groups.of_client(header.client_id)
    if found is None and header.step:
        found = state.groups.require_member(header.client_id)  # raises
    if found is None or found[0].group.terms.mode != "bounded":
        return
    group, member = found[0].group, found[1]
    clock, step = clock_of(state, member), header.step
    if step != clock + 1:
        raise GroupMismatch(
            f"rank {member.rank} of group {group.name!r} ({group.terms}) is at clock {clock} here, so its next push is step "
            f"{clock + 1}; this one says {step}",
            metadata={"group": group.name, "rank": str(member.rank), "clock": str(clock), "step": str(step)},
        )
