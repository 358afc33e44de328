"""A table as one file over REST: what is sent is what the shards have; what is wrong is refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import httpx2
import numpy as np
import pytest
import safetensors.numpy
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster

from shardam_proto.schema import TableSpec
from shardam_proto.table_files import TableFile

SPEC = TableSpec("items", 4)
ROW_IDS = [-3, 0, 5, 7, 2**53 + 1]


@pytest.fixture
def filled(shards: FakeCluster) -> FakeCluster:
    shards.add_table(SPEC)
    for row_id in ROW_IDS:
        shards.put("items", row_id, np.full(4, row_id % 1000))
    for shard in shards.shards:
        shard.tables["items"].num_rows = len(shard.rows)
    return shards


def is_problem(response: httpx2.Response, status: int, reason: str) -> bool:
    return bool(response.status_code == status and response.json()["reason"] == reason)


def read(content: bytes, path: Path) -> TableFile:
    path.write_bytes(content)
    file = TableFile(path)
    file.check_rows()
    return file


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_an_export_holds_all_rows_in_the_order_of_their_ids(
    client: TestClient, filled: FakeCluster, tmp_path: Path, form: str
) -> None:
    response = client.get("/v1/tables/items:export", params={"format": form})
    assert response.status_code == 200
    assert response.headers["X-Table-Step"] == "3"
    assert f'filename="items.{form}"' in response.headers["content-disposition"]
    file = read(response.content, tmp_path / f"items.{form}")
    (rows,) = file.blocks()
    assert rows.row_ids.tolist() == ROW_IDS
    assert rows.weight[:, 0].tolist() == [row_id % 1000 for row_id in ROW_IDS]
    assert np.array_equal(rows.exp_avg_sq, rows.weight**2)
    assert (file.spec, file.info.table_step) == (SPEC, 3)


def test_an_export_says_whether_the_table_was_changed_meanwhile(client: TestClient, filled: FakeCluster) -> None:
    assert client.get("/v1/tables/items:export").headers["X-One-Moment"] == "true"
    filled.put("items", 5, np.ones(4), change_number=10)  # the shards' change number is 9 in every answer
    assert client.get("/v1/tables/items:export").headers["X-One-Moment"] == "false"


def test_an_export_leaves_no_file_behind(
    client: TestClient, filled: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client.get("/v1/tables/items:export")
    filled.shards[1].crash = True
    assert client.get("/v1/tables/items:export").status_code == 500
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_does_not_exist_has_no_file(client: TestClient, filled: FakeCluster) -> None:
    assert is_problem(client.get("/v1/tables/nothing:export"), 404, "UNKNOWN_TABLE")
    assert is_problem(client.get("/v1/tables/items:export", params={"format": "csv"}), 422, "BAD_OPTION")


def test_an_import_of_rows_into_a_table_that_has_some_needs_overwrite(client: TestClient, filled: FakeCluster) -> None:
    content = client.get("/v1/tables/items:export").content
    response = client.post("/v1/tables/items:import", content=content)
    assert is_problem(response, 409, "CHECKPOINT_MISMATCH")
    assert "has 5 rows and step 3, which the file would replace; import with overwrite" in response.json()["detail"]


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_an_import_tells_the_form_of_a_file_by_its_first_bytes(client: TestClient, filled: FakeCluster, form: str) -> None:
    content = client.get("/v1/tables/items:export", params={"format": form}).content
    response = client.post("/v1/tables/items:import", content=content)
    assert is_problem(response, 409, "CHECKPOINT_MISMATCH"), "the file was read"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no safetensors", "CHECKPOINT_DAMAGED"),
        (safetensors.numpy.save({"weight": np.zeros((2, 4), np.float32)}), "BAD_OPTION"),
    ],
)
def test_a_body_that_is_no_exported_table_is_refused(
    client: TestClient, filled: FakeCluster, content: bytes, reason: str
) -> None:
    response = client.post("/v1/tables/items:import", content=content)
    assert response.json()["reason"] == reason
    assert 400 <= response.status_code < 500


def test_a_body_above_the_limit_is_refused_with_the_limit_and_the_remedy(client: TestClient, filled: FakeCluster) -> None:
    response = client.post("/v1/tables/items:import", content=bytes(2**20 + 1))
    assert is_problem(response, 413, "MESSAGE_TOO_LARGE")
    assert "more than 1048576 bytes" in response.json()["detail"]
    assert "--max-import-mib" in response.json()["detail"]
