"""Rows changed through REST: what is written is what gRPC reads and trains on, and what is refused changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence

import httpx2
import numpy as np
import pytest
from shardam_testing.admin import RawCluster, raw_cluster, running_admin
from shardam_testing.processes import running_shards
from shardam_testing.raw_client import id_bytes

from shardam_proto.errors import ShardamError
from shardam_proto.schema import Constant, Normal, TableSpec
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.admin.answer_models import ChangedRowModel, DeletedRowModel, TableModel

NAMES = (f"t{number}" for number in itertools.count())
IDS = [5, -1, 2**53 + 1, -(2**63), 2**63 - 1, 8]
DIM = 3


@dataclasses.dataclass
class Fronts:
    """The two fronts of one cluster."""

    grpc: RawCluster
    rest: httpx2.Client

    def path(self, table: common_pb2.TableInfo, row_id: int) -> str:
        return f"/v1/tables/{table.spec.name}/rows/{row_id}"

    def read(self, table: common_pb2.TableInfo, row_id: int) -> row_pb2.RowColumns:
        """Reads a row with its moments over gRPC."""
        return self.grpc.clients[int(self.grpc.owners([row_id])[0])].read(table, [row_id]).rows

    def everything(self, table: common_pb2.TableInfo) -> list[bytes]:
        """Returns the table's step and all its rows on all shards, every byte."""
        found = []
        for client in self.grpc.clients:
            request = row_pb2.ScanRowsRequest(
                header=client.header(), table_id=table.table_id, include_optimizer=True, max_rows=1000
            )
            answer: row_pb2.ScanRowsResponse = client.call(client.row.ScanRows, request)
            found += [answer.rows.SerializeToString(deterministic=True), str(answer.table_step).encode()]
        return found

    def num_clients(self) -> list[int]:
        return [client.status().num_clients for client in self.grpc.clients]


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("rest-writes")
    with (
        running_shards(folder, 2) as shards,
        running_admin(shards.valkey.url, folder) as admin,
        raw_cluster(shards.view()) as grpc,
        admin.client() as rest,
    ):
        yield Fronts(grpc, rest)


@pytest.fixture
def table(fronts: Fronts) -> common_pb2.TableInfo:
    """A table with rows for IDS after two steps."""
    info = fronts.grpc.create(TableSpec(next(NAMES), DIM, init=Normal(0, 0.05)))
    for gradient in np.random.default_rng(0).standard_normal((2, len(IDS), DIM)):
        fronts.grpc.push(info, IDS, gradient)
    return info


def floats(data: bytes) -> list[float]:
    return [float(value) for value in np.frombuffer(data, "<f4")]


