"""Reasons, their gRPC code, HTTP status, retry rule and exception class: the one table (PROTOCOL.md, section 12).

The core raises these exceptions; the gRPC and REST fronts translate them by the table; nobody parses text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import grpc


class ShardamError(Exception):
    """Base of every error that shardam raises on purpose.

    Args:
        message: what was wrong, with which value, and what to do.
        reason: stable UPPER_SNAKE reason; only for classes that stand for several.
        metadata: the values of the message, by name, as strings (`table`, `row_ids`, `shard`, ...).
    """

    reason: str = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.metadata: dict[str, str] = dict(metadata or {})

    @property
    def rule(self) -> ReasonRule:
        """The row of the table for this error's reason."""
        return REASONS[self.reason]


class InvalidArgument(ShardamError, ValueError):
    """An argument is wrong whatever the state of the cluster; nothing was changed."""


class WrongShape(InvalidArgument):
    """Ids, rows or gradients have shapes that do not fit each other or the table."""

    reason = "WRONG_SHAPE"


class WrongIdDtype(InvalidArgument):
    """Ids are not integers that fit int64."""

    reason = "ID_DTYPE"


class BadOption(InvalidArgument):
    """A schema, optimizer or call option is unknown, out of range or not supported."""

    reason = "BAD_OPTION"


class NonFiniteGradient(InvalidArgument):
    """A merged, unscaled gradient value is NaN or at least 2**64 in magnitude."""

    reason = "NON_FINITE_GRADIENT"


class NonFiniteState(InvalidArgument):
    """A weight or moment to be written is not finite, or exp_avg_sq is negative."""

    reason = "NON_FINITE_STATE"


class TooManyIds(InvalidArgument):
    """More ids than one request may name."""

    reason = "TOO_MANY_IDS"


class MessageTooLarge(InvalidArgument):
    """A part does not fit the largest message."""

    reason = "MESSAGE_TOO_LARGE"


class IdOutOfRange(ShardamError, IndexError):
    """An id lies outside a bounded table."""

    reason = "ID_OUT_OF_RANGE"


class NotFound(ShardamError, LookupError):
    """What was asked for does not exist."""


class UnknownTable(NotFound):
    """No table of this name or id."""

    reason = "UNKNOWN_TABLE"


class UnknownRow(NotFound):
    """The row does not exist."""

    reason = "UNKNOWN_ROW"


class SchemaMismatch(ShardamError):
    """A table of this name exists with another schema."""

    reason = "SCHEMA_MISMATCH"


class StaleState(ShardamError):
    """The caller's view of the cluster is old; it refreshes and tries again (STALE_ROUTE, SEQUENCE_GAP, ...)."""

    reason = "STALE_ROUTE"


class ClusterRestored(ShardamError):
    """The cluster was restored from a checkpoint; this client belongs to the timeline before it."""

    reason = "STALE_TIMELINE"


class WrongCluster(ShardamError):
    """The process at this address belongs to another cluster or is another shard."""

    reason = "WRONG_CLUSTER"


class ClientClosed(ShardamError):
    """The shard does not know this client, or the client was closed (UNKNOWN_CLIENT, CLIENT_CLOSED)."""

    reason = "CLIENT_CLOSED"


class SequenceError(ShardamError):
    """A number was used again with another content, or is too old to be answered (SEQUENCE_REUSED, SEQUENCE_EXPIRED)."""

    reason = "SEQUENCE_REUSED"


class VersionMismatch(ShardamError):
    """Client and shard have no protocol version in common, or a file has one that this program does not know."""

    reason = "VERSION_MISMATCH"


class NotAMember(ShardamError):
    """The client is not a member of the group it names."""

    reason = "NOT_A_MEMBER"


class GroupMismatch(ShardamError):
    """Members of a group disagree: another mode, world size or reduction, a rank that is taken, other hyper-parameters."""

    reason = "GROUP_MISMATCH"


class StepTimeout(ShardamError):
    """A step of a sync group was given up because a rank did not arrive; the message names it."""

    reason = "STEP_TIMEOUT"


class ShardLost(ShardamError):
    """A shard lost state that this client had seen acknowledged; the client neither pulls nor pushes again.

    Attributes:
        acknowledged: last number that the shard had acknowledged to this client.
        has: last number of this client that the shard has now.
    """

    reason = "SHARD_LOST"

    def __init__(self, message: str, *, acknowledged: int = 0, has: int = 0, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message, metadata={**(metadata or {}), "acknowledged": str(acknowledged), "has": str(has)})
        self.acknowledged = acknowledged
        self.has = has


class EtagMismatch(ShardamError):
    """The row has changed since its ETag was read."""

    reason = "ETAG_MISMATCH"


