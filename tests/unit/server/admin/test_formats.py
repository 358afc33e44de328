"""Rows as JSON, npy or safetensors: what Accept chooses, and that every form holds the same values."""

from __future__ import annotations

import io
import json
import struct

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import INITIAL_WEIGHT, FakeCluster

from shardam_proto.errors import BadOption
from shardam_proto.schema import TableSpec
from shardam_server.admin.answer_models import ManyTablesModel
from shardam_server.admin.formats import MANY_TABLES_TYPES, NPY_TYPE, ONE_TABLE_TYPES, SAFETENSORS_TYPES, choose_type
from shardam_server.admin.problems import HttpOnlyError

JSON, NPY, SAFETENSORS, OCTETS = ONE_TABLE_TYPES
PATH = "/v1/tables/items/rows"


@pytest.fixture
def items(shards: FakeCluster) -> FakeCluster:
    """Three shards with ids 0 to 29 of two tables; a row's weight is its id in every element, plus a half in `users`."""
    for spec, offset in ((TableSpec("items", 2), 0.0), (TableSpec("users", 3), 0.5)):
        shards.add_table(spec)
        for row_id in range(30):
            shards.put(spec.name, row_id, np.full(spec.dim, row_id + offset))
    return shards


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/html,application/xhtml+xml,*/*;q=0.8", JSON),
        (NPY, NPY),
        ("APPLICATION/X-NPY", NPY),
        (SAFETENSORS, SAFETENSORS),
        (OCTETS, OCTETS),
        (f"{NPY};q=0.5, {SAFETENSORS};q=0.9", SAFETENSORS),
        (f"application/json;q=0, {NPY};q=0.001", NPY),
        (f"*/*, {JSON};q=0.1", NPY),
        (f"text/csv, {NPY}", NPY),
        ("application/json; charset=utf-8; q=1.000", JSON),
    ],
)
def test_accept_chooses_by_quality_then_by_what_is_offered_first(accept: str, chosen: str) -> None:
    assert choose_type(accept, ONE_TABLE_TYPES) == chosen


@pytest.mark.parametrize("accept", ["text/csv", "text/*", f"{JSON};q=0", "x", "application/json;q=0, */*;q=0"])
def test_a_form_that_is_not_offered_is_refused_with_the_list(accept: str) -> None:
    with pytest.raises(HttpOnlyError, match=NPY) as caught:
        choose_type(accept, ONE_TABLE_TYPES)
    assert caught.value.metadata["offered"] == ", ".join(ONE_TABLE_TYPES)


@pytest.mark.parametrize("quality", ["2", "-1", "abc", "0.1234", "", "nan"])
def test_a_quality_that_is_no_quality_is_refused(quality: str) -> None:
    with pytest.raises(BadOption, match="number from 0 to 1"):
        choose_type(f"application/json;q={quality}", ONE_TABLE_TYPES)


def batch_get(client: TestClient, accept: str, **options: object) -> httpx2.Response:
    body = {"ids": ["7", "1000", "7", "29"], **options}
    return client.post(f"{PATH}:batchGet", json=body, headers={"accept": accept})


def test_npy_holds_the_weights_in_the_order_asked_for(client: TestClient, items: FakeCluster) -> None:
    response = batch_get(client, NPY)
    assert (response.status_code, response.headers["content-type"], response.headers["vary"]) == (200, NPY, "Accept")
    assert response.headers["x-table-step"] == "3"
    weight = np.load(io.BytesIO(response.content), allow_pickle=False)
    assert weight.dtype == np.float32
    assert weight.tolist() == [[7, 7], [INITIAL_WEIGHT] * 2, [7, 7], [29, 29]]
    zeros = np.load(io.BytesIO(batch_get(client, NPY, missing="zero").content))
    assert zeros[1].tolist() == [0, 0]
    nothing = np.load(io.BytesIO(batch_get(client, NPY, ids=[]).content))
    assert nothing.shape == (0, 2)


