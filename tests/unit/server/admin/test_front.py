"""What holds for every route: problems, request ids, headers, documentation, health, metrics."""

from __future__ import annotations

import logging
import re

import httpx2
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from shardam_testing.fake_shards import FakeCluster

from shardam_proto.errors import QueueFull, RedisUnreachable, ShardNotReady
from shardam_proto.registry import ClusterView
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.access import request_number
from shardam_server.admin.answer_models import ShardListModel, ShardModel, TableModel, TablePageModel
from shardam_server.admin.checkpoint_models import ClusterModel


def is_problem(response: httpx2.Response, status: int, reason: str) -> bool:
    body = response.json()
    return bool(
        response.status_code == body["status"] == status
        and body["reason"] == reason
        and response.headers["content-type"] == "application/problem+json"
        and body["request_id"] == response.headers["x-request-id"]
    )


def test_unknown_paths_and_methods_are_problems(client: TestClient) -> None:
    assert is_problem(client.get("/v1/nothing"), 404, "UNKNOWN_ROUTE")
    assert is_problem(client.get("/v1/tables/"), 404, "UNKNOWN_ROUTE")
    response = client.delete("/v1/tables")
    assert is_problem(response, 405, "METHOD_NOT_ALLOWED")
    assert response.headers["allow"]


def test_a_fault_of_ours_is_500_with_an_id_that_the_log_has(
    client: TestClient, shards: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("shardam_server.admin.routes.tables.find_table", fail)
    response = client.get("/v1/tables/t")
    assert is_problem(response, 500, "INTERNAL")
    assert response.json()["request_id"] in response.json()["detail"]
    assert "secret detail" not in response.text
    assert "Traceback" not in response.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None


def test_a_fault_of_a_shard_is_500_without_its_traceback(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("t", 2))
    for shard in shards.shards:
        shard.crash = True
    response = client.get("/v1/tables/t")
    assert is_problem(response, 500, "INTERNAL")
    assert "Traceback" not in response.text


def test_a_shards_reason_and_values_pass_through(client: TestClient, shards: FakeCluster) -> None:
    for shard in shards.shards:
        shard.fail_with = QueueFull("the queue is full", metadata={"queue_bytes": "7"})
    response = client.get("/v1/tables/t")
    assert is_problem(response, 429, "QUEUE_FULL")
    assert response.json()["queue_bytes"] == "7"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("given", "number"), [("77", 77), (str(2**64 - 1), 2**64 - 1), ("abc-1", None), ("0", None)])
