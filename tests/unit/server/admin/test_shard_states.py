"""How shards are is said alike by /v1/shards, /v1/cluster and /readyz, and a LOST shard's rows are never answered in part."""

from __future__ import annotations

import dataclasses
import threading

import httpx2
import pytest
from anyio import to_thread
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from shardam_testing.fake_shards import FakeCluster

from shardam_proto.schema import TableSpec
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.answer_models import ReadinessModel, ShardListModel, ShardModel
from shardam_server.admin.checkpoint_models import ClusterModel

from .conftest import OpenAdmin

FORGET = "`shardam forget-shard --index 1`"


def shown(client: TestClient, shard: int = 1) -> ShardModel:
    """Reads a shard, as the list and as its own page show it."""
    listed = ShardListModel.model_validate_json(client.get("/v1/shards").content, extra="forbid").shards[shard]
    assert ShardModel.model_validate_json(client.get(f"/v1/shards/{shard}").content, extra="forbid") == listed
    return listed


def not_ready(client: TestClient) -> list[str]:
    """Reads what is missing, which readiness and the cluster's page agree on."""
    response = client.get("/readyz")
    assert (response.status_code, response.json()["reason"]) == (503, "NOT_READY")
    waits: list[str] = response.json()["waiting_for"]
    cluster = ClusterModel.model_validate_json(client.get("/v1/cluster").content, extra="forbid")
    assert (cluster.ready, cluster.waiting_for) == (False, waits)
    return waits


@pytest.mark.parametrize(
    ("state", "word", "reason"),
    [
        (shard_pb2.SERVING_STATE_STARTING, "starting", "NOT_READY"),
        (shard_pb2.SERVING_STATE_DRAINING, "draining", "NOT_READY"),
        (shard_pb2.SERVING_STATE_SUSPENDED, "suspended", "NOT_READY"),
        (shard_pb2.SERVING_STATE_LOST, "lost", "SHARD_LOST"),
    ],
)
def test_a_shard_that_does_not_serve_is_not_ready_and_says_why(
    client: TestClient, shards: FakeCluster, state: shard_pb2.ServingState.ValueType, word: str, reason: str
) -> None:
    shards.shards[1].state = state
    shard = shown(client)
    assert (shard.state, shard.reason, shard.warning) == (word, reason, None)
    assert shard.problem is not None
    assert shard.problem.startswith("shard 1 is ")
    assert not_ready(client) == [shard.problem]
    assert (FORGET in shard.problem) == (word == "lost")


def test_what_the_shard_says_counts_more_than_what_redis_still_knows(client: TestClient, shards: FakeCluster) -> None:
    shards.registered[1] = dataclasses.replace(shards.registered[1], ready=False)
    assert shown(client).state == "serving"
    assert client.get("/readyz").status_code == 200