@pytest.mark.parametrize("media_type", SAFETENSORS_TYPES)
def test_safetensors_hold_ids_found_weight_and_the_state_asked_for(
    client: TestClient, items: FakeCluster, media_type: str
) -> None:
    response = batch_get(client, media_type)
    assert (response.status_code, response.headers["content-type"]) == (200, media_type)
    tensors = safetensors.numpy.load(response.content)
    assert sorted(tensors) == ["found", "ids", "weight"]
    tensors = safetensors.numpy.load(batch_get(client, media_type, include="optimizer").content)
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()} == {
        "ids": ("int64", (4,)),
        "found": ("bool", (4,)),
        "weight": ("float32", (4, 2)),
        "exp_avg": ("float32", (4, 2)),
        "exp_avg_sq": ("float32", (4, 2)),
        "step": ("int64", (4,)),
    }
    assert tensors["ids"].tolist() == [7, 1000, 7, 29]
    assert tensors["found"].tolist() == [True, False, True, True]
    assert tensors["exp_avg_sq"].tolist() == [[49, 49], [0, 0], [49, 49], [841, 841]]
    assert tensors["step"].tolist() == [3, 0, 3, 3]


def metadata_of(content: bytes) -> dict[str, str]:
    (size,) = struct.unpack("<Q", content[:8])
    metadata: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return metadata


def test_non_finite_values_travel_in_binary_forms_as_they_are(client: TestClient, items: FakeCluster) -> None:
    items.put("items", 7, [np.nan, -np.inf])
    weight = np.load(io.BytesIO(batch_get(client, NPY).content))
    np.testing.assert_array_equal(weight[0], np.array([np.nan, -np.inf], np.float32))


def test_a_walk_in_safetensors_follows_the_cursor_header(client: TestClient, items: FakeCluster) -> None:
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        response = client.get(PATH, params={"cursor": cursor, "limit": 7}, headers={"accept": SAFETENSORS})
        tensors = safetensors.numpy.load(response.content)
        assert tensors["found"].all()
        assert tensors["weight"][:, 0].tolist() == tensors["ids"].tolist()
        seen += tensors["ids"].tolist()
        cursor = response.headers.get("x-next-cursor")
        metadata = metadata_of(response.content)
        assert metadata.get("next_cursor") == cursor
        assert json.loads(metadata["tables"])[0]["table_step"] == 3
    assert sorted(seen) == list(range(30))
    page = np.load(io.BytesIO(client.get(PATH, params={"limit": 1000}, headers={"accept": NPY}).content))
    assert sorted(page[:, 0].tolist()) == list(range(30))


def test_npy_with_optimizer_state_is_refused_not_cut(client: TestClient, items: FakeCluster) -> None:
    for response in (
        batch_get(client, NPY, include="optimizer"),
        client.get(PATH, params={"include": "optimizer"}, headers={"accept": NPY}),
    ):
        assert (response.status_code, response.json()["reason"]) == (400, "BAD_OPTION")
        assert SAFETENSORS in response.json()["detail"]


def test_an_unknown_form_is_406_on_every_route_that_offers_forms(client: TestClient, items: FakeCluster) -> None:
    headers = {"accept": "text/csv"}
    for response, offered in (
        (batch_get(client, "text/csv"), ONE_TABLE_TYPES),
        (client.get(PATH, headers=headers), ONE_TABLE_TYPES),
        (many(client, {"items": [1]}, accept="text/csv"), MANY_TABLES_TYPES),
        (many(client, {"items": [1]}, accept=NPY_TYPE), MANY_TABLES_TYPES),
    ):
        assert (response.status_code, response.json()["reason"]) == (406, "NOT_ACCEPTABLE")
        assert response.json()["offered"] == ", ".join(offered)
        assert response.headers["content-type"] == "application/problem+json"


def test_an_error_is_a_problem_whatever_form_was_asked_for(client: TestClient, items: FakeCluster) -> None:
    response = batch_get(client, SAFETENSORS, missing="error")
    assert (response.status_code, response.json()["reason"]) == (404, "UNKNOWN_ROW")


def many(client: TestClient, ids: dict[str, list[int]], accept: str = JSON, **options: object) -> httpx2.Response:
    tables = [{"table": table, "ids": [str(row_id) for row_id in row_ids]} for table, row_ids in ids.items()]
    return client.post("/v1/rows:batchGet", json={"tables": tables, **options}, headers={"accept": accept})


ASKED = {"users": [5, 1000, 5], "items": [29, 0]}


def test_many_tables_are_answered_as_each_alone(client: TestClient, items: FakeCluster) -> None:
    response = many(client, ASKED, include="optimizer")
    answer = ManyTablesModel.model_validate_json(response.content, extra="forbid")
    assert [entry.table for entry in answer.tables] == list(ASKED)
    for table, row_ids in ASKED.items():
        body = {"ids": [str(row_id) for row_id in row_ids], "include": "optimizer"}
        alone = client.post(f"/v1/tables/{table}/rows:batchGet", json=body).json()
        assert alone in response.json()["tables"]


