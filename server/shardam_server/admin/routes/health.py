"""/healthz, /readyz and /metrics, for orchestrators and Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from shardam_proto.errors import ShardamError, ShardNotReady
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.answer_models import HealthModel, ReadinessModel
from shardam_server.admin.context import Admin, RequestNumber
from shardam_server.admin.encoding import JsonResponse
from shardam_server.admin.metrics import METRICS_TYPE, merge_metrics
from shardam_server.admin.problems import DetailedError
from shardam_server.admin.shard_states import STATUS_TIMEOUT_S, readiness

router = APIRouter(tags=["operation"])


@router.get("/healthz", response_model=HealthModel, summary="The process lives")
async def get_health() -> JsonResponse:
    """Answers from the event loop, whatever shards and Redis do: threads that wait for them do not hold it up."""
    return JsonResponse({"status": "ok"})


@router.get("/readyz", response_model=ReadinessModel, summary="Every shard serves")
def get_readiness(admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Answers 503 with what is missing until every shard serves."""
    view, missing = readiness(admin.calls, request_number)
    if missing or view is None or view.entry is None:
        error = ShardNotReady(f"not ready: {'; '.join(missing)}", metadata={"cluster": admin.cluster})
        raise DetailedError(error, {"waiting_for": missing})
    return JsonResponse({"status": "ready", "cluster": admin.cluster, "num_shards": view.entry.num_shards})


@router.get("/metrics", summary="Metrics of the admin API and of all shards", response_class=Response)
def get_metrics(admin: Admin, request_number: RequestNumber) -> Response:
    """Shows Prometheus text; a shard that does not answer has shardam_shard_up 0 and no other series."""
    body = merge_metrics(admin.metrics, admin.cluster, _scrape(admin, request_number))
    return Response(body, headers={"Content-Type": METRICS_TYPE})


def _scrape(admin: Admin, request_number: int) -> dict[int, str | None]:
    try:
        formed = admin.calls.reader.formed()
        requests = {shard: shard_pb2.GetMetricsRequest() for shard in range(formed.route_map.num_shards)}
        timeout_s = min(STATUS_TIMEOUT_S, admin.calls.timeout_s)
        answers = admin.calls.call_many(requests, lambda stubs: stubs.shard.GetMetrics, request_number, timeout_s)
    except ShardamError:  # before the cluster has formed there is no shard to show, and the admin API's own metrics stand
        return {}
    return {shard: None if isinstance(answer, ShardamError) else answer.text for shard, answer in answers.items()}
