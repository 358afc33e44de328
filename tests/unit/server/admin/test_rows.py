"""Reading rows through REST: order, duplicates, what is missing, shards that are away, values JSON cannot write."""

from __future__ import annotations

import dataclasses
import json
from typing import NoReturn

import httpx2
import numpy as np
import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import INITIAL_WEIGHT, FakeCluster

from shardam_proto.registry import ShardEntry
from shardam_proto.routing import buckets_of
from shardam_proto.schema import TableSpec
from shardam_server.admin.answer_models import ProblemModel, RowPageModel, RowsModel, SingleRowModel

SPEC = TableSpec("items", 2)


def strict(text: str) -> object:
    def refuse(token: str) -> NoReturn:
        raise AssertionError(f"{token} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def items(shards: FakeCluster) -> FakeCluster:
    """Three shards with ids 0 to 29; a row's weight is its id twice."""
    shards.add_table(SPEC)
    for row_id in range(30):
        shards.put("items", row_id, [row_id, row_id], change_number=row_id + 1)
    assert all(shard.rows for shard in shards.shards)
    return shards


def batch_get(client: TestClient, ids: object, **options: object) -> httpx2.Response:
    return client.post("/v1/tables/items/rows:batchGet", json={"ids": ids, **options})


def test_batch_get_keeps_the_order_and_the_duplicates(client: TestClient, items: FakeCluster) -> None:
    ids = ["7", "3", "7", "29", "0", "3"]
    response = batch_get(client, ids, include="optimizer")
    assert response.status_code == 200
    answer = RowsModel.model_validate_json(response.content, extra="forbid")
    assert [row.id for row in answer.rows] == ids
    assert [row.weight for row in answer.rows] == [[float(text)] * 2 for text in ids]
    assert [row.optimizer.exp_avg_sq[0] for row in answer.rows if row.optimizer] == [float(text) ** 2 for text in ids]
    assert answer.table_step == 3
    assert all(row.found for row in answer.rows)


def test_batch_get_gives_no_moments_unless_asked(client: TestClient, items: FakeCluster) -> None:
    rows = batch_get(client, ["1", "2"]).json()["rows"]
    assert all("optimizer" not in row for row in rows)


def test_batch_get_of_no_ids_is_answered_with_the_table_step(client: TestClient, items: FakeCluster) -> None:
    answer = batch_get(client, []).json()
    assert (answer["rows"], answer["table_step"]) == ([], 3)


@pytest.mark.case("C040")
def test_a_missing_row_is_answered_as_the_request_says(client: TestClient, items: FakeCluster) -> None:
    before = [len(shard.rows) for shard in items.shards]
    for missing, value in (("init", INITIAL_WEIGHT), ("zero", 0.0)):
        rows = batch_get(client, ["1", "1000"], missing=missing).json()["rows"]
        assert [row["found"] for row in rows] == [True, False]
        assert [row["weight"] for row in rows] == [[1.0, 1.0], [value, value]]
    response = batch_get(client, ["1", "1000", "-5"], missing="error")
    assert response.status_code == 404
    assert response.json()["reason"] == "UNKNOWN_ROW"
    assert response.json()["row_ids"] == "1000, -5"
    assert [len(shard.rows) for shard in items.shards] == before


def test_too_many_ids_are_refused_with_the_limit(client: TestClient, items: FakeCluster) -> None:
    assert batch_get(client, ["1"] * 10_000).status_code == 200
    response = batch_get(client, ["1"] * 10_001)
    assert response.status_code == 413
    problem = response.json()
    assert (problem["reason"], problem["limit"]) == ("TOO_MANY_IDS", "10000")


def test_a_body_beyond_all_bounds_is_refused(client: TestClient, items: FakeCluster) -> None:
    response = batch_get(client, ["1" * 19] * 300_000)
    assert response.status_code == 413
    assert response.json()["reason"] == "MESSAGE_TOO_LARGE"


def test_rows_too_wide_for_one_answer_are_refused_with_the_number_that_fits(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("items", 65_536))
    response = batch_get(client, [str(row_id) for row_id in range(100)])
    assert response.status_code == 413
    assert response.json()["limit"] == "64"


@pytest.mark.parametrize("ids", [["abc"], [1.5], [True], [None], ["92233720368547760001"], [2**60], ["1" * 5000], [["1"]]])
def test_bad_ids_in_a_body_are_refused(client: TestClient, items: FakeCluster, ids: list[object]) -> None:
    response = batch_get(client, ids)
    assert response.status_code == 400
    assert response.json()["reason"] == "ID_DTYPE"


@pytest.mark.parametrize(
    ("body", "field"),
    [({"ids": "5"}, "ids"), ({}, "ids"), ({"ids": [], "missing": "skip"}, "missing"), ({"ids": [], "opts": 1}, "opts")],
)
def test_a_wrong_request_names_its_field(client: TestClient, items: FakeCluster, body: object, field: str) -> None:
    response = client.post("/v1/tables/items/rows:batchGet", json=body)
    assert response.status_code == 422
    problem = response.json()
    assert problem["reason"] == "BAD_OPTION"
    assert [error["field"] for error in problem["errors"]] == [field]
    ProblemModel.model_validate(problem)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"ids": [' + b"1" * 5000 + b"]}", b""])
def test_a_body_that_is_no_json_is_a_problem(client: TestClient, items: FakeCluster, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/v1/tables/items/rows:batchGet", content=body, headers=headers)
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["reason"] == "BAD_OPTION"


def test_a_single_row_has_its_state_its_place_and_its_etag(client: TestClient, items: FakeCluster) -> None:
    response = client.get("/v1/tables/items/rows/7")
    assert response.status_code == 200
    row = SingleRowModel.model_validate_json(response.content, extra="forbid")
    ids = np.array([7], np.int64)
    assert (row.bucket, row.shard) == (int(buckets_of(ids)[0]), int(items.route_map.shards_of(ids)[0]))
    assert row.optimizer is not None
    assert (row.weight, row.optimizer.exp_avg, row.optimizer.exp_avg_sq) == ([7.0, 7.0], [7.0, 7.0], [49.0, 49.0])
    assert (row.optimizer.step, row.last_touched_step, row.table_step, row.change_number) == (3, 1, 3, "8")
    assert response.headers["etag"] == f'"{row.shard}:2:1:8"'


@pytest.mark.case("C049")
def test_an_unknown_row_is_404_with_its_owner_and_initial_weight(client: TestClient, items: FakeCluster) -> None:
    response = client.get("/v1/tables/items/rows/-1")
    assert response.status_code == 404
    problem = response.json()
    assert problem["reason"] == "UNKNOWN_ROW"
    assert problem["row_id"] == "-1"
    assert problem["shard"] == int(items.route_map.shards_of(np.array([-1], np.int64))[0])
    assert problem["initial_weight"] == [INITIAL_WEIGHT] * 2


@pytest.mark.case("C127")
@pytest.mark.parametrize("text", ["abc", "1e3", "%20", "92233720368547760001", "1" * 5000, "1.0", "+1", "nan", "%D9%A5"])
def test_a_bad_id_in_a_path_is_400(client: TestClient, items: FakeCluster, text: str) -> None:
    response = client.get(f"/v1/tables/items/rows/{text}")
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["reason"] == "ID_DTYPE"


@pytest.mark.case("C124")
def test_rows_with_non_finite_values_are_strict_json_and_flagged(client: TestClient, items: FakeCluster) -> None:
    items.put("items", 5, [np.nan, np.inf])
    row = strict(client.get("/v1/tables/items/rows/5").text)
    assert isinstance(row, dict)
    assert row["weight"] == ["NaN", "Infinity"]
    assert row["has_nonfinite"] is True
    page = strict(client.get("/v1/tables/items/rows", params={"include": "optimizer"}).text)
    assert isinstance(page, dict)
    assert {row["id"] for row in page["rows"] if row["has_nonfinite"]} == {"5"}
    rows = batch_get(client, ["5", "6"]).json()["rows"]
    assert [row["has_nonfinite"] for row in rows] == [True, False]


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_walk_by_cursor_sees_each_row_once_over_all_shards(client: TestClient, items: FakeCluster, limit: int) -> None:
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        response = client.get("/v1/tables/items/rows", params={"cursor": cursor, "limit": limit})
        page = RowPageModel.model_validate_json(response.content, extra="forbid")
        assert len(page.rows) <= limit
        seen += [row.id for row in page.rows]
        cursor = page.next_cursor
    assert sorted(seen, key=int) == [str(row_id) for row_id in range(30)]


@pytest.mark.parametrize("cursor", ["x", "0:0", "0", "1:9:0", "2:0:0", "1:0:99999999999999999999", "1:-1:0", "1:0:1:2"])
def test_a_foreign_cursor_is_refused(client: TestClient, items: FakeCluster, cursor: str) -> None:
    response = client.get("/v1/tables/items/rows", params={"cursor": cursor})
    assert response.status_code == 400
    assert response.json()["reason"] == "BAD_OPTION"


@pytest.mark.parametrize("limit", ["0", "1001", "x", "1e2"])
def test_a_page_size_out_of_range_is_refused(client: TestClient, items: FakeCluster, limit: str) -> None:
    response = client.get("/v1/tables/items/rows", params={"limit": limit})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "limit")


def test_a_shard_that_is_not_registered_is_503_and_no_part_is_answered(client: TestClient, items: FakeCluster) -> None:
    owner = int(items.route_map.shards_of(np.array([7], np.int64))[0])
    other = next(row_id for row_id in range(30) if int(items.route_map.shards_of(np.array([row_id], np.int64))[0]) != owner)
    del items.registered[owner]
    response = batch_get(client, [str(other), "7"])
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    problem = response.json()
    assert (problem["reason"], problem["shard"]) == ("NOT_READY", str(owner))
    assert "rows" not in problem
    assert batch_get(client, [str(other)]).status_code == 200  # rows of the other shards are still served


def test_a_shard_that_does_not_answer_is_503(client: TestClient, items: FakeCluster) -> None:
    owner = int(items.route_map.shards_of(np.array([7], np.int64))[0])
    items.servers[owner].stop(None).wait()
    response = batch_get(client, ["7"])
    assert (response.status_code, response.json()["reason"]) == (503, "SHARD_UNREACHABLE")
    assert response.headers["retry-after"] == "1"


def test_a_shard_that_moved_is_found_at_its_new_address(client: TestClient, items: FakeCluster) -> None:
    assert client.get("/v1/tables/items/rows/7").status_code == 200
    for index in range(3):
        items.move(index)
    assert client.get("/v1/tables/items/rows/7").status_code == 200


def test_a_view_that_is_only_old_is_refreshed_before_the_answer_is_an_error(items: FakeCluster, open_admin) -> None:  # type: ignore[no-untyped-def]  # a fixture
    views = [dataclasses.replace(items.view, shards=stale_addresses(items)), items.view]
    client = open_admin(lambda: views.pop(0) if len(views) > 1 else views[0], timeout_s=2.0)
    assert client.get("/v1/tables/items/rows/7").status_code == 200


def stale_addresses(items: FakeCluster) -> dict[int, ShardEntry]:
    """Addresses at which no one listens."""
    return {index: dataclasses.replace(entry, address="127.0.0.1:1") for index, entry in items.registered.items()}


def test_unknown_and_impossible_tables_are_told_apart(client: TestClient, items: FakeCluster) -> None:
    response = client.get("/v1/tables/nothing/rows/1")
    assert (response.status_code, response.json()["reason"]) == (404, "UNKNOWN_TABLE")
    response = client.get("/v1/tables/schema:Thing/rows/1")
    assert (response.status_code, response.json()["reason"]) == (400, "BAD_OPTION")