def f32(values: Sequence[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


ODD_VALUES = [[0.1, -0.0, 1e-45], [3.4028235e38, -1.17549435e-38, 1 / 3], [16777217.0, -2.5e-7, 0.0]]


@pytest.mark.parametrize("row_id", [*IDS, 77, -77])
def test_a_row_that_is_put_is_what_grpc_reads_bit_for_bit(fronts: Fronts, table: common_pb2.TableInfo, row_id: int) -> None:
    before = {other: fronts.read(table, other) for other in IDS if other != row_id}
    weight, exp_avg, exp_avg_sq = ODD_VALUES[0], ODD_VALUES[1], [abs(value) for value in ODD_VALUES[2]]
    body = {"weight": weight, "optimizer": {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}
    response = fronts.rest.put(fronts.path(table, row_id), json=body)
    answer = ChangedRowModel.model_validate_json(response.content, extra="forbid")
    stored = fronts.read(table, row_id)
    assert (stored.weight, stored.exp_avg, stored.exp_avg_sq) == (f32(weight), f32(exp_avg), f32(exp_avg_sq))
    assert (response.status_code, answer.table, answer.id) == (200, table.spec.name, str(row_id))
    assert answer.shard == int(fronts.grpc.owners([row_id])[0])
    assert int(answer.change_number) == int.from_bytes(stored.change_number, "little")
    shown = fronts.rest.get(fronts.path(table, row_id))
    assert shown.headers["etag"] == response.headers["etag"]
    assert shown.json()["table_step"] == 2
    assert {other: fronts.read(table, other) for other in before} == before


def test_a_row_that_is_read_can_be_put_back_and_is_the_same_row(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    before = fronts.read(table, IDS[0])
    shown = fronts.rest.get(fronts.path(table, IDS[0])).json()
    moments = {name: shown["optimizer"][name] for name in ("exp_avg", "exp_avg_sq")}
    fronts.rest.put(fronts.path(table, IDS[0]), json={"weight": shown["weight"], "optimizer": moments})
    after = fronts.read(table, IDS[0])
    before.change_number = after.change_number
    assert after == before


@pytest.mark.parametrize("given", [None, {}, {"exp_avg": [1, 2, 3]}, {"exp_avg_sq": [1, 2, 3]}, {"exp_avg": None}])
def test_moments_left_out_stay_in_an_old_row_and_are_zero_in_a_new_one(
    fronts: Fronts, table: common_pb2.TableInfo, given: dict[str, list[float] | None] | None
) -> None:
    before = fronts.read(table, 5)
    for row_id, moments in ((5, before), (6, row_pb2.RowColumns(exp_avg=f32([0] * 3), exp_avg_sq=f32([0] * 3)))):
        assert fronts.rest.put(fronts.path(table, row_id), json={"weight": [7, 8, 9], "optimizer": given}).status_code == 200
        after = fronts.read(table, row_id)
        expected = {"exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}
        expected |= {name: f32(values) for name, values in (given or {}).items() if values is not None}
        assert floats(after.weight) == [7, 8, 9]
        assert {"exp_avg": after.exp_avg, "exp_avg_sq": after.exp_avg_sq} == expected
    assert fronts.read(table, 5).step == before.step


def fill(request: row_pb2.AssignRowsRequest, columns: dict[str, list[float]]) -> None:
    for name, values in columns.items():
        setattr(request, name, f32(values))


def assign_over_grpc(fronts: Fronts, table: common_pb2.TableInfo, row_id: int, columns: dict[str, list[float]]) -> None:
    fronts.grpc.number += 1
    owner = int(fronts.grpc.owners([row_id])[0])
    for shard, client in enumerate(fronts.grpc.clients):
        request = row_pb2.AssignRowsRequest(header=client.header(fronts.grpc.number), table_id=table.table_id)
        if shard == owner:
            request.row_ids = id_bytes([row_id])
            fill(request, columns)
        client.call(client.row.AssignRows, request)


def test_training_goes_on_from_what_was_put_as_from_what_was_assigned(fronts: Fronts) -> None:
    """The same row written by each front, then pushed to: the same bits."""
    tables = [fronts.grpc.create(TableSpec(next(NAMES), DIM, init=Constant(0.5))) for _ in range(2)]
    columns = {"weight": [0.1, 0.2, 0.3], "exp_avg": [0.01, -0.02, 0.03], "exp_avg_sq": [1e-3, 2e-3, 0.0]}
    optimizer = {name: values for name, values in columns.items() if name != "weight"}
    fronts.rest.put(fronts.path(tables[0], 5), json={"weight": columns["weight"], "optimizer": optimizer})
    assign_over_grpc(fronts, tables[1], 5, columns)
    for table in tables:
        for gradient in np.random.default_rng(1).standard_normal((3, 1, DIM)):
            fronts.grpc.push(table, [5], gradient)
    first, second = (fronts.read(table, 5) for table in tables)
    first.change_number = second.change_number
    assert first == second
    assert floats(first.weight) != columns["weight"]


def test_clearing_moments_keeps_weight_and_step(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    before = {row_id: fronts.read(table, row_id) for row_id in IDS}
    assert any(floats(before[8].exp_avg))
    response = fronts.rest.post(f"{fronts.path(table, 8)}:clearMoments")
    ChangedRowModel.model_validate_json(response.content, extra="forbid")
    after = {row_id: fronts.read(table, row_id) for row_id in IDS}
    assert (after[8].exp_avg, after[8].exp_avg_sq) == (f32([0] * 3), f32([0] * 3))
    assert response.headers["etag"] == fronts.rest.get(fronts.path(table, 8)).headers["etag"]
    assert after[8].change_number != before[8].change_number
    before[8].exp_avg, before[8].exp_avg_sq, before[8].change_number = (
        after[8].exp_avg,
        after[8].exp_avg_sq,
        after[8].change_number,
    )
    assert after == before


@pytest.mark.case("C044")
def test_a_row_deleted_over_rest_comes_back_new(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    twin = 9  # never existed: what row 8 must be like after its return, but for its own initial weight
    response = fronts.rest.delete(fronts.path(table, 8))
    DeletedRowModel.model_validate_json(response.content, extra="forbid")
    gone = fronts.rest.get(fronts.path(table, 8))
    assert (response.status_code, gone.status_code, gone.json()["reason"]) == (200, 404, "UNKNOWN_ROW")
    initial = fronts.read(table, 8)
    assert not initial.found[0]
    assert f32(gone.json()["initial_weight"]) == initial.weight
    assert num_rows(fronts, table) == len(IDS) - 1

    fronts.rest.put(fronts.path(table, twin), json={"weight": floats(initial.weight)})  # zero moments
    fronts.grpc.push(table, [8, twin], [[1.0, -2.0, 3.0]] * 2)
    back, expected = fronts.read(table, 8), fronts.read(table, twin)
    assert back.weight != initial.weight
    assert (back.weight, back.exp_avg, back.exp_avg_sq) == (expected.weight, expected.exp_avg, expected.exp_avg_sq)
    np.testing.assert_allclose(floats(back.exp_avg), [0.1, -0.2, 0.3], rtol=1e-6)


def num_rows(fronts: Fronts, table: common_pb2.TableInfo) -> int | None:
    return TableModel.model_validate(fronts.rest.get(f"/v1/tables/{table.spec.name}").json()).num_rows


@pytest.mark.parametrize("change", ["delete", "clear"])
def test_a_row_that_does_not_exist_is_404_and_is_not_created(fronts: Fronts, table: common_pb2.TableInfo, change: str) -> None:
    before = fronts.everything(table)
    path = fronts.path(table, 1000)
    response = fronts.rest.delete(path) if change == "delete" else fronts.rest.post(f"{path}:clearMoments")
    assert (response.status_code, response.json()["reason"], response.json()["row_id"]) == (404, "UNKNOWN_ROW", "1000")
    assert fronts.everything(table) == before


def test_the_clients_of_changes_have_left(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    before = fronts.num_clients()
    for row_id in IDS:
        fronts.rest.put(fronts.path(table, row_id), json={"weight": [1, 2, 3]})
        fronts.rest.put(fronts.path(table, row_id), json={"weight": [1, 2, 3]}, headers={"if-match": '"0:1:1:1"'})
        fronts.rest.delete(fronts.path(table, row_id))
    assert fronts.num_clients() == before


# -- conditions


def test_an_etag_lets_a_change_pass_once(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    path = fronts.path(table, -1)
    tag = fronts.rest.get(path).headers["etag"]
    first = fronts.rest.put(path, json={"weight": [1, 1, 1]}, headers={"if-match": tag})
    assert first.status_code == 200
    before = fronts.everything(table)
    for response in (
        fronts.rest.put(path, json={"weight": [2, 2, 2]}, headers={"if-match": tag}),
        fronts.rest.post(f"{path}:clearMoments", headers={"if-match": tag}),
        fronts.rest.delete(path, headers={"if-match": tag}),
    ):
        assert (response.status_code, response.json()["reason"]) == (412, "ETAG_MISMATCH")
        assert "was not changed" in response.json()["detail"]
    assert fronts.everything(table) == before
    second = fronts.rest.post(f"{path}:clearMoments", headers={"if-match": first.headers["etag"]})
    assert second.status_code == 200
    fronts.grpc.push(table, [-1], [[1.0, 2.0, 3.0]])
    assert fronts.rest.delete(path, headers={"if-match": second.headers["etag"]}).status_code == 412
    assert fronts.rest.delete(path, headers={"if-match": fronts.rest.get(path).headers["etag"]}).status_code == 200


def test_a_tag_of_another_lineage_is_412(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    path = fronts.path(table, -1)
    shard, lineage, timeline, number = fronts.rest.get(path).headers["etag"].strip('"').split(":")
    tag = f'"{shard}:{int(lineage) ^ 1}:{timeline}:{number}"'
    before = fronts.everything(table)
    response = fronts.rest.put(path, json={"weight": [2, 2, 2]}, headers={"if-match": tag})
    assert (response.status_code, response.json()["reason"]) == (412, "ETAG_MISMATCH")
    assert fronts.everything(table) == before


def test_stars_ask_whether_a_row_exists(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    old, new, body = fronts.path(table, 5), fronts.path(table, 1000), {"weight": [1, 2, 3]}
    before = fronts.everything(table)
    for response in (
        fronts.rest.put(new, json=body, headers={"if-match": "*"}),
        fronts.rest.delete(new, headers={"if-match": "*"}),
        fronts.rest.post(f"{new}:clearMoments", headers={"if-match": "*"}),
        fronts.rest.put(old, json=body, headers={"if-none-match": "*"}),
    ):
        assert (response.status_code, response.json()["reason"]) == (412, "ETAG_MISMATCH")
    assert fronts.everything(table) == before
    assert fronts.rest.put(old, json=body, headers={"if-match": "*"}).status_code == 200
    assert fronts.rest.put(new, json=body, headers={"if-none-match": "*"}).status_code == 200
    assert num_rows(fronts, table) == len(IDS) + 1


def test_counting_up_with_etags_loses_no_count(fronts: Fronts) -> None:
    table = fronts.grpc.create(TableSpec(next(NAMES), 1, init=Constant(0)))
    path = fronts.path(table, 5)
    fronts.rest.put(path, json={"weight": [0]})
    num_threads, num_counts = 4, 8
    refused = []

    def count() -> None:
        for _ in range(num_counts):
            while True:
                row = fronts.rest.get(path)
                body = {"weight": [row.json()["weight"][0] + 1]}
                response = fronts.rest.put(path, json=body, headers={"if-match": row.headers["etag"]})
                if response.status_code == 200:
                    break
                refused.append(response.status_code)

    threads = [threading.Thread(target=count) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert floats(fronts.read(table, 5).weight) == [num_threads * num_counts]
    assert set(refused) == {412}  # they did meet


# -- refusals, the same on both fronts


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One wrong change on both fronts."""

    reason: str
    status: int
    column: str
    sent: list[float]
    shown: list[object]
    row_id: int = 5


NAN, INF = float("nan"), float("inf")
WRONG = {
    "a weight that is not a number": Wrong("NON_FINITE_STATE", 400, "weight", [0, NAN, 0], [0, "NaN", 0]),
    "an infinite weight": Wrong("NON_FINITE_STATE", 400, "weight", [INF, 0, 0], ["Infinity", 0, 0]),
    "an infinite moment": Wrong("NON_FINITE_STATE", 400, "exp_avg", [0, 0, -INF], [0, 0, "-Infinity"]),
    "a second moment that is not a number": Wrong("NON_FINITE_STATE", 400, "exp_avg_sq", [NAN] * 3, ["NaN"] * 3),
    "a negative second moment": Wrong("NON_FINITE_STATE", 400, "exp_avg_sq", [0, -1e-9, 0], [0, -1e-9, 0]),
    "too few weights": Wrong("WRONG_SHAPE", 400, "weight", [0, 0], [0, 0]),
    "too many moments": Wrong("WRONG_SHAPE", 400, "exp_avg", [0] * 4, [0] * 4),
    "an id beyond the bound": Wrong("ID_OUT_OF_RANGE", 400, "weight", [0] * 3, [0] * 3, row_id=10),
    "a new row in a full table": Wrong("ROW_LIMIT", 429, "weight", [0] * 3, [0] * 3, row_id=7),
}


@pytest.fixture(scope="module")
def full(fronts: Fronts) -> common_pb2.TableInfo:
    """A bounded table with two of ten rows, one per shard, which is all that it may hold."""
    info = fronts.grpc.create(TableSpec("full", DIM, num_embeddings=10, max_rows_per_shard=1))
    owner = fronts.grpc.owners([5])[0]
    other = next(row_id for row_id in range(10) if fronts.grpc.owners([row_id])[0] != owner)
    assert other != 7
    fronts.grpc.push(info, [5, other], [[1.0, 2.0, 3.0]] * 2)
    return info


@pytest.mark.case("C030")
@pytest.mark.case("C036")
@pytest.mark.parametrize("name", WRONG)
def test_both_fronts_refuse_a_wrong_change_with_the_same_reason(fronts: Fronts, full: common_pb2.TableInfo, name: str) -> None:
    wrong = WRONG[name]
    before = fronts.everything(full)
    client = fronts.grpc.clients[int(fronts.grpc.owners([wrong.row_id])[0])]
    request = row_pb2.AssignRowsRequest(
        header=client.header(fronts.grpc.number + 1), table_id=full.table_id, row_ids=id_bytes([wrong.row_id])
    )
    fill(request, {"weight": [0.0] * DIM, wrong.column: wrong.sent})
    with pytest.raises(ShardamError) as caught:
        client.call(client.row.AssignRows, request)
    columns: dict[str, list[object]] = {"weight": [0.0] * DIM, wrong.column: wrong.shown}
    body = {"weight": columns.pop("weight"), "optimizer": columns}
    response = fronts.rest.put(fronts.path(full, wrong.row_id), json=body)
    assert (response.status_code, response.json()["reason"]) == (wrong.status, wrong.reason)
    assert caught.value.reason == wrong.reason
    assert wrong.column in response.json()["detail"] or wrong.reason in ("ID_OUT_OF_RANGE", "ROW_LIMIT")
    assert fronts.everything(full) == before


@pytest.mark.case("C043")
def test_a_full_table_takes_a_row_again_after_one_is_deleted(fronts: Fronts) -> None:
    table = fronts.grpc.create(TableSpec(next(NAMES), 1, max_rows_per_shard=1))
    same_shard = [row_id for row_id in range(100) if fronts.grpc.owners([row_id])[0] == 0][:2]
    body = {"weight": [1.0]}
    statuses = [fronts.rest.put(fronts.path(table, row_id), json=body).status_code for row_id in same_shard]
    assert statuses == [200, 429]
    assert fronts.rest.delete(fronts.path(table, same_shard[0])).status_code == 200
    assert fronts.rest.put(fronts.path(table, same_shard[1]), json=body).status_code == 200


def test_the_padding_row_can_be_put_and_is_still_never_pushed_to(fronts: Fronts) -> None:
    table = fronts.grpc.create(TableSpec(next(NAMES), 2, padding_idx=0))
    fronts.rest.put(fronts.path(table, 0), json={"weight": [1, 2]})
    fronts.grpc.push(table, [0, 1], [[1.0, 1.0]] * 2)
    assert floats(fronts.read(table, 0).weight) == [1, 2]