def test_a_request_id_is_repeated_and_reaches_the_shards(
    client: TestClient, shards: FakeCluster, given: str, number: int | None
) -> None:
    shards.add_table(TableSpec("t", 2))
    response = client.get("/v1/tables/t", headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given
    expected = request_number(given) if number is None else number
    assert expected > 0
    assert all(shard.seen_request_ids == [expected] for shard in shards.shards)


@pytest.mark.parametrize("given", ["", "x" * 129, "ü", "a b"])
def test_a_request_id_that_no_log_should_hold_is_replaced(client: TestClient, given: str) -> None:
    response = client.get("/healthz", headers={b"X-Request-Id": given.encode()})
    assert re.fullmatch(r"[0-9]+", response.headers["x-request-id"])


def test_every_answer_forbids_what_a_browser_need_not_do(client: TestClient) -> None:
    for path in ("/", "/healthz", "/v1/nothing", "/docs", "/page/main.js"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in client.get("/").headers["content-security-policy"]


def test_documentation_loads_nothing_from_other_hosts(client: TestClient) -> None:
    for path in ("/docs", "/redoc", "/"):
        response = client.get(path)
        assert response.status_code == 200
        sources = re.findall(r'(?:src|href)="([^"]+)"', response.text)
        assert sources
        for source in sources:
            assert "//" not in source, source
            assert client.get(source if source.startswith("/") else f"/{source}").status_code == 200, source
    assert client.get("/static-offline-docs/swagger-ui-bundle.js").status_code == 200


def test_openapi_names_every_route(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert set(document["paths"]) == {
        "/v1/cluster",
        "/v1/shards",
        "/v1/shards/{shard}",
        "/v1/workers",
        "/v1/tables",
        "/v1/tables/{table}",
        "/v1/tables/{table}/rows",
        "/v1/tables/{table}/rows/{row_id}",
        "/v1/tables/{table}/rows/{row_id}:clearMoments",
        "/v1/tables/{table}/rows:batchGet",
        "/v1/tables/{table}:export",
        "/v1/tables/{table}:import",
        "/v1/rows:batchGet",
        "/v1/checkpoints",
        "/v1/checkpoints/{name}",
        "/v1/checkpoints/{name}:verify",
        "/v1/checkpoints/{name}:restore",
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/healthz",
        "/readyz",
        "/metrics",
    }


def test_cluster_and_shards_answer_as_documented(client: TestClient, shards: FakeCluster) -> None:
    cluster = ClusterModel.model_validate_json(client.get("/v1/cluster").content, extra="forbid")
    assert (cluster.cluster, cluster.ready, cluster.epoch, cluster.num_shards) == ("test", True, 1, 3)
    shards.servers[1].stop(None).wait()
    del shards.registered[2]
    listed = ShardListModel.model_validate_json(client.get("/v1/shards").content, extra="forbid").shards
    assert [shard.state for shard in listed] == ["serving", "unreachable", "missing"]
    assert listed[0].incarnation == "1"
    assert listed[0].lineage == str(2**63 - 1)
    assert listed[1].problem
    assert "--advertise" in listed[1].problem
    one = ShardModel.model_validate_json(client.get("/v1/shards/0").content, extra="forbid")
    assert one == listed[0]
    assert is_problem(client.get("/v1/shards/3"), 404, "UNKNOWN_SHARD")
    assert is_problem(client.get("/v1/shards/-1"), 404, "UNKNOWN_SHARD")
    assert is_problem(client.get("/v1/shards/x"), 422, "BAD_OPTION")


def test_health_is_open_and_readiness_says_what_is_missing(client: TestClient, shards: FakeCluster) -> None:
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json()["status"] == "ready"
    shards.shards[1].state = shard_pb2.SERVING_STATE_DRAINING
    response = client.get("/readyz")
    assert is_problem(response, 503, "NOT_READY")
    assert response.json()["waiting_for"] == ["shard 1 is draining"]
    shards.servers[2].stop(None).wait()
    assert any("shard 2 does not answer" in text for text in client.get("/readyz").json()["waiting_for"])


def test_readiness_without_redis_or_shards_says_so(open_admin) -> None:  # type: ignore[no-untyped-def]  # a fixture
    def no_redis() -> ClusterView:
        raise RedisUnreachable("Redis did not answer: refused")

    client = open_admin(no_redis)
    assert client.get("/healthz").status_code == 200
    response = client.get("/readyz")
    assert is_problem(response, 503, "NOT_READY")
    assert response.json()["waiting_for"] == ["Redis did not answer: refused"]
    assert is_problem(client.get("/v1/cluster"), 503, "REDIS_UNREACHABLE")
    assert client.get("/metrics").status_code == 200
    client = open_admin(lambda: ClusterView(None, None, {}))
    assert "no shard of cluster 'test'" in client.get("/readyz").json()["waiting_for"][0]
    assert client.get("/v1/shards").json() == {"shards": []}
    assert is_problem(client.get("/v1/tables"), 503, "NOT_READY")


@pytest.mark.case("C048")
def test_a_table_is_shown_over_all_shards(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("t", 4, init=Constant(0.5), padding_idx=2**53 + 1))
    for index, shard in enumerate(shards.shards):
        shard.tables["t"].num_rows = 10 + index
        shard.tables["t"].table_step = 5 + index
        shard.tables["t"].last_options.lr = 0.1 * index
    table = TableModel.model_validate_json(client.get("/v1/tables/t").content, extra="forbid")
    assert (table.num_rows, table.table_step, table.memory.exp_avg_sq_bytes) == (33, 7, 33 * 16)
    assert table.spec.padding_idx == str(2**53 + 1)
    assert table.last_options is not None
    assert table.last_options.lr == 0.2
    assert [shard.num_rows for shard in table.shards] == [10, 11, 12]
    del shards.registered[1]
    table = TableModel.model_validate_json(client.get("/v1/tables/t").content, extra="forbid")
    assert (table.num_rows, table.missing_shards) == (None, [1])


def test_tables_are_listed_a_page_at_a_time(client: TestClient, shards: FakeCluster) -> None:
    names = [f"t{index}" for index in range(7)]
    for name in names:
        shards.add_table(TableSpec(name, 2))
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        response = client.get("/v1/tables", params={"page_size": 3, "after_name": after})
        page = TablePageModel.model_validate_json(response.content, extra="forbid")
        seen += [table.name for table in page.tables]
        after = page.next_after_name
    assert seen == names


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({"name": "t", "dim": 4}, TableSpec("t", 4)),
        ({"name": "t", "dim": 4, "init": {"kind": "normal", "std": 0.05}}, TableSpec("t", 4, init=Normal(0, 0.05))),
        (
            {
                "name": "t",
                "dim": 1,
                "init": {"kind": "uniform", "low": -1, "high": 1},
                "num_embeddings": 10,
                "padding_idx": "-1",
            },
            TableSpec("t", 1, init=Uniform(-1, 1), num_embeddings=10, padding_idx=9),
        ),
    ],
)
def test_a_table_is_created_from_its_schema(client: TestClient, shards: FakeCluster, body: object, spec: TableSpec) -> None:
    response = client.post("/v1/tables", json=body)
    assert response.status_code == 200
    assert response.headers["location"] == "/v1/tables/t"
    assert all(TableSpec.from_proto(shard.tables["t"].spec) == spec for shard in shards.shards)
    shown = response.json()["spec"]
    assert client.post("/v1/tables", json=shown).status_code == 200  # what is shown can be sent


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "t", "dim": "4"}, "dim"),
        ({"name": "t", "dim": 4.5}, "dim"),
        ({"name": "t", "dim": 4, "amsgrad": True}, "amsgrad"),
        ({"name": "t", "dim": 4, "init": {"kind": "orthogonal"}}, "init"),
        ({"name": "t", "dim": 4, "init": {"kind": "normal", "std": "NaN"}}, "init.normal.std"),
        ({"name": "t", "dim": 4, "init": {"kind": "constant", "value": 1, "std": 1}}, "init.constant.std"),
        ({"name": "t", "dim": 4, "step": "epoch"}, "step"),
        ({"dim": 4}, "name"),
    ],
)
def test_a_schema_of_the_wrong_form_is_422_with_the_field(
    client: TestClient, shards: FakeCluster, body: object, field: str
) -> None:
    response = client.post("/v1/tables", json=body)
    assert is_problem(response, 422, "BAD_OPTION")
    assert [error["field"] for error in response.json()["errors"]] == [field]
    assert not shards.shards[0].tables


