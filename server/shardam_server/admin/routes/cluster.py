"""/v1/cluster and /v1/shards: who belongs to the cluster and how each shard is."""

from __future__ import annotations

from fastapi import APIRouter

from shardam_proto.errors import ShardamError, ShardNotReady
from shardam_proto.routing import NUM_BUCKETS
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.answer_models import ShardListModel, ShardModel
from shardam_server.admin.checkpoint_models import ClusterModel
from shardam_server.admin.checkpoints import list_jobs
from shardam_server.admin.cluster import waiting_for
from shardam_server.admin.context import Admin, AdminContext, RequestNumber
from shardam_server.admin.encoding import Json, JsonResponse
from shardam_server.admin.problems import HttpOnlyError
from shardam_server.admin.shard_states import ask_statuses, check_readiness, shard_to_json
from shardam_server.checkpoint_words import has_ended, job_to_json

router = APIRouter(tags=["cluster"])


@router.get("/v1/cluster", response_model=ClusterModel, summary="The cluster")
def get_cluster(admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows the cluster as Redis knows it; `ready` is what /readyz says: false while a shard does not serve."""
    readiness = check_readiness(admin.calls, request_number)
    view = readiness.view
    error = admin.calls.reader.redis_error
    return JsonResponse(
        {
            "cluster": admin.cluster,
            "version": admin.version,
            "cluster_id": view.entry.cluster_id if view.entry else None,
            "seed": str(view.entry.seed) if view.entry else None,
            "num_shards": view.entry.num_shards if view.entry else None,
            "num_buckets": NUM_BUCKETS,
            "epoch": view.route_map.epoch if view.route_map else None,
            "routing_version": view.route_map.version if view.route_map else None,
            "ready": not readiness.missing,
            "waiting_for": readiness.missing,
            "warnings": readiness.warnings,
            "redis": admin.redis,
            "redis_error": error.message if error else None,
            **_checkpoints(admin, readiness.home, request_number),
        }
    )


def _checkpoints(admin: AdminContext, home: shard_pb2.GetStatusResponse | None, request_number: int) -> dict[str, Json]:
    """Returns the last checkpoint and what home does now; without home's answer the cluster is shown all the same."""
    root = home.checkpoint_root if home is not None else ""
    last = home.last_checkpoint if home is not None and home.HasField("last_checkpoint") else None
    try:
        jobs = [job for job in list_jobs(admin.calls, request_number) if not has_ended(job)] if root else []
    except ShardamError:
        jobs = None
    return {
        "checkpoint_root": root or None,
        "last_checkpoint": None if last is None else job_to_json(last),
        "jobs": None if jobs is None or home is None else [job_to_json(job) for job in jobs],
    }


@router.get("/v1/shards", response_model=ShardListModel, summary="All shards")
def list_shards(admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows every shard with its state; one that does not answer is shown with the problem."""
    view = admin.calls.reader.view()
    num_shards = view.entry.num_shards if view.entry else 0
    statuses = ask_statuses(admin.calls, range(num_shards), request_number)
    return JsonResponse(
        {"shards": [shard_to_json(shard, view.shards.get(shard), statuses[shard]) for shard in range(num_shards)]}
    )


@router.get("/v1/shards/{shard}", response_model=ShardModel, summary="One shard")
def get_shard(shard: int, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows one shard by its index."""
    view = admin.calls.reader.view()
    if view.entry is None:
        raise ShardNotReady("; ".join(waiting_for(view, admin.cluster)), metadata={"cluster": admin.cluster})
    if not 0 <= shard < view.entry.num_shards:
        raise HttpOnlyError(
            "UNKNOWN_SHARD",
            f"shard {shard} does not exist: the cluster has shards 0 to {view.entry.num_shards - 1}",
            {"shard": str(shard), "num_shards": str(view.entry.num_shards)},
        )
    status = ask_statuses(admin.calls, [shard], request_number)[shard]
    return JsonResponse(shard_to_json(shard, view.shards.get(shard), status))
