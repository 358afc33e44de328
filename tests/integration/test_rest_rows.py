"""Rows of real shards through REST: the same values, ids and places as over gRPC, and nothing created by reading."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterator

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from shardam_testing.admin import RawCluster, raw_cluster, running_admin
from shardam_testing.processes import running_shards

from shardam_proto.errors import NonFiniteGradient
from shardam_proto.routing import buckets_of
from shardam_proto.schema import Normal, TableSpec
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.admin.answer_models import ManyTablesModel, RowPageModel, RowsModel, SingleRowModel, TableModel

LONG_IDS = [2**53 + 1, -1, -(2**63), 2**63 - 1, 6221888200042590280, 0]
NAMES = (f"t{number}" for number in itertools.count())


@dataclasses.dataclass
class Fronts:
    """The two fronts of one cluster."""

    grpc: RawCluster
    rest: httpx2.Client


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("rest")
    with (
        running_shards(folder, 3) as shards,
        running_admin(shards.valkey.url, folder) as admin,
        raw_cluster(shards.view()) as grpc,
        admin.client() as rest,
    ):
        yield Fronts(grpc, rest)


@pytest.fixture
def table(fronts: Fronts) -> common_pb2.TableInfo:
    """A table with rows for LONG_IDS after two steps."""
    info = fronts.grpc.create(TableSpec(next(NAMES), 3, init=Normal(0, 0.05)))
    gradients = np.random.default_rng(0).standard_normal((2, len(LONG_IDS), 3))
    for gradient in gradients:
        fronts.grpc.push(info, LONG_IDS, gradient)
    return info


def batch_get(fronts: Fronts, table: common_pb2.TableInfo, ids: list[int], **options: object) -> httpx2.Response:
    body = {"ids": [str(row_id) for row_id in ids], **options}
    return fronts.rest.post(f"/v1/tables/{table.spec.name}/rows:batchGet", json=body)


def num_rows(fronts: Fronts, table: common_pb2.TableInfo) -> int | None:
    return TableModel.model_validate(fronts.rest.get(f"/v1/tables/{table.spec.name}").json()).num_rows


@pytest.mark.case("C038")
def test_both_fronts_answer_the_same_rows_bit_for_bit(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    asked = [*LONG_IDS, 77, LONG_IDS[0], -77]
    answer = RowsModel.model_validate_json(batch_get(fronts, table, asked, include="optimizer").content)
    assert [row.id for row in answer.rows] == [str(row_id) for row_id in asked]
    for row, row_id, owner in zip(answer.rows, asked, fronts.grpc.owners(asked), strict=True):
        columns = fronts.grpc.clients[owner].read(table, [row_id]).rows
        assert (row.shard, row.found) == (owner, bool(columns.found[0]))
        assert row.optimizer is not None
        for shown, stored in (
            (row.weight, columns.weight),
            (row.optimizer.exp_avg, columns.exp_avg),
            (row.optimizer.exp_avg_sq, columns.exp_avg_sq),
        ):
            assert np.array(shown, np.float64).astype("<f4").tobytes() == stored
        counters = [columns.step, columns.last_touched_step, columns.change_number]
        shown_counters = [row.optimizer.step, row.last_touched_step, int(row.change_number)]
        assert shown_counters == [int.from_bytes(counter, "little") for counter in counters]
    assert answer.table_step == 2
    assert set(answer.table_steps.values()) == {2}


@pytest.mark.case("C038")
@pytest.mark.parametrize("row_id", LONG_IDS)
def test_a_long_id_comes_back_digit_for_digit(fronts: Fronts, table: common_pb2.TableInfo, row_id: int) -> None:
    response = fronts.rest.get(f"/v1/tables/{table.spec.name}/rows/{row_id}")
    assert f'"id":"{row_id}"' in response.text
    assert response.status_code == 200


@pytest.mark.case("C040")
def test_reading_unknown_ids_creates_no_row(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    before = num_rows(fronts, table)
    answer = RowsModel.model_validate_json(batch_get(fronts, table, list(range(1000, 2000))).content)
    assert not any(row.found for row in answer.rows)
    for shard, client in enumerate(fronts.grpc.clients):  # what training would see, from the pull itself
        rows = [row for row in answer.rows if row.shard == shard]
        pulled = client.pull(table, [int(row.id) for row in rows])
        np.testing.assert_array_equal(np.array([row.weight for row in rows], np.float32), pulled)
    response = fronts.rest.get(f"/v1/tables/{table.spec.name}/rows/1000")
    assert (response.status_code, response.json()["reason"]) == (404, "UNKNOWN_ROW")
    assert response.json()["initial_weight"] == answer.rows[0].weight
    assert before == len(LONG_IDS)
    assert num_rows(fronts, table) == before


@pytest.mark.case("C049")
def test_the_owner_that_is_shown_is_the_shard_that_has_the_row(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    for row_id in LONG_IDS:
        row = SingleRowModel.model_validate(fronts.rest.get(f"/v1/tables/{table.spec.name}/rows/{row_id}").json())
        assert row.bucket == int(buckets_of(np.array([row_id], np.int64))[0])
        assert row_id in scan(fronts.grpc, row.shard, table)
    known = fronts.rest.get(f"/v1/tables/{table.spec.name}/rows/12345").json()
    assert known["shard"] == int(fronts.grpc.owners([12345])[0])


def scan(grpc: RawCluster, shard: int, table: common_pb2.TableInfo) -> list[int]:
    client = grpc.clients[shard]
    request = row_pb2.ScanRowsRequest(header=client.header(), table_id=table.table_id, max_rows=1000)
    answer: row_pb2.ScanRowsResponse = client.call(client.row.ScanRows, request)
    return [int(row_id) for row_id in np.frombuffer(answer.rows.row_ids, "<i8")]


@pytest.mark.parametrize("limit", [7, 1000])
def test_a_walk_sees_each_row_once_over_three_shards(fronts: Fronts, limit: int) -> None:
    info = fronts.grpc.create(TableSpec(next(NAMES), 2))
    ids = [*LONG_IDS, *range(10, 200)]
    fronts.grpc.push(info, ids, np.ones((len(ids), 2)))
    assert {int(owner) for owner in fronts.grpc.owners(ids)} == {0, 1, 2}
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        parameters = {"cursor": cursor, "limit": str(limit), "include": "optimizer"}
        response = fronts.rest.get(f"/v1/tables/{info.spec.name}/rows", params=parameters)
        page = RowPageModel.model_validate_json(response.content)
        assert len(page.rows) <= limit
        assert all(row.found and row.optimizer is not None for row in page.rows)
        seen += [int(row.id) for row in page.rows]
        cursor = page.next_cursor
    assert sorted(seen) == sorted(ids)


def test_a_push_moves_step_change_number_and_etag(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    path = f"/v1/tables/{table.spec.name}/rows/-1"
    before = fronts.rest.get(path)
    assert fronts.rest.get(path).headers["etag"] == before.headers["etag"]
    fronts.grpc.push(table, [-1], [[1.0, 2.0, 3.0]])
    after = fronts.rest.get(path)
    assert after.headers["etag"] != before.headers["etag"]
    assert int(after.json()["change_number"]) > int(before.json()["change_number"])
    assert after.json()["optimizer"]["step"] == before.json()["optimizer"]["step"] + 1 == 3
    untouched = fronts.rest.get(f"/v1/tables/{table.spec.name}/rows/0").json()
    assert (untouched["last_touched_step"], untouched["table_step"]) == (2, 3)


@pytest.mark.case("C048")
def test_a_table_shows_its_step_options_memory_and_refusals(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    with pytest.raises(NonFiniteGradient):
        fronts.grpc.push(table, LONG_IDS, np.full((len(LONG_IDS), 3), np.nan))
    fronts.grpc.number -= 1  # a refused number stays open
    shown = TableModel.model_validate(fronts.rest.get(f"/v1/tables/{table.spec.name}").json())
    assert (shown.table_step, shown.num_rows, shown.nonfinite_pushes) == (2, len(LONG_IDS), 1)
    assert shown.last_options is not None
    assert (shown.last_options.lr, shown.last_options.betas, shown.last_options.eps) == (0.1, (0.9, 0.999), 1e-8)
    assert shown.memory.weight_bytes == shown.memory.exp_avg_bytes == shown.memory.exp_avg_sq_bytes == len(LONG_IDS) * 12
    assert shown.memory.record_bytes is not None
    assert shown.memory.record_bytes >= 3 * len(LONG_IDS) * 12
    assert sum(shard.num_rows for shard in shown.shards) == len(LONG_IDS)


def test_the_largest_batch_is_answered_and_a_larger_one_refused(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    ids = list(range(-5000, 5000))
    rows = batch_get(fronts, table, ids).json()["rows"]
    assert [row["id"] for row in rows] == [str(row_id) for row_id in ids]
    response = batch_get(fronts, table, [*ids, 5000])
    assert (response.status_code, response.json()["reason"], response.json()["limit"]) == (413, "TOO_MANY_IDS", "10000")


def columns_over_grpc(fronts: Fronts, table: common_pb2.TableInfo, row_ids: list[int]) -> dict[str, npt.NDArray[np.generic]]:
    owners = fronts.grpc.owners(row_ids)
    rows = [fronts.grpc.clients[owner].read(table, [row_id]).rows for row_id, owner in zip(row_ids, owners, strict=True)]

    def stacked(name: str, dtype: str) -> npt.NDArray[np.generic]:
        return np.array([np.frombuffer(getattr(row, name), dtype) for row in rows])

    return {
        "ids": np.array(row_ids, np.int64),
        "found": stacked("found", "u1")[:, 0].astype(bool),
        "step": stacked("step", "<i8")[:, 0],
        **{name: stacked(name, "<f4") for name in ("weight", "exp_avg", "exp_avg_sq")},
    }


def test_binary_forms_hold_the_bits_that_grpc_reads(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    asked = [*LONG_IDS, 1000, LONG_IDS[0]]
    body = {"ids": [str(row_id) for row_id in asked]}
    path = f"/v1/tables/{table.spec.name}/rows:batchGet"
    expected = columns_over_grpc(fronts, table, asked)
    headers = {"accept": "application/vnd.safetensors"}
    response = fronts.rest.post(path, json={**body, "include": "optimizer"}, headers=headers)
    tensors = safetensors.numpy.load(response.content)
    assert sorted(tensors) == sorted(expected)
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.tobytes()) == (expected[name].dtype, expected[name].tobytes()), name
    weight = np.load(io.BytesIO(fronts.rest.post(path, json=body, headers={"accept": "application/x-npy"}).content))
    assert weight.tobytes() == expected["weight"].tobytes()


def test_many_tables_are_read_in_one_request(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    other = fronts.grpc.create(TableSpec(next(NAMES), 2))
    fronts.grpc.push(other, [1, 2], [[1.0, 2.0]] * 2)
    asked = [(other, [2, 1, 77]), (table, LONG_IDS)]
    tables = [{"table": info.spec.name, "ids": [str(row_id) for row_id in row_ids]} for info, row_ids in asked]
    response = fronts.rest.post("/v1/rows:batchGet", json={"tables": tables, "include": "optimizer"})
    answer = ManyTablesModel.model_validate_json(response.content, extra="forbid")
    for entry, (info, row_ids) in zip(answer.tables, asked, strict=True):
        expected = columns_over_grpc(fronts, info, row_ids)
        assert (entry.table, entry.dim) == (info.spec.name, info.spec.dim)
        assert [int(row.id) for row in entry.rows] == row_ids
        weight = np.array([row.weight for row in entry.rows], np.float64).astype("<f4")
        assert weight.tobytes() == expected["weight"].tobytes()
    assert [entry.table_step for entry in answer.tables] == [1, 2]
    assert num_rows(fronts, other) == 2