def test_the_journal_and_what_waits_are_shown(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[1].status = shard_pb2.GetStatusResponse(
        journal_mode=shard_pb2.JOURNAL_MODE_FSYNC,
        journal_state=shard_pb2.JOURNAL_STATE_OK,
        journal_bytes=11,
        data_folder="/data/1",
        queue_bytes=12,
        reserved_bytes=13,
        parked_requests=14,
    )
    shard = shown(client)
    assert (shard.journal_mode, shard.journal_state, shard.journal_problem) == ("fsync", "ok", None)
    assert (shard.journal_bytes, shard.data_folder) == (11, "/data/1")
    assert (shard.queue_bytes, shard.reserved_bytes, shard.parked_requests) == (12, 13, 14)
    other = shown(client, 0)  # a shard of a version without a journal
    assert (other.journal_mode, other.journal_state, other.data_folder) == (None, None, None)


def test_a_degraded_journal_is_ready_with_a_warning(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[1].status.journal_state = shard_pb2.JOURNAL_STATE_SUSPENDED
    shards.shards[1].status.journal_problem = "the disk of /data/1 is full: make room"
    shard = shown(client)
    assert (shard.state, shard.reason, shard.problem, shard.journal_state) == ("serving", None, None, "degraded")
    assert shard.warning is not None
    assert shard.warning.startswith("shard 1 is DEGRADED: ")
    assert shard.warning.endswith("the disk of /data/1 is full: make room")
    ready = ReadinessModel.model_validate_json(client.get("/readyz").content, extra="forbid")
    assert ready.warnings == [shard.warning]
    assert client.get("/v1/cluster").json()["warnings"] == [shard.warning]


@pytest.mark.parametrize(
    ("state", "reason"),
    [(shard_pb2.JOURNAL_STATE_FULL, "JOURNAL_FULL"), (shard_pb2.JOURNAL_STATE_FAILED, "JOURNAL_FAILED")],
)
@pytest.mark.parametrize("said", ["", "no space left on /data/1"])
def test_a_journal_that_stops_changes_is_not_ready(
    client: TestClient, shards: FakeCluster, state: shard_pb2.JournalState.ValueType, reason: str, said: str
) -> None:
    shards.shards[1].status.journal_state = state
    shards.shards[1].status.journal_problem = said
    shard = shown(client)
    assert (shard.state, shard.reason, shard.warning) == ("serving", reason, None)
    assert shard.problem is not None
    assert shard.problem.startswith("shard 1 takes no changes: ")
    assert said in shard.problem
    assert not_ready(client) == [shard.problem]


def test_a_wrong_token_of_the_admin_api_is_told_apart_from_a_shard_that_is_away(
    open_admin: OpenAdmin, shards: FakeCluster
) -> None:
    shards.add_table(TableSpec("t", 2))
    for shard in shards.shards:
        shard.token = "right"
    shards.servers[2].stop(None).wait()
    client = open_admin(lambda: shards.view)
    listed = ShardListModel.model_validate_json(client.get("/v1/shards").content, extra="forbid").shards
    assert [(shard.state, shard.reason) for shard in listed] == [
        ("refused", "BAD_TOKEN"),
        ("refused", "BAD_TOKEN"),
        ("unreachable", "SHARD_UNREACHABLE"),
    ]
    refused, away = not_ready(client)
    assert "the admin API's own token" in refused
    assert "SHARDAM_TOKEN" in refused
    assert away.startswith("shard 2 does not answer: ")
    response = client.get("/v1/tables/t/rows/1")
    assert response.json()["reason"] == "BAD_TOKEN"
    assert "not the caller's" in response.json()["detail"]


def refused_by_lost(response: httpx2.Response) -> bool:
    problem = response.json()
    assert "rows" not in problem
    assert "tables" not in problem
    return (response.status_code, problem["reason"]) == (400, "SHARD_LOST") and FORGET in problem["detail"]


def test_rows_of_a_lost_shard_are_never_answered_in_part(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("t", 2))
    for row_id in range(60):
        shards.put("t", row_id, [row_id, row_id])
    owned = {shard.index: [str(row_id) for _, row_id in shard.rows] for shard in shards.shards}
    shards.shards[1].state = shard_pb2.SERVING_STATE_LOST
    both = [owned[0][0], owned[1][0]]
    path = "/v1/tables/t/rows"
    assert refused_by_lost(client.get(f"{path}/{owned[1][0]}"))
    assert refused_by_lost(client.post(f"{path}:batchGet", json={"ids": both}))
    assert refused_by_lost(client.post("/v1/rows:batchGet", json={"tables": [{"table": "t", "ids": both}]}))
    assert refused_by_lost(client.get(path, params={"limit": 60}))
    assert refused_by_lost(client.put(f"{path}/{owned[1][0]}", json={"weight": [1, 2]}))
    assert refused_by_lost(client.delete(f"{path}/{owned[1][0]}"))
    assert refused_by_lost(client.post(f"{path}/{owned[1][0]}:clearMoments"))
    assert client.get(f"{path}/{owned[0][0]}").status_code == 200
    table = client.get("/v1/tables/t").json()
    assert (table["num_rows"], table["missing_shards"]) == (None, [1])


def test_a_lost_shards_metrics_are_passed_on(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[1].state = shard_pb2.SERVING_STATE_LOST
    for shard in shards.shards:
        shard.metrics_text = "# HELP shardam_lost 1: lost.\n# TYPE shardam_lost gauge\n" + f"shardam_lost {shard.index % 2}\n"
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert [(sample.labels["shard"], sample.value) for sample in families["shardam_lost"].samples] == [
        ("0", 0.0),
        ("1", 1.0),
        ("2", 0.0),
    ]
    assert [sample.value for sample in families["shardam_shard_up"].samples] == [1.0, 1.0, 1.0]


@pytest.mark.case("C129")
@pytest.mark.case("C139")
def test_probes_are_answered_while_every_thread_for_requests_waits_for_a_shard(
    open_admin: OpenAdmin, shards: FakeCluster
) -> None:
    shards.add_table(TableSpec("t", 2))
    go_on, waiting = threading.Event(), threading.Semaphore(0)

    def stop() -> None:
        waiting.release()
        go_on.wait(60)

    shards.shards[0].before_answer = stop
    with open_admin(lambda: shards.view, timeout_s=60.0) as client:  # entered: all requests share one event loop
        assert client.portal is not None
        num_threads = int(client.portal.call(lambda: to_thread.current_default_thread_limiter().total_tokens))
        threads = [threading.Thread(target=client.get, args=("/v1/tables/t/rows",)) for _ in range(num_threads + 5)]
        for thread in threads:
            thread.start()
        try:
            assert all(waiting.acquire(timeout=60) for _ in range(num_threads))
            assert [client.get(path).status_code for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 200]
            assert all(thread.is_alive() for thread in threads)
        finally:
            go_on.set()
            for thread in threads:
                thread.join(timeout=60)
