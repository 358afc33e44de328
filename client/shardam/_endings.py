"""Which errors end a client, and what it is told then."""

from __future__ import annotations

import dataclasses

import grpc

from shardam._group import GroupOptions
from shardam_proto.errors import ClientClosed, NotAMember, ShardamError, ShardLost, make_error

_FINAL_CODES = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
"""After these this client can do nothing on the cluster; a new one may."""

_NOT_FINAL = frozenset({"ETAG_MISMATCH", "WRONG_CLUSTER", "NOT_A_MEMBER"})
"""Of these codes, but no end: refusals of one change, NOT_A_MEMBER because a sync group trains to which this client never
belonged; and a stranger at the shard's address, while Redis has the right one."""

_OUTSIDE = frozenset({"NOT_A_MEMBER", "CLIENT_CLOSED", "UNKNOWN_CLIENT"})
"""What a member is told once it has been dropped from its group."""

CONNECT_AGAIN = "Connect again, and train on from what that reads"


def ends_client(error: ShardamError, *, is_member: bool = False) -> bool:
    """True: after this error of a shard the client can neither read nor write any more.

    Args:
        error: what the shard answered.
        is_member: the client has joined a group.
    """
    if is_member and error.reason in _OUTSIDE:
        return True
    return error.rule.code in _FINAL_CODES and error.reason not in _NOT_FINAL


def copy_of(error: ShardamError) -> ShardamError:
    """Returns the same error to be raised once more: a raised one keeps what it has passed through alive."""
    return make_error(error.reason, error.message, error.metadata)


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a client has to say for itself when a shard's answer ends it.

    Attributes:
        acknowledged: last number of it that the shard has answered.
        lease_s: silence after which home closes it.
        place: its place in a group; None: it has joined none.
    """

    acknowledged: int
    lease_s: float
    place: GroupOptions | None = None


def as_ending(error: ShardamError, peer: str, standing: Standing) -> ShardamError:
    """Returns the error that ends a client with what to do about it.

    Args:
        error: what the shard answered.
        peer: the shard's name in messages.
        standing: the client's.
    """
    silence = (
        f"Home closes a client that is silent for {standing.lease_s:g} s; this process or its machine may have been paused, or "
        "cut off, for longer"
    )
    place = standing.place
    if place is not None and error.reason in _OUTSIDE:
        return NotAMember(
            f"{place} has been dropped: {peer} takes nothing more from this client: {error.message}. {silence}; or a restarted "
            "worker has taken the rank. Call cluster.rejoin() to go on at the group's next step, or connect again",
            metadata={**error.metadata, "group": place.name, "rank": str(place.rank)},
        )
    match error.reason:
        case "SHARD_LOST" if isinstance(error, ShardLost) and not error.acknowledged:  # the shard cannot know it
            return ShardLost(error.message, acknowledged=standing.acknowledged, has=0, metadata=error.metadata)
        case "CLIENT_CLOSED" | "UNKNOWN_CLIENT":
            return ClientClosed(
                f"{peer} takes nothing more from this client: {error.message}. {silence}. {CONNECT_AGAIN}",
                reason=error.reason,
                metadata=error.metadata,
            )
    return error