def test_many_tables_in_safetensors_are_named_by_table(client: TestClient, items: FakeCluster) -> None:
    response = many(client, ASKED, SAFETENSORS, include="optimizer")
    tensors = safetensors.numpy.load(response.content)
    assert {name.partition("/")[0] for name in tensors} == set(ASKED)
    expected: dict[str, npt.ArrayLike] = {
        "users/ids": [5, 1000, 5],
        "users/weight": [[5.5] * 3, [INITIAL_WEIGHT] * 3, [5.5] * 3],
        "items/exp_avg": [[29, 29], [0, 0]],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values)
    assert [entry["table"] for entry in json.loads(metadata_of(response.content)["tables"])] == list(ASKED)


def test_each_shard_is_asked_once_per_table(client: TestClient, items: FakeCluster) -> None:
    before = [len(shard.seen_request_ids) for shard in items.shards]
    many(client, {"users": list(range(30)), "items": list(range(30))})
    calls = [len(shard.seen_request_ids) - count for shard, count in zip(items.shards, before, strict=True)]
    assert sorted(calls) == [2, 2, 3]  # one of them has been asked for the tables, too


@pytest.mark.parametrize(
    ("tables", "options", "status", "reason", "named"),
    [
        ([{"table": "items", "ids": ["1"]}, {"table": "nothing", "ids": ["1"]}], {}, 404, "UNKNOWN_TABLE", "nothing"),
        ([{"table": "user/id", "ids": ["1"]}], {}, 400, "BAD_OPTION", "user/id"),
        ([{"table": "items", "ids": ["1"]}] * 2, {}, 400, "BAD_OPTION", "twice"),
        ([{"table": "items", "ids": ["1"] * 9999}, {"table": "users", "ids": ["1", "2"]}], {}, 413, "TOO_MANY_IDS", "10001"),
        ([{"table": "users", "ids": ["1", "77"]}], {"missing": "error"}, 404, "UNKNOWN_ROW", "'users' do not exist: 77"),
        ([{"table": "items", "ids": ["1.5"]}], {}, 400, "ID_DTYPE", "1.5"),
        ([], {}, 422, "BAD_OPTION", "tables"),
        ([{"table": f"t{n}", "ids": []} for n in range(1001)], {}, 422, "BAD_OPTION", "1000"),
        ([{"table": "items"}], {}, 422, "BAD_OPTION", "tables.0.ids"),
        ([{"table": "items", "ids": [], "dim": 2}], {}, 422, "BAD_OPTION", "known are table, ids"),
    ],
)
def test_a_wrong_request_for_many_tables_is_refused_whole(
    client: TestClient,
    items: FakeCluster,
    tables: list[object],
    options: dict[str, object],
    status: int,
    reason: str,
    named: str,
) -> None:
    response = client.post("/v1/rows:batchGet", json={"tables": tables, **options})
    assert (response.status_code, response.json()["reason"]) == (status, reason)
    assert named in response.json()["detail"]


def test_tables_too_wide_together_are_refused_with_what_fits(client: TestClient, shards: FakeCluster) -> None:
    for name in ("a", "b"):
        shards.add_table(TableSpec(name, 65_536))
    response = many(client, {"a": list(range(40)), "b": list(range(30))})
    assert (response.status_code, response.json()["reason"], response.json()["table"]) == (413, "MESSAGE_TOO_LARGE", "a")


def test_a_table_without_ids_is_answered_with_its_step(client: TestClient, items: FakeCluster) -> None:
    answer = many(client, {"users": [], "items": [1]}).json()["tables"]
    assert [(entry["table"], len(entry["rows"]), entry["table_step"]) for entry in answer] == [("users", 0, 3), ("items", 1, 3)]
    assert many(client, {"users": []}).json()["tables"][0]["rows"] == []


def test_a_shard_that_does_not_answer_fails_the_whole_batch(client: TestClient, items: FakeCluster) -> None:
    items.servers[1].stop(None).wait()
    response = many(client, {"users": list(range(30)), "items": list(range(30))})
    assert (response.status_code, response.json()["reason"]) == (503, "SHARD_UNREACHABLE")
    assert "tables" not in response.json()
