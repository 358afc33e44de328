"""The shards of the cluster and whether they serve, as Redis and the shards themselves say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardam_proto.errors import ShardamError, ShardNotReady
from shardam_proto.registry import ClusterView, ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.cluster import waiting_for
from shardam_server.admin.encoding import Json
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.shard_words import JOURNAL_MODES, JOURNAL_STATES, problem_of, state_word, warning_of

STATUS_TIMEOUT_S = 2.0
"""A status call does no work: a shard that takes longer is shown as unreachable, and the page stays quick."""

_REFUSALS = frozenset({"WRONG_ROLE", "VERSION_MISMATCH"})
"""Beside BAD_TOKEN, reasons of a shard that is there and does not answer this process."""

HOME = 0
"""Index of the shard that makes checkpoints."""

Status = shard_pb2.GetStatusResponse | ShardamError


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """A shard as an operator is told of it.

    Attributes:
        state: one of the words of ShardModel.
        reason: reason of shardam_proto.errors why it does not serve; None: it serves.
        problem: the same in words.
        warning: what else an operator should know; None: nothing.
    """

    state: str
    reason: str | None = None
    problem: str | None = None
    warning: str | None = None


def ask_statuses(calls: ShardCalls, shards: Sequence[int], request_id: int) -> dict[int, Status]:
    """Asks shards for their status; before the cluster has formed every answer is the error that says so."""
    requests = {shard: shard_pb2.GetStatusRequest() for shard in shards}
    timeout_s = min(STATUS_TIMEOUT_S, calls.timeout_s)
    try:
        return calls.call_many(requests, lambda stubs: stubs.shard.GetStatus, request_id, timeout_s)
    except ShardNotReady as error:
        return dict.fromkeys(shards, error)


def report_shard(shard: int, entry: ShardEntry | None, status: Status) -> ShardReport:
    """Says how a shard is."""
    if isinstance(status, ShardamError):
        return _report_silence(shard, entry, status)
    problem, warning = problem_of(shard, status), warning_of(status)
    reason, words = problem if problem is not None else (None, None)
    return ShardReport(
        state_word(status),
        reason,
        None if words is None else f"shard {shard} {words}",
        None if warning is None else f"shard {shard} {warning}",
    )


def _report_silence(shard: int, entry: ShardEntry | None, error: ShardamError) -> ShardReport:
    if entry is None:
        return ShardReport("missing", error.reason, error.message)
    if error.reason == "BAD_TOKEN":
        return ShardReport("refused", error.reason, error.message)  # the same words for every shard
    if error.reason in _REFUSALS:
        return ShardReport("refused", error.reason, f"shard {shard} refuses to answer: {error.message}")
    state = "unreachable" if entry.ready else "starting"
    return ShardReport(state, error.reason, f"shard {shard} does not answer: {error.message}")


def shard_to_json(shard: int, entry: ShardEntry | None, status: Status) -> Json:
    """Returns a shard as /v1/shards shows it."""
    reached = None if isinstance(status, ShardamError) else status
    report = report_shard(shard, entry, status)
    known: dict[str, Json] = {
        "shard": shard,
        "state": report.state,
        "waiting_for": (reached.waiting_for or None) if reached else None,
        "reason": report.reason,
        "problem": report.problem,
        "warning": report.warning,
        "registered": entry is not None,
        "address": entry.address if entry else None,
        "http_address": entry.http_address if entry else None,
        "device": entry.device if entry else None,
        "pid": entry.pid if entry else None,
        "incarnation": str(entry.incarnation) if entry else None,
        "lineage": str(entry.lineage) if entry else None,
    }
    return known if reached is None else {**known, **_status_to_json(reached)}


def _status_to_json(status: shard_pb2.GetStatusResponse) -> dict[str, Json]:
    return {
        "version": status.version,
        "host_name": status.host_name,
        "uptime_s": round(status.uptime_s, 3),
        "timeline": status.header.timeline,
        "epoch": status.header.epoch,
        "change_number": str(status.header.change_number),
        "num_tables": status.num_tables,
        "num_rows": status.num_rows,
        "max_rows": status.max_rows,
        "record_bytes": status.record_bytes,
        "index_bytes": status.index_bytes,
        "resident_bytes": status.resident_bytes,
        "device_memory_bytes": status.device_memory_bytes,
        "queue_depth": status.queue_depth,
        "queue_bytes": status.queue_bytes,
        "reserved_bytes": status.reserved_bytes,
        "parked_requests": status.parked_requests,
        "num_clients": status.num_clients,
        "journal_mode": JOURNAL_MODES.get(status.journal_mode),
        "journal_state": JOURNAL_STATES.get(status.journal_state),
        "journal_problem": status.journal_problem or None,
        "journal_bytes": status.journal_bytes,
        "data_folder": status.data_folder or None,
        "checkpoint_root": status.checkpoint_root or None,
        "checkpoint_problem": status.checkpoint_problem or None,
        "pre_image_bytes": status.pre_image_bytes,
    }


@dataclasses.dataclass(frozen=True)
class Readiness:
    """Whether every row can be read and changed.

    Attributes:
        view: what Redis says of the cluster.
        missing: what is missing, one sentence each; empty: nothing.
        warnings: what an operator should know all the same.
        home: the status of home, which knows of checkpoints; None: it does not answer.
    """

    view: ClusterView
    missing: list[str]
    warnings: list[str]
    home: shard_pb2.GetStatusResponse | None = None


def check_readiness(calls: ShardCalls, request_id: int) -> Readiness:
    """Finds out what is missing before every row can be read and changed.

    Raises:
        RedisUnreachable: Redis has not answered once since this process started.
    """
    view = calls.reader.view()
    if view.entry is None or view.route_map is None:
        return Readiness(view, waiting_for(view, calls.reader.cluster), [])
    # A registered shard may have died since: only its own answer says that it serves, and says more than Redis why not.
    statuses = ask_statuses(calls, range(view.entry.num_shards), request_id)
    reports = [report_shard(shard, view.shards.get(shard), status) for shard, status in statuses.items()]
    # A wrong token is refused by all shards alike: once is enough.
    problems = dict.fromkeys(report.problem for report in reports if report.problem is not None)
    warnings = [report.warning for report in reports if report.warning is not None]
    home = statuses[HOME]
    return Readiness(view, list(problems), warnings, None if isinstance(home, ShardamError) else home)