class ResourceExhausted(ShardamError):
    """A limit of a shard was reached; nothing was changed."""


class QueueFull(ResourceExhausted):
    """The shard's queue of changes is full; try again later."""

    reason = "QUEUE_FULL"


class RowLimit(ResourceExhausted):
    """The change would create more rows than the shard or the table may hold."""

    reason = "ROW_LIMIT"


class OutOfMemory(ResourceExhausted):
    """The shard's device has no memory left for the change."""

    reason = "OUT_OF_MEMORY"


class JournalFull(ResourceExhausted):
    """The disk of the shard's journal is full, and the shard was told to refuse changes then; nothing was changed."""

    reason = "JOURNAL_FULL"


class Unavailable(ShardamError):
    """A process that is needed does not answer now."""


class ShardNotReady(Unavailable):
    """The shard is alive but does not serve (starting or draining)."""

    reason = "NOT_READY"


class ShardUnreachable(Unavailable):
    """The shard did not answer within the time allowed."""

    reason = "SHARD_UNREACHABLE"


class RedisUnreachable(Unavailable):
    """Redis did not answer within the time allowed."""

    reason = "REDIS_UNREACHABLE"


class JournalFailed(Unavailable):
    """The shard's journal cannot be trusted any more: no more changes until the shard is started again."""

    reason = "JOURNAL_FAILED"


class JournalDamaged(ShardamError):
    """A journal, a base or its folder cannot be read as it was written; the shard does not start with it."""

    reason = "JOURNAL_DAMAGED"


class UnknownCheckpoint(NotFound):
    """No checkpoint, job or addition to a checkpoint of this name."""

    reason = "UNKNOWN_CHECKPOINT"


class CheckpointMismatch(ShardamError):
    """A checkpoint does not fit the cluster: tables are missing or unexpected, or it would replace a state."""

    reason = "CHECKPOINT_MISMATCH"


class CheckpointDamaged(ShardamError):
    """A file of a checkpoint is missing, too short, or not as it was written; the message names it."""

    reason = "CHECKPOINT_DAMAGED"


class CheckpointFailed(Unavailable):
    """A checkpoint could not be made; training goes on, and the former checkpoints are as they were."""

    reason = "CHECKPOINT_FAILED"


class CheckpointRunning(Unavailable):
    """Another job of this cluster's checkpoints has to end first."""

    reason = "CHECKPOINT_RUNNING"


class ReadOnly(ShardamError):
    """The table was restored for reading alone."""

    reason = "READ_ONLY"


class BadToken(ShardamError):
    """The token is missing or wrong."""

    reason = "BAD_TOKEN"


class WrongRole(ShardamError):
    """The token does not allow this call."""

    reason = "WRONG_ROLE"


HTTP_OF_CODE: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
}
"""The canonical map of google.rpc.Code to HTTP."""


@dataclasses.dataclass(frozen=True)
class ReasonRule:
    """What a reason means on every front.

    Attributes:
        code: gRPC status code.
        error: exception class that stands for it.
        retryable: True: the same request may succeed later, or after a refresh.
        http_status: set only where it differs from the canonical map.
    """

    code: grpc.StatusCode
    error: type[ShardamError]
    retryable: bool = False
    http_status_override: int | None = None

    @property
    def http_status(self) -> int:
        """HTTP status of the reason."""
        return self.http_status_override or HTTP_OF_CODE[self.code]


_Code = grpc.StatusCode

