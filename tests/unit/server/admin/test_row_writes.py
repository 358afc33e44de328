"""What a request to change a row may say; whatever is wrong with it is found before any shard is asked to change something."""

from __future__ import annotations

import json

import httpx2
import numpy as np
import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster

from shardam_proto.errors import BadOption, NonFiniteState
from shardam_proto.schema import TableSpec
from shardam_server.admin.etags import Precondition, RowTag, StateId
from shardam_server.admin.row_writes import as_column, place_of
from shardam_server.admin.shard_calls import ShardCalls

PATH = "/v1/tables/items/rows/5"
GOOD = {"weight": [1.0, 2]}


@pytest.fixture
def items(shards: FakeCluster) -> FakeCluster:
    """Three shards that refuse every change, with a table of dim 2 and one of ten ids."""
    shards.add_table(TableSpec("items", 2))
    shards.add_table(TableSpec("bounded", 2, num_embeddings=10))
    return shards


def reason_of(response: httpx2.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["reason"]


def test_a_good_request_reaches_the_shards(client: TestClient, items: FakeCluster) -> None:
    # They refuse it, being fakes; all other tests here rely on that a request that is found wrong does not come so far.
    assert reason_of(client.put(PATH, json=GOOD)) == (400, "VERSION_MISMATCH")  # fake shards know no changes


@pytest.mark.case("C125")
@pytest.mark.parametrize("text", ['"NaN"', '"Infinity"', '"-Infinity"', "NaN", "1e999", "-Infinity", "1e39", "-3.5e38"])
@pytest.mark.parametrize("column", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_non_finite_value_is_refused_with_its_column_and_place(
    client: TestClient, items: FakeCluster, column: str, text: str
) -> None:
    columns = {"weight": "[0, 1]", "exp_avg": "[0, 1]", "exp_avg_sq": "[0, 1]", column: f"[0, {text}]"}
    body = (
        f'{{"weight": {columns["weight"]}, "optimizer": {{"exp_avg": {columns["exp_avg"]}, '
        f'"exp_avg_sq": {columns["exp_avg_sq"]}}}}}'
    )
    response = client.put(PATH, content=body, headers={"content-type": "application/json"})
    assert reason_of(response) == (400, "NON_FINITE_STATE")
    assert (response.json()["column"], response.json()["position"]) == (column, "1")
    assert column in response.json()["detail"]


def test_a_negative_second_moment_is_refused(client: TestClient, items: FakeCluster) -> None:
    response = client.put(PATH, json={**GOOD, "optimizer": {"exp_avg": [-1, -1], "exp_avg_sq": [0, -1e-30]}})
    assert reason_of(response) == (400, "NON_FINITE_STATE")
    assert "not negative" in response.json()["detail"]


@pytest.mark.parametrize(
    ("body", "column", "shown"),
    [
        ({"weight": [1.0]}, "weight", "1"),
        ({"weight": []}, "weight", "0"),
        ({"weight": [1.0] * 3}, "weight", "3"),
        ({**GOOD, "optimizer": {"exp_avg": [1.0] * 4}}, "exp_avg", "4"),
        ({**GOOD, "optimizer": {"exp_avg_sq": []}}, "exp_avg_sq", "0"),
    ],
)
def test_a_column_of_another_length_than_dim_is_refused(
    client: TestClient, items: FakeCluster, body: object, column: str, shown: str
) -> None:
    response = client.put(PATH, json=body)
    assert reason_of(response) == (400, "WRONG_SHAPE")
    assert (response.json()["column"], response.json()["num_values"], response.json()["dim"]) == (column, shown, "2")


@pytest.mark.case("C125")
@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"weight": [1, "x"]}', "weight.1"),
        ('{"weight": [1, "1.5"]}', "weight.1"),
        ('{"weight": [1, null]}', "weight.1"),
        ('{"weight": [1, true]}', "weight.1"),
        ('{"weight": [1, [2]]}', "weight.1"),
        ('{"weight": "AAAA"}', "weight"),
        ("{}", "weight"),
        ('{"weight": [1, 2], "lr": "NaN"}', "lr"),
        ('{"weight": [1, 2], "lr": 1e999}', "lr"),
        ('{"weight": [1, 2], "optimizer": {"step": 3}}', "optimizer.step"),
        ('{"weight": [1, 2], "optimizer": {"lr": -1}}', "optimizer.lr"),
        ('{"weight": [1, 2], "optimizer": [1, 2]}', "optimizer"),
        ("[1, 2]", "body"),
    ],
)
def test_a_body_of_the_wrong_form_is_422_with_the_field(client: TestClient, items: FakeCluster, text: str, field: str) -> None:
    response = client.put(PATH, content=text, headers={"content-type": "application/json"})
    assert reason_of(response) == (422, "BAD_OPTION")
    assert [error["field"] for error in response.json()["errors"]] == [field]


