"""The shards of the cluster and whether they serve, as Redis and the shards themselves say."""

from __future__ import annotations

from collections.abc import Sequence

from shardam_proto.errors import RedisUnreachable, ShardamError, ShardNotReady
from shardam_proto.registry import ClusterView, ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.cluster import waiting_for
from shardam_server.admin.encoding import Json
from shardam_server.admin.shard_calls import ShardCalls

STATUS_TIMEOUT_S = 2.0
"""A status call does no work: a shard that takes longer is shown as unreachable, and the page stays quick."""

_STATES = {
    shard_pb2.SERVING_STATE_STARTING: "starting",
    shard_pb2.SERVING_STATE_SERVING: "serving",
    shard_pb2.SERVING_STATE_DRAINING: "draining",
}

Status = shard_pb2.GetStatusResponse | ShardamError


def ask_statuses(calls: ShardCalls, shards: Sequence[int], request_id: int) -> dict[int, Status]:
    """Asks shards for their status; before the cluster has formed every answer is the error that says so."""
    requests = {shard: shard_pb2.GetStatusRequest() for shard in shards}
    timeout_s = min(STATUS_TIMEOUT_S, calls.timeout_s)
    try:
        return calls.call_many(requests, lambda stubs: stubs.shard.GetStatus, request_id, timeout_s)
    except ShardNotReady as error:
        return dict.fromkeys(shards, error)


def shard_to_json(shard: int, entry: ShardEntry | None, status: Status) -> Json:
    """Returns a shard as /v1/shards shows it."""
    reached = None if isinstance(status, ShardamError) else status
    problem = status.message if isinstance(status, ShardamError) else None
    if entry is None:
        state = "missing"
    elif reached is None:
        state = "unreachable" if entry.ready else "starting"
    else:
        state = _STATES.get(reached.state, "starting")
    known: dict[str, Json] = {
        "shard": shard,
        "state": state,
        "waiting_for": (reached.waiting_for or None) if reached else None,
        "problem": problem,
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
        "num_clients": status.num_clients,
    }


def readiness(calls: ShardCalls, request_id: int) -> tuple[ClusterView | None, list[str]]:
    """Says what is missing before every row can be read: Redis (if it never answered), shards, or their readiness.

    Returns:
        The view, or None if Redis has not answered yet; and what is missing, empty if nothing.
    """
    try:
        view = calls.reader.view()
    except RedisUnreachable as error:
        return None, [error.message]
    missing = waiting_for(view, calls.reader.cluster)
    if view.entry is None or view.route_map is None:
        return view, missing
    # A registered shard may have died since: only its own answer says that it serves.
    statuses = ask_statuses(calls, sorted(view.shards), request_id)
    for shard, status in statuses.items():
        if isinstance(status, ShardamError):
            missing.append(f"shard {shard} does not answer: {status.message}")
        elif status.state != shard_pb2.SERVING_STATE_SERVING:
            wait = f", waiting for {status.waiting_for}" if status.waiting_for else ""
            missing.append(f"shard {shard} is {_STATES.get(status.state, 'starting')}{wait}")
    return view, missing