REASONS: Mapping[str, ReasonRule] = {
    "WRONG_SHAPE": ReasonRule(_Code.INVALID_ARGUMENT, WrongShape),
    "ID_DTYPE": ReasonRule(_Code.INVALID_ARGUMENT, WrongIdDtype),
    "BAD_OPTION": ReasonRule(_Code.INVALID_ARGUMENT, BadOption),
    "NON_FINITE_GRADIENT": ReasonRule(_Code.INVALID_ARGUMENT, NonFiniteGradient),
    "NON_FINITE_STATE": ReasonRule(_Code.INVALID_ARGUMENT, NonFiniteState),
    "TOO_MANY_IDS": ReasonRule(_Code.INVALID_ARGUMENT, TooManyIds, http_status_override=413),
    "MESSAGE_TOO_LARGE": ReasonRule(_Code.INVALID_ARGUMENT, MessageTooLarge, http_status_override=413),
    "ID_OUT_OF_RANGE": ReasonRule(_Code.OUT_OF_RANGE, IdOutOfRange),
    "UNKNOWN_TABLE": ReasonRule(_Code.NOT_FOUND, UnknownTable),
    "UNKNOWN_ROW": ReasonRule(_Code.NOT_FOUND, UnknownRow),
    "SCHEMA_MISMATCH": ReasonRule(_Code.ALREADY_EXISTS, SchemaMismatch),
    "STALE_ROUTE": ReasonRule(_Code.ABORTED, StaleState, retryable=True),
    "NEW_INCARNATION": ReasonRule(_Code.ABORTED, StaleState, retryable=True),
    "SEQUENCE_GAP": ReasonRule(_Code.ABORTED, StaleState, retryable=True),
    "STALE_TIMELINE": ReasonRule(_Code.FAILED_PRECONDITION, ClusterRestored),
    "WRONG_CLUSTER": ReasonRule(_Code.FAILED_PRECONDITION, WrongCluster),
    "UNKNOWN_CLIENT": ReasonRule(_Code.FAILED_PRECONDITION, ClientClosed),
    "CLIENT_CLOSED": ReasonRule(_Code.FAILED_PRECONDITION, ClientClosed),
    "SEQUENCE_REUSED": ReasonRule(_Code.FAILED_PRECONDITION, SequenceError),
    "SEQUENCE_EXPIRED": ReasonRule(_Code.FAILED_PRECONDITION, SequenceError),
    "VERSION_MISMATCH": ReasonRule(_Code.FAILED_PRECONDITION, VersionMismatch),
    "NOT_A_MEMBER": ReasonRule(_Code.FAILED_PRECONDITION, NotAMember),
    "GROUP_MISMATCH": ReasonRule(_Code.FAILED_PRECONDITION, GroupMismatch),
    "STEP_TIMEOUT": ReasonRule(_Code.DEADLINE_EXCEEDED, StepTimeout),
    "SHARD_LOST": ReasonRule(_Code.FAILED_PRECONDITION, ShardLost),
    "ETAG_MISMATCH": ReasonRule(_Code.FAILED_PRECONDITION, EtagMismatch, http_status_override=412),
    "QUEUE_FULL": ReasonRule(_Code.RESOURCE_EXHAUSTED, QueueFull, retryable=True),
    "ROW_LIMIT": ReasonRule(_Code.RESOURCE_EXHAUSTED, RowLimit),
    "OUT_OF_MEMORY": ReasonRule(_Code.RESOURCE_EXHAUSTED, OutOfMemory),
    "JOURNAL_FULL": ReasonRule(_Code.RESOURCE_EXHAUSTED, JournalFull, retryable=True),
    "NOT_READY": ReasonRule(_Code.UNAVAILABLE, ShardNotReady, retryable=True),
    "SHARD_UNREACHABLE": ReasonRule(_Code.UNAVAILABLE, ShardUnreachable, retryable=True),
    "REDIS_UNREACHABLE": ReasonRule(_Code.UNAVAILABLE, RedisUnreachable, retryable=True),
    "JOURNAL_FAILED": ReasonRule(_Code.UNAVAILABLE, JournalFailed, retryable=True),
    "JOURNAL_DAMAGED": ReasonRule(_Code.FAILED_PRECONDITION, JournalDamaged),
    "UNKNOWN_CHECKPOINT": ReasonRule(_Code.NOT_FOUND, UnknownCheckpoint),
    "CHECKPOINT_MISMATCH": ReasonRule(_Code.FAILED_PRECONDITION, CheckpointMismatch, http_status_override=409),
    "CHECKPOINT_DAMAGED": ReasonRule(_Code.FAILED_PRECONDITION, CheckpointDamaged),
    "CHECKPOINT_FAILED": ReasonRule(_Code.UNAVAILABLE, CheckpointFailed, retryable=True),
    "CHECKPOINT_RUNNING": ReasonRule(_Code.UNAVAILABLE, CheckpointRunning, retryable=True, http_status_override=409),
    "HOLD_EXPIRED": ReasonRule(_Code.ABORTED, StaleState, retryable=True),
    "READ_ONLY": ReasonRule(_Code.FAILED_PRECONDITION, ReadOnly),
    "BAD_TOKEN": ReasonRule(_Code.UNAUTHENTICATED, BadToken),
    "WRONG_ROLE": ReasonRule(_Code.PERMISSION_DENIED, WrongRole),
    "INTERNAL": ReasonRule(_Code.INTERNAL, ShardamError),
}
"""reason -> rule. Later work adds rows, and never renames one."""


def make_error(reason: str, message: str, metadata: Mapping[str, str]) -> ShardamError:
    """Builds the exception of a reason; a reason of a newer version becomes a plain ShardamError."""
    rule = REASONS.get(reason)
    if rule is None:
        return ShardamError(f"{message} (reason {reason})", metadata=metadata)
    if rule.error is ShardLost:
        return ShardLost(
            message, acknowledged=int(metadata.get("acknowledged", 0)), has=int(metadata.get("has", 0)), metadata=metadata
        )
    return rule.error(message, reason=reason, metadata=metadata)
