"""How a shard's own status is said to an operator, by `shardam status`, REST and the console in the same words."""

from __future__ import annotations

from collections.abc import Mapping

from shardam_proto.registry import lost_shard_words
from shardam_proto.v1 import job_pb2, shard_pb2

LOST = "lost"
DEGRADED = "degraded"

STATES: Mapping[shard_pb2.ServingState.ValueType, str] = {
    shard_pb2.SERVING_STATE_STARTING: "starting",
    shard_pb2.SERVING_STATE_SERVING: "serving",
    shard_pb2.SERVING_STATE_DRAINING: "draining",
    shard_pb2.SERVING_STATE_LOST: LOST,
    shard_pb2.SERVING_STATE_SUSPENDED: "suspended",
}

JOURNAL_MODES: Mapping[shard_pb2.JournalMode.ValueType, str] = {
    shard_pb2.JOURNAL_MODE_OFF: "off",
    shard_pb2.JOURNAL_MODE_WRITE: "write",
    shard_pb2.JOURNAL_MODE_FSYNC: "fsync",
}

JOURNAL_STATES: Mapping[shard_pb2.JournalState.ValueType, str] = {
    shard_pb2.JOURNAL_STATE_OK: "ok",
    shard_pb2.JOURNAL_STATE_SUSPENDED: DEGRADED,  # "suspended" is a state of the shard
    shard_pb2.JOURNAL_STATE_FULL: "full",
    shard_pb2.JOURNAL_STATE_FAILED: "failed",
}

_BLOCKED = {
    shard_pb2.JOURNAL_STATE_FULL: ("JOURNAL_FULL", "the disk of its journal is full", "make room on it"),
    shard_pb2.JOURNAL_STATE_FAILED: ("JOURNAL_FAILED", "its journal failed", "start the shard again"),
}
"""States of a journal in which the shard takes no changes: reason, what happened, what to do if the shard does not say it."""


def state_word(status: shard_pb2.GetStatusResponse) -> str:
    """Returns the state in one word; "unknown" for one of a newer version."""
    return STATES.get(status.state, "unknown")


def problem_of(index: int, status: shard_pb2.GetStatusResponse) -> tuple[str, str] | None:
    """Says why a shard does not take pulls and changes now.

    Args:
        index: its index.
        status: its own answer.

    Returns:
        A reason of shardam_proto.errors, and words that follow the shard's name; None: it takes both.
    """
    if status.state == shard_pb2.SERVING_STATE_LOST:
        return "SHARD_LOST", lost_shard_words(index)
    if status.state == shard_pb2.SERVING_STATE_SUSPENDED:
        return "NOT_READY", (
            "is suspended: it was paused beyond half of its lease and waits until Redis confirms that its name is its own"
        )
    if status.state != shard_pb2.SERVING_STATE_SERVING:
        waits = f" and waits for {status.waiting_for}" if status.waiting_for else ""
        return "NOT_READY", f"is {state_word(status)}{waits}"
    if status.journal_state in _BLOCKED:
        reason, what, remedy = _BLOCKED[status.journal_state]
        return reason, f"takes no changes: {what}; {status.journal_problem or remedy}"
    return None


def warning_of(status: shard_pb2.GetStatusResponse) -> str | None:
    """Says what an operator should know of a shard that serves; None: nothing. The words follow the shard's name."""
    warnings = [words for words in (_journal_warning(status), _checkpoint_warning(status)) if words]
    return "; it ".join(warnings) or None


def _journal_warning(status: shard_pb2.GetStatusResponse) -> str:
    if status.journal_state == shard_pb2.JOURNAL_STATE_SUSPENDED:
        return (
            "is DEGRADED: changes are acknowledged without its journal, and a crash would lose them; "
            f"{status.journal_problem or 'make room on the disk of its journal'}"
        )
    return status.journal_problem if status.journal_state not in _BLOCKED else ""


def _checkpoint_warning(status: shard_pb2.GetStatusResponse) -> str:
    """What keeps checkpoints from being written, and that the last one failed; training goes on all the same."""
    if status.checkpoint_problem:
        return f"cannot write checkpoints: {status.checkpoint_problem}"
    last = status.last_checkpoint
    if last.state == job_pb2.JOB_STATE_FAILED:
        return f"could not make the last checkpoint ({last.reason or 'INTERNAL'}): {last.problem}"
    return ""
