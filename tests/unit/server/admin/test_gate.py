"""Who may call the admin API: tokens, hosts."""

from __future__ import annotations

import base64

import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster

TOKEN = "s3cret-token"


def basic(password: str, user: str = "anyone") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def guarded(open_admin, shards: FakeCluster) -> TestClient:  # type: ignore[no-untyped-def]  # a fixture
    client: TestClient = open_admin(lambda: shards.view, token=TOKEN)
    return client


@pytest.mark.case("C132")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 404),
        ({"origin": "http://127.0.0.1:8080"}, 404),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, 404),
        ({"sec-fetch-site": "none"}, 404),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_page_of_another_site_changes_nothing(client: TestClient, method: str, headers: dict[str, str], status: int) -> None:
    response = client.request(method, "/v1/nothing", headers=headers)
    assert response.status_code == status
    assert response.json()["reason"] == {403: "BAD_ORIGIN", 404: "UNKNOWN_ROUTE"}[status]
    assert client.get("/v1/cluster", headers=headers).status_code == 200  # what is read reaches no other site


@pytest.mark.parametrize("path", ["/", "/v1/cluster", "/docs", "/openapi.json", "/metrics", "/page/main.js", "/v1/nothing"])
def test_every_route_but_health_needs_the_token(guarded: TestClient, path: str) -> None:
    response = guarded.get(path)
    assert response.status_code == 401
    assert response.json()["reason"] == "BAD_TOKEN"
    assert response.headers.get_list("www-authenticate") == ['Basic realm="shardam", charset="UTF-8"', 'Bearer realm="shardam"']
    assert TOKEN not in response.text


def test_health_is_open(guarded: TestClient) -> None:
    assert guarded.get("/healthz").status_code == 200
    assert guarded.get("/readyz").status_code == 200


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(TOKEN), basic(TOKEN, user="")])
def test_the_token_opens_as_bearer_or_as_a_password(guarded: TestClient, shards: FakeCluster, value: str) -> None:
    assert guarded.get("/v1/shards", headers={"Authorization": value}).status_code == 200


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", basic("wrong"), "Basic ???", TOKEN],
)
def test_anything_else_does_not(guarded: TestClient, value: str) -> None:
    assert guarded.get("/v1/cluster", headers={"Authorization": value}).status_code == 401


def test_the_token_travels_to_the_shards(guarded: TestClient, shards: FakeCluster) -> None:
    guarded.get("/v1/tables", headers={"Authorization": f"Bearer {TOKEN}"})
    assert shards.shards[0].seen_metadata[-1]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST"])
def test_hosts_of_this_machine_are_served(client: TestClient, host: str) -> None:
    assert client.get("/v1/cluster", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "10.0.0.1"])
def test_a_name_that_was_made_to_point_here_is_refused(client: TestClient, host: str) -> None:
    response = client.get("/v1/cluster", headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["reason"] == "BAD_HOST"
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


def test_a_wide_bind_serves_every_host(open_admin, shards: FakeCluster) -> None:  # type: ignore[no-untyped-def]  # a fixture
    client = open_admin(lambda: shards.view, host="0.0.0.0")
    assert client.get("/v1/cluster", headers={"Host": "admin.example"}).status_code == 200
