"""Requests that are wrong before a route sees them: bodies that are no JSON, query parameters that no route knows."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster

from shardam_proto.schema import TableSpec

BODY = b'{"name": "t", "dim": 4}'


def refused_body(client: TestClient, body: bytes, content_type: str | None = "application/json") -> str:
    """Sends a body that must be refused as a whole, and returns why."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = client.post("/v1/tables", content=body, headers=headers)
    problem = response.json()
    assert (response.status_code, problem["reason"]) == (422, "BAD_OPTION")
    assert problem["errors"] == [{"field": "body", "in": "body", "message": problem["detail"]}]
    return str(problem["detail"])


@pytest.mark.parametrize(
    ("content_type", "named"),
    [("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'"), (None, "no Content-Type")],
)
def test_a_body_of_another_type_is_answered_with_the_type_to_send(
    client: TestClient, content_type: str | None, named: str
) -> None:
    detail = refused_body(client, BODY, content_type)
    assert named in detail
    assert "send Content-Type: application/json" in detail


def test_a_body_that_is_no_json_is_answered_with_the_place(client: TestClient) -> None:
    detail = refused_body(client, b'{"name": t}')
    assert detail == "the body is no JSON (at character 9): Expecting value"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"name": "t", "dim": ' + b"9" * 5000 + b"}", "too many digits (more than 4300); send ids as decimal strings"),
        (b'{"name": "\xff"}', "no UTF-8 (at byte 10)"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_a_body_that_cannot_be_read_is_answered_with_the_reason(client: TestClient, body: bytes, why: str) -> None:
    assert why in refused_body(client, body)


ROUTES = [
    ("GET", "/v1/cluster", "this route takes none"),
    ("GET", "/v1/shards", "this route takes none"),
    ("GET", "/v1/shards/0", "this route takes none"),
    ("GET", "/v1/workers", "known are page_size, cursor"),
    ("GET", "/v1/tables", "known are page_size, after_name"),
    ("POST", "/v1/tables", "this route takes none"),
    ("GET", "/v1/tables/t", "this route takes none"),
    ("GET", "/v1/tables/t/rows", "known are cursor, limit, include"),
    ("POST", "/v1/tables/t/rows:batchGet", "this route takes none"),
    ("POST", "/v1/rows:batchGet", "this route takes none"),
    ("GET", "/v1/tables/t/rows/1", "this route takes none"),
    ("PUT", "/v1/tables/t/rows/1", "this route takes none"),
    ("DELETE", "/v1/tables/t/rows/1", "this route takes none"),
    ("POST", "/v1/tables/t/rows/1:clearMoments", "this route takes none"),
    ("GET", "/v1/tables/t:export", "known are format"),
    ("POST", "/v1/tables/t:import", "known are overwrite, weights_only, format"),
    ("GET", "/v1/checkpoints", "this route takes none"),
    ("POST", "/v1/checkpoints", "this route takes none"),
    ("GET", "/v1/checkpoints/c", "this route takes none"),
    ("DELETE", "/v1/checkpoints/c", "this route takes none"),
    ("POST", "/v1/checkpoints/c:verify", "this route takes none"),
    ("POST", "/v1/checkpoints/c:restore", "this route takes none"),
    ("GET", "/v1/jobs", "this route takes none"),
    ("GET", "/v1/jobs/j", "this route takes none"),
]


@pytest.mark.parametrize(("method", "path", "takes"), ROUTES)
def test_an_unknown_query_parameter_is_refused_by_every_route(client: TestClient, method: str, path: str, takes: str) -> None:
    response = client.request(method, path, params={"pagesize": "1"})
    problem = response.json()
    assert (response.status_code, problem["reason"]) == (422, "BAD_OPTION")
    assert problem["detail"] == f"pagesize: is no query parameter here; {takes}"
    assert problem["errors"][0]["in"] == "query"


def test_the_table_of_routes_is_whole(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    count = sum(len(methods) for path, methods in paths.items() if path.startswith("/v1/"))
    assert count == len(ROUTES)


def test_a_repeated_query_parameter_is_refused(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("t", 2))
    response = client.get("/v1/tables/t/rows?limit=1&limit=2&cursor=")
    assert (response.status_code, response.json()["reason"]) == (422, "BAD_OPTION")
    assert response.json()["detail"] == "limit: is given 2 times; give it once (known are cursor, limit, include)"
    assert client.get("/v1/tables/t/rows?limit=1&cursor=").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/docs", "/", "/page/main.js"])
def test_pages_health_and_metrics_take_any_query(client: TestClient, path: str) -> None:
    assert client.get(path, params={"v": "1"}).status_code == 200