@pytest.mark.parametrize("digits", [400, 4000, 5000])
def test_an_integer_beyond_every_float_is_refused_not_a_crash(client: TestClient, items: FakeCluster, digits: int) -> None:
    body = '{"weight": [1, ' + "9" * digits + "]}"
    response = client.put(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.json()["reason"] in ("NON_FINITE_STATE", "BAD_OPTION")


def test_the_widest_row_with_moments_fits_a_request(client: TestClient, shards: FakeCluster) -> None:
    shards.add_table(TableSpec("items", 65_536))
    column = [-1.2345678901234567e-100] * 65_536
    body = {"weight": column, "optimizer": {"exp_avg": column, "exp_avg_sq": [-value for value in column]}}
    text = json.dumps(body)
    assert len(text) > 4_500_000
    response = client.put(PATH, content=text, headers={"content-type": "application/json"})
    assert reason_of(response) == (400, "VERSION_MISMATCH")  # fake shards know no changes


@pytest.mark.parametrize("method", ["PUT", "DELETE", "CLEAR"])
@pytest.mark.parametrize(
    ("table", "row_id", "status", "reason"),
    [
        ("nothing", "5", 404, "UNKNOWN_TABLE"),
        ("bounded", "10", 400, "ID_OUT_OF_RANGE"),
        ("bounded", "-1", 400, "ID_OUT_OF_RANGE"),
        ("items", "1.5", 400, "ID_DTYPE"),
        ("items", "9223372036854775808", 400, "ID_DTYPE"),
        ("schema:Thing", "5", 400, "BAD_OPTION"),
    ],
)
def test_a_row_that_cannot_be_is_refused_whatever_is_done_to_it(
    client: TestClient, items: FakeCluster, method: str, table: str, row_id: str, status: int, reason: str
) -> None:
    assert reason_of(change(client, method, f"/v1/tables/{table}/rows/{row_id}", {})) == (status, reason)


def change(client: TestClient, method: str, path: str, headers: dict[str, str]) -> httpx2.Response:
    match method:
        case "PUT":
            return client.put(path, json=GOOD, headers=headers)
        case "DELETE":
            return client.delete(path, headers=headers)
        case _:
            return client.post(f"{path}:clearMoments", headers=headers)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "CLEAR"])
@pytest.mark.parametrize(
    "headers",
    [
        {"if-match": '"0:1:1"'},
        {"if-match": "0:1:1:2"},
        {"if-match": 'W/"0:1:1:2"'},
        {"if-match": '"0:1:1:2", "0:1:1:3"'},
        {"if-match": '"0:1:1:99999999999999999999"'},
        {"if-match": ""},
        {"if-none-match": '"0:1:1:2"'},
        {"if-none-match": "*", "if-match": "*"},
    ],
)
def test_a_condition_that_is_not_understood_is_refused_not_ignored(
    client: TestClient, items: FakeCluster, method: str, headers: dict[str, str]
) -> None:
    assert reason_of(change(client, method, PATH, headers)) == (400, "BAD_OPTION")


@pytest.mark.parametrize("method", ["DELETE", "CLEAR"])
def test_only_put_can_ask_that_a_row_does_not_exist(client: TestClient, items: FakeCluster, method: str) -> None:
    assert reason_of(change(client, method, PATH, {"if-none-match": "*"})) == (400, "BAD_OPTION")


def test_a_tag_reads_back_as_it_was_written() -> None:
    tag = RowTag(StateId(3, 2**63 - 1, 7), 2**64 - 1)
    assert RowTag.parse(str(tag)) == tag
    assert Precondition.parse(str(tag), None) == Precondition(tag)
    with pytest.raises(BadOption):
        RowTag.parse(f'"0:1:1:{2**64}"')


def test_values_are_rounded_to_nearest_even_as_float32(client: TestClient, items: FakeCluster) -> None:
    calls: ShardCalls = client.app.state.context.calls  # type: ignore[attr-defined]  # the app of create_app
    place = place_of(calls, items.shards[0].tables["items"], 5)
    halfway = 1 + 2.0**-24
    column = as_column([halfway, float(np.float32(3.4028235e38))], "weight", place)
    assert column.tolist() == [1.0, 3.4028234663852886e38]
    assert as_column([-0.0, 1e-46], "exp_avg_sq", place).tobytes() == np.array([-0.0, 0.0], np.float32).tobytes()
    with pytest.raises(NonFiniteState, match="1e\\+39"):
        as_column([0, 1e39], "weight", place)
