"""/healthz, /readyz and /metrics, for orchestrators and Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Response

from shardam_proto.errors import RedisUnreachable, ShardamError, ShardNotReady
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.answer_models import HealthModel, ReadinessModel
from shardam_server.admin.context import Admin, AdminContext, RequestNumber
from shardam_server.admin.encoding import Json, JsonResponse
from shardam_server.admin.metrics import METRICS_TYPE, merge_metrics
from shardam_server.admin.problems import DetailedError
from shardam_server.admin.shard_states import STATUS_TIMEOUT_S, Readiness, check_readiness

T = TypeVar("T")

router = APIRouter(tags=["operation"])


@router.get("/healthz", response_model=HealthModel, summary="The process lives")
async def get_health() -> JsonResponse:
    """Answers from the event loop, whatever shards and Redis do: threads that wait for them do not hold it up."""
    return JsonResponse({"status": "ok"})


@router.get("/readyz", response_model=ReadinessModel, summary="Every shard serves")
async def get_readiness(admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Answers 503 with what is missing until every shard takes pulls and changes; `warnings` is for a person to read.

    A shard whose journal is DEGRADED serves, so it is ready, with a warning.
    """
    readiness, missing = await _beside_other_requests(_read_readiness, admin, request_number)
    if missing or readiness is None or readiness.view.entry is None:
        error = ShardNotReady(f"not ready: {'; '.join(missing)}", metadata={"cluster": admin.cluster})
        raise DetailedError(error, {"waiting_for": missing})
    num_shards = readiness.view.entry.num_shards
    body: dict[str, Json] = {"status": "ready", "cluster": admin.cluster, "num_shards": num_shards}
    return JsonResponse({**body, "warnings": readiness.warnings})


@router.get("/metrics", summary="Metrics of the admin API and of all shards", response_class=Response)
async def get_metrics(admin: Admin, request_number: RequestNumber) -> Response:
    """Shows Prometheus text; a shard that does not answer has shardam_shard_up 0 and no other series."""
    body = await _beside_other_requests(_read_metrics, admin, request_number)
    return Response(body, headers={"Content-Type": METRICS_TYPE})


async def _beside_other_requests(read: Callable[[AdminContext, int], T], admin: AdminContext, request_number: int) -> T:
    """Runs a probe in threads that no other route uses, so that requests that wait for a slow shard do not hold it up."""
    return await asyncio.to_thread(read, admin, request_number)


def _read_readiness(admin: AdminContext, request_number: int) -> tuple[Readiness | None, list[str]]:
    try:
        readiness = check_readiness(admin.calls, request_number)
    except RedisUnreachable as error:
        return None, [error.message]
    return readiness, readiness.missing


def _read_metrics(admin: AdminContext, request_number: int) -> bytes:
    return merge_metrics(admin.metrics, admin.cluster, _scrape(admin, request_number))


def _scrape(admin: Admin, request_number: int) -> dict[int, str | None]:
    try:
        formed = admin.calls.reader.formed()
        requests = {shard: shard_pb2.GetMetricsRequest() for shard in range(formed.route_map.num_shards)}
        timeout_s = min(STATUS_TIMEOUT_S, admin.calls.timeout_s)
        answers = admin.calls.call_many(requests, lambda stubs: stubs.shard.GetMetrics, request_number, timeout_s)
    except ShardamError:  # before the cluster has formed there is no shard to show, and the admin API's own metrics stand
        return {}
    return {shard: None if isinstance(answer, ShardamError) else answer.text for shard, answer in answers.items()}
