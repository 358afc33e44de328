"""Who is in a group: joining, taking a rank over, leaving. Pure; home decides by it, and tells the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from shardam_proto.errors import BadOption, GroupMismatch
from shardam_server.shard.clients import MAX_CLIENTS
from shardam_server.shard.groups.values import Decision, Group, GroupTerms, Member

MAX_WORLD_SIZE = MAX_CLIENTS
"""Ranks of a group at most: a shard keeps no more clients by default, and looks through the ranks that a group waits for."""


@dataclasses.dataclass(frozen=True)
class JoinRequest:
    """What a client asks for.

    Attributes:
        client_id: the client.
        group: the group's name.
        terms: what it takes the group to have agreed on.
        rank: its rank.
        restart_count: how often its launcher has restarted it.
    """

    client_id: bytes
    group: str
    terms: GroupTerms
    rank: int
    restart_count: int = 0


@dataclasses.dataclass(frozen=True)
class Joined:
    """The group with its new member.

    Attributes:
        group: as it is now; the same object if the client was a member already.
        superseded: clients whose place it takes, to be closed.
    """

    group: Group
    superseded: tuple[bytes, ...] = ()


def join(
    group: Group | None, others: Iterable[Group], request: JoinRequest, first_step: int, silences: Mapping[bytes, float]
) -> Joined:
    """Adds a member to a group, or makes the group.

    Args:
        group: of the name asked for; None: there is none yet.
        others: all other groups.
        request: who asks.
        first_step: where it begins; see Member.
        silences: client id -> seconds since home heard of it, for the members.

    Raises:
        BadOption: the group has no name, too many ranks, or the rank does not fit the world size.
        GroupMismatch: the group has agreed on other terms, the rank is taken, or another group is in the way. The metadata's
            silence_s says when home last heard of the member that is: it may be gone, and dropped soon.
    """
    terms = request.terms
    if not request.group:
        raise BadOption("a group needs a name; leave group= out for the usual one")
    if terms.world_size > MAX_WORLD_SIZE:
        raise BadOption(f"world_size must be at most {MAX_WORLD_SIZE}, got {terms.world_size}")
    if not 0 <= request.rank < terms.world_size:
        raise BadOption(f"rank must be 0 to world_size - 1 = {terms.world_size - 1}, got {request.rank}")
    _check_others(others, request, silences)
    if group is None or not group.members:
        version = 0 if group is None else group.version
        group = Group(request.group, terms, version)
    elif group.member(request.client_id) is not None:
        return _again(group, request, silences)
    group, superseded = _make_way(group, request, silences)
    member = Member(request.rank, request.client_id, request.restart_count, first_step)
    members = tuple(sorted((*group.members, member), key=lambda one: one.rank))
    joined = dataclasses.replace(group, version=group.version + 1, members=members)
    return Joined(_completed(joined), superseded)


def _check_others(others: Iterable[Group], request: JoinRequest, silences: Mapping[bytes, float]) -> None:
    for other in others:
        if other.member(request.client_id) is not None:
            raise _mismatch(
                f"client {request.client_id.hex()} is in group {other.name!r} already; connect once for each group",
                other.members,
                silences,
            )
        if other.members and "sync" in (other.terms.mode, request.terms.mode):
            raise _mismatch(
                f"group {other.name!r} ({other.terms}) has members, and beside a sync group there is no other; use its name, "
                "or wait until its members have left",
                other.members,
                silences,
            )


def _again(group: Group, request: JoinRequest, silences: Mapping[bytes, float]) -> Joined:
    member = group.member(request.client_id)
    if member is None or member.rank != request.rank or group.terms != request.terms:
        raise _mismatch(
            f"client {request.client_id.hex()} is in group {group.name!r} ({group.terms}) already, with another rank or other "
            "terms; connect again",
            group.members,
            silences,
        )
    return Joined(group)


def _make_way(group: Group, request: JoinRequest, silences: Mapping[bytes, float]) -> tuple[Group, tuple[bytes, ...]]:
    """Takes out the members in whose place the new one comes."""
    newer = all(member.restart_count < request.restart_count for member in group.members)
    if group.members and group.terms != request.terms:
        if not newer:
            raise _mismatch(
                f"group {request.group!r} trains in {group.terms}, this worker asks for {request.terms}; all members ask for "
                "the same mode, reduce and world_size",
                group.members,
                silences,
            )
        # The launcher has started the whole group again, with other terms: its former members are gone.
        return Group(group.name, request.terms, group.version), tuple(member.client_id for member in group.members)
    holder = next((member for member in group.members if member.rank == request.rank), None)
    if holder is None:
        return group, ()
    if holder.restart_count >= request.restart_count:
        raise _mismatch(
            f"rank {request.rank} of group {group.name!r} is taken by client {holder.client_id.hex()}, of which home heard "
            f"{silences.get(holder.client_id, 0.0):.1f} s ago; give each worker a rank of its own, or close that one first. "
            "One that is gone is dropped after --client-lease-s, or at once when its launcher counts restarts "
            "(TORCHELASTIC_RESTART_COUNT)",
            (holder,),
            silences,
        )
    members = tuple(member for member in group.members if member is not holder)
    return dataclasses.replace(group, members=members), (holder.client_id,)


def _completed(group: Group) -> Group:
    """Notes that all ranks are there."""
    if len(group.members) < group.terms.world_size:
        return group
    oldest = min(member.restart_count for member in group.members)
    return dataclasses.replace(group, complete_restart_count=max(group.complete_restart_count, oldest))


def stepped(group: Group, decision: Decision) -> Group:
    """Notes who has made a step together; the same object if nothing follows from it.

    A member that steps a second time beside an older one was restarted on its own: from then on it waits for nobody, whoever
    goes. Its first step tells nothing, since the older one may have arrived for it before the whole group was restarted; nor
    does a refused step, which may lack ranks.
    """
    if decision.end == "refused":
        return group
    members = {member.client_id: member for member in group.members}
    counted = [members[one.client_id] for one in decision.contributions if one.client_id in members]
    settled = [member.restart_count for member in counted if member.first_step < decision.step]
    complete = max((group.complete_restart_count, *settled))
    return group if complete == group.complete_restart_count else dataclasses.replace(group, complete_restart_count=complete)


def leave(group: Group, client_id: bytes) -> Group:
    """Takes a member out; the same object if it is none."""
    members = tuple(member for member in group.members if member.client_id != client_id)
    if len(members) == len(group.members):
        return group
    return dataclasses.replace(group, version=group.version + 1, members=members)


def _mismatch(message: str, members: Iterable[Member], silences: Mapping[bytes, float]) -> GroupMismatch:
    silence_s = min((silences.get(member.client_id, 0.0) for member in members), default=0.0)
    return GroupMismatch(message, metadata={"silence_s": f"{silence_s:.3f}"})
