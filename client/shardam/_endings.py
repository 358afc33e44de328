"""Which errors end a client, and what it is told then."""

from __future__ import annotations

import grpc

from shardam_proto.errors import ClientClosed, ShardamError, ShardLost, make_error

_FINAL_CODES = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
"""After these this client can do nothing on the cluster; a new one may."""

_NOT_FINAL = frozenset({"ETAG_MISMATCH", "WRONG_CLUSTER"})
"""Of these codes, but no end: a refusal of one change; and a stranger at the shard's address, while Redis has the right one."""

CONNECT_AGAIN = "Connect again, and train on from what that reads"


def ends_client(error: ShardamError) -> bool:
    """True: after this error of a shard the client can neither read nor write any more."""
    return error.rule.code in _FINAL_CODES and error.reason not in _NOT_FINAL


def copy_of(error: ShardamError) -> ShardamError:
    """Returns the same error to be raised once more: a raised one keeps what it has passed through alive."""
    return make_error(error.reason, error.message, error.metadata)


def as_ending(error: ShardamError, peer: str, acknowledged: int, lease_s: float) -> ShardamError:
    """Returns the error that ends a client with what to do about it.

    Args:
        error: what the shard answered.
        peer: the shard's name in messages.
        acknowledged: last number of this client that the shard has answered.
        lease_s: silence after which home closes a client.
    """
    match error.reason:
        case "SHARD_LOST" if isinstance(error, ShardLost) and not error.acknowledged:  # the shard cannot know it
            return ShardLost(error.message, acknowledged=acknowledged, has=0, metadata=error.metadata)
        case "CLIENT_CLOSED" | "UNKNOWN_CLIENT":
            return ClientClosed(
                f"{peer} takes nothing more from this client: {error.message}. Home closes a client that is silent for "
                f"{lease_s:g} s; this process or its machine may have been paused, or cut off, for longer. {CONNECT_AGAIN}",
                reason=error.reason,
                metadata=error.metadata,
            )
    return error