@pytest.mark.case("C125")
@pytest.mark.parametrize("value", ['"NaN"', "NaN", "1e999", "-1", '"Infinity"', "-Infinity"])
def test_a_number_out_of_range_in_a_schema_is_422_with_the_field(client: TestClient, shards: FakeCluster, value: str) -> None:
    body = '{"name": "t", "dim": 4, "init": {"kind": "normal", "std": ' + value + "}}"
    response = client.post("/v1/tables", content=body, headers={"content-type": "application/json"})
    assert is_problem(response, 422, "BAD_OPTION")
    assert [error["field"] for error in response.json()["errors"]] == ["init.normal.std"]
    assert not shards.shards[0].tables


@pytest.mark.case("C014")
def test_an_unknown_option_is_refused_with_those_that_exist(client: TestClient) -> None:
    problem = client.post("/v1/tables", json={"name": "t", "dim": 4, "amsgrad": True}).json()
    assert "amsgrad" in problem["detail"]
    assert "max_rows_per_shard" in problem["detail"]


@pytest.mark.case("C046")
@pytest.mark.parametrize(
    "name", ["user/id", "ü名", "schema:Thing", "../x", "", "x" * 129, "a b", "%", "a?b", "a#b", ".a", "-a"]
)
def test_a_name_outside_the_alphabet_is_refused_at_creation(client: TestClient, shards: FakeCluster, name: str) -> None:
    assert is_problem(client.post("/v1/tables", json={"name": name, "dim": 4}), 400, "BAD_OPTION")
    assert not shards.shards[0].tables


@pytest.mark.case("C046")
def test_names_within_the_alphabet_reach_their_own_table(client: TestClient) -> None:
    names = ["a.b", "A", "a", "_x", "0", "x" * 128, "rows", "a-b"]
    for name in names:
        assert client.post("/v1/tables", json={"name": name, "dim": 4}).status_code == 200
    assert [client.get(f"/v1/tables/{name}").json()["name"] for name in names] == names


@pytest.mark.case("C128")
def test_an_encoded_slash_reaches_no_other_route(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("user", 2))
    for path in ("/v1/tables/user%2Fid", "/v1/tables/user%2frows", "/v1/tables/user%2Frows%2F1"):
        assert is_problem(client.get(path), 400, "BAD_OPTION")
    assert is_problem(client.get("/v1/tables/user/id"), 404, "UNKNOWN_ROUTE")
    for name in ("%25", "%3F", "%23", "%C3%BC", "%20"):
        assert is_problem(client.get(f"/v1/tables/{name}"), 400, "BAD_OPTION")


def test_metrics_of_all_shards_and_routes_are_one_valid_text(client: TestClient, shards: FakeCluster) -> None:
    for shard in shards.shards:
        shard.metrics_text = (
            "# HELP shardam_pulls_total Pulls.\n# TYPE shardam_pulls_total counter\n"
            f'shardam_pulls_total{{cluster="test",shard="{shard.index}"}} {shard.index + 5}\n'
            "# HELP queue Unlabelled.\n# TYPE queue gauge\nqueue 1\n"
        )
    client.get("/v1/cluster")
    client.get("/v1/tables/none")
    shards.servers[2].stop(None).wait()
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text.count("# TYPE shardam_pulls_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert [(s.labels["shard"], s.value) for s in families["shardam_pulls"].samples] == [("0", 5.0), ("1", 6.0)]
    assert [s.labels["shard"] for s in families["queue"].samples] == ["0", "1"]
    assert [(s.labels["shard"], s.value) for s in families["shardam_shard_up"].samples] == [("0", 1), ("1", 1), ("2", 0)]
    counted = {
        (s.labels["route"], s.labels["method"], s.labels["status"]): s.value
        for s in families["shardam_rest_requests"].samples
        if s.name == "shardam_rest_requests_total"
    }
    assert counted == {("/v1/cluster", "GET", "200"): 1.0, ("/v1/tables/{table}", "GET", "404"): 1.0}
    assert "shardam_rest_request_seconds" in families


def test_a_shard_that_starts_is_503_for_reads(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("t", 2))
    for shard in shards.shards:
        shard.fail_with = ShardNotReady("shard starts")
    response = client.get("/v1/tables/t/rows/1")
    assert is_problem(response, 503, "NOT_READY")
    assert response.headers["retry-after"] == "1"
