"""The same wrong request over gRPC and REST has the same reason, names the value, and changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import httpx2
import pytest
from shardam_testing.admin import RawCluster, raw_cluster, running_admin
from shardam_testing.processes import running_shards

from shardam_proto.errors import ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, table_pb2

BOUNDED = TableSpec("bounded", 2, num_embeddings=10)


@dataclasses.dataclass
class Fronts:
    """The two fronts of one cluster, with a bounded table of ten ids."""

    grpc: RawCluster
    rest: httpx2.Client
    bounded: common_pb2.TableInfo


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("rest-errors")
    with (
        running_shards(folder, 2) as shards,
        running_admin(shards.valkey.url, folder) as admin,
        raw_cluster(shards.view()) as grpc,
        admin.client() as rest,
    ):
        yield Fronts(grpc, rest, grpc.create(BOUNDED))


def create_over_grpc(spec: common_pb2.TableSpec) -> Callable[[Fronts], object]:
    def create(fronts: Fronts) -> object:
        home = fronts.grpc.clients[0]
        return home.call(home.table.CreateTables, table_pb2.CreateTablesRequest(header=home.header(), specs=[spec]))

    return create


def create_over_rest(**spec: object) -> Callable[[Fronts], httpx2.Response]:
    return lambda fronts: fronts.rest.post("/v1/tables", json=spec)


def changed(**fields: object) -> common_pb2.TableSpec:
    message = TableSpec("fresh", 2).to_proto()
    for name, value in fields.items():
        setattr(message, name, value)
    return message


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One wrong request on both fronts."""

    reason: str
    status: int
    named: str
    grpc: Callable[[Fronts], object]
    rest: Callable[[Fronts], httpx2.Response]


WRONG = {
    "unknown table": Wrong(
        "UNKNOWN_TABLE",
        404,
        "nothing",
        lambda fronts: fronts.grpc.clients[0].info("nothing"),
        lambda fronts: fronts.rest.get("/v1/tables/nothing"),
    ),
    "id beyond a bounded table": Wrong(
        "ID_OUT_OF_RANGE",
        400,
        "10",
        lambda fronts: fronts.grpc.clients[int(fronts.grpc.owners([10])[0])].read(fronts.bounded, [10]),
        lambda fronts: fronts.rest.get("/v1/tables/bounded/rows/10"),
    ),
    "negative id in a bounded table": Wrong(
        "ID_OUT_OF_RANGE",
        400,
        "-1",
        lambda fronts: fronts.grpc.clients[int(fronts.grpc.owners([-1])[0])].read(fronts.bounded, [-1]),
        lambda fronts: fronts.rest.post("/v1/tables/bounded/rows:batchGet", json={"ids": ["9", "-1"]}),
    ),
    "another schema": Wrong(
        "SCHEMA_MISMATCH",
        409,
        "bounded",
        create_over_grpc(TableSpec("bounded", 3, num_embeddings=10).to_proto()),
        create_over_rest(name="bounded", dim=3, num_embeddings=10),
    ),
    "dim 0": Wrong("BAD_OPTION", 400, "0", create_over_grpc(changed(dim=0)), create_over_rest(name="fresh", dim=0)),
    "unknown optimizer": Wrong(
        "BAD_OPTION",
        400,
        "adagrad",
        create_over_grpc(changed(optimizer="adagrad")),
        create_over_rest(name="fresh", dim=2, optimizer="adagrad"),
    ),
    "name outside the alphabet": Wrong(
        "BAD_OPTION", 400, "user/id", create_over_grpc(changed(name="user/id")), create_over_rest(name="user/id", dim=2)
    ),
    "padding outside the bound": Wrong(
        "BAD_OPTION",
        400,
        "10",
        create_over_grpc(changed(num_embeddings=10, padding_idx=10)),
        create_over_rest(name="fresh", dim=2, num_embeddings=10, padding_idx="10"),
    ),
}


def test_an_unknown_table_is_answered_with_where_the_known_ones_are(fronts: Fronts) -> None:
    detail = fronts.rest.get("/v1/tables/nothing").json()["detail"]
    assert detail == "no table is called 'nothing'; `shardam table list` or GET /v1/tables shows what there is"


def tables_of(fronts: Fronts) -> list[str]:
    return [table["name"] for table in fronts.rest.get("/v1/tables").json()["tables"]]


@pytest.mark.case("C030")
@pytest.mark.case("C046")
@pytest.mark.case("C047")
@pytest.mark.parametrize("name", WRONG)
def test_both_fronts_refuse_with_the_same_reason(fronts: Fronts, name: str) -> None:
    wrong = WRONG[name]
    before = tables_of(fronts)
    with pytest.raises(ShardamError) as caught:
        wrong.grpc(fronts)
    response = wrong.rest(fronts)
    problem = response.json()
    assert caught.value.reason == problem["reason"] == wrong.reason
    assert (response.status_code, problem["status"]) == (wrong.status, wrong.status)
    assert response.headers["content-type"] == "application/problem+json"
    assert wrong.named in caught.value.message
    assert wrong.named in problem["detail"]
    assert "Traceback" not in response.text
    assert tables_of(fronts) == before


@pytest.mark.case("C047")
def test_creating_a_table_again_answers_the_same_table(fronts: Fronts) -> None:
    body = {"name": "again", "dim": 8, "init": {"kind": "uniform", "low": -0.5, "high": 0.5}}
    first, second = (fronts.rest.post("/v1/tables", json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["table_id"] == second.json()["table_id"]
    assert all(client.info("again").table_id == int(first.json()["table_id"]) for client in fronts.grpc.clients)


@pytest.mark.case("C127")
@pytest.mark.parametrize("text", ["abc", "1e3", "%20", "92233720368547760001", "1" * 5000, "1.0"])
def test_a_bad_id_in_a_path_is_refused_through_the_real_server(fronts: Fronts, text: str) -> None:
    response = fronts.rest.get(f"/v1/tables/bounded/rows/{text}")
    assert (response.status_code, response.json()["reason"]) == (400, "ID_DTYPE")


@pytest.mark.case("C128")
def test_an_encoded_slash_is_refused_through_the_real_server(fronts: Fronts) -> None:
    response = fronts.rest.get("/v1/tables/bounded%2Frows")
    assert (response.status_code, response.json()["reason"]) == (400, "BAD_OPTION")
