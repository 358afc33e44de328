"""Idempotency-Key against real shards: a key is a client of its own on them, so both fronts and every process agree on it."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest
import xxhash
from shardam_testing.admin import RawCluster, raw_cluster, running_admin
from shardam_testing.processes import running_shards
from shardam_testing.raw_client import RawClient, id_bytes

from shardam_proto.errors import SequenceError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, row_pb2

KEYS = (f"key-{number}" for number in itertools.count())
NAMES = (f"t{number}" for number in itertools.count())
WEIGHT = [0.5, -1.5]


@dataclasses.dataclass
class Fronts:
    """One cluster, two admin processes over it, and a client over gRPC."""

    grpc: RawCluster
    admins: list[httpx2.Client]

    def put(self, table: common_pb2.TableInfo, row_id: int, key: str, admin: int = 0, **headers: str) -> httpx2.Response:
        path = f"/v1/tables/{table.spec.name}/rows/{row_id}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.admins[admin].put(path, json={"weight": WEIGHT}, headers={"Idempotency-Key": key, **named})

    def as_key(self, shard: int, key: str) -> RawClient:
        """Returns the client that stands for a key on one shard."""
        return dataclasses.replace(self.grpc.clients[shard], client_id=xxhash.xxh3_128_digest(key.encode()))

    def last_numbers(self, key: str) -> list[int]:
        return [self.as_key(shard, key).open().header.last_number for shard in range(len(self.grpc.clients))]

    def weight(self, table: common_pb2.TableInfo, row_id: int) -> list[float]:
        owner = self.grpc.clients[int(self.grpc.owners([row_id])[0])]
        return [float(value) for value in np.frombuffer(owner.read(table, [row_id]).rows.weight, "<f4")]


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("rest-keys")
    with (
        running_shards(folder, 3) as shards,
        running_admin(shards.valkey.url, folder) as first,
        running_admin(shards.valkey.url, folder) as second,
        raw_cluster(shards.view()) as grpc,
        first.client() as one,
        second.client() as other,
    ):
        yield Fronts(grpc, [one, other])


@pytest.fixture
def table(fronts: Fronts) -> common_pb2.TableInfo:
    return fronts.grpc.create(TableSpec(next(NAMES), 2))


def part(client: RawClient, table: common_pb2.TableInfo, row_ids: list[int]) -> row_pb2.AssignRowsRequest:
    """Returns the part of a write of WEIGHT that one shard gets, as any client of the protocol would build it."""
    weight = np.array(WEIGHT * len(row_ids), "<f4").tobytes()
    return row_pb2.AssignRowsRequest(
        header=client.header(1),
        table_id=table.table_id,
        row_ids=id_bytes(row_ids),
        weight=weight,
        condition=row_pb2.RowCondition() if row_ids else None,
    )


def test_a_repeat_through_the_other_process_gets_the_first_answer(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    key = next(KEYS)
    first = fronts.put(table, 5, key)
    fronts.grpc.push(table, [5], [[1.0, 2.0]])
    pushed = fronts.weight(table, 5)
    again = fronts.put(table, 5, key, admin=1)
    assert (first.status_code, again.status_code) == (200, 200)
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.json(), again.headers["etag"]) == (first.json(), first.headers["etag"])
    assert fronts.weight(table, 5) == pushed != WEIGHT
    assert fronts.last_numbers(key) == [1, 1, 1]


def test_the_key_is_the_client_id_and_the_change_its_number_1(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    key = next(KEYS)
    answer = fronts.put(table, 5, key).json()
    owner = fronts.as_key(answer["shard"], key)
    repeat = owner.call(owner.row.AssignRows, part(owner, table, [5]))
    assert (repeat.repeated_number, str(repeat.change_number)) == (True, answer["change_number"])
    with pytest.raises(SequenceError):
        owner.call(owner.row.AssignRows, part(owner, table, [6]))


@pytest.mark.case("C130")
def test_what_a_process_that_died_left_half_done_is_finished_by_the_next(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    key = next(KEYS)
    owner = int(fronts.grpc.owners([5])[0])
    for shard in range(3):
        fronts.as_key(shard, key).open()
    client = fronts.as_key(owner, key)
    number = client.call(client.row.AssignRows, part(client, table, [5])).change_number  # and then it is killed
    assert fronts.last_numbers(key) == [int(shard == owner) for shard in range(3)]

    other_row = next(row_id for row_id in range(100) if int(fronts.grpc.owners([row_id])[0]) != owner)
    refused = fronts.put(table, other_row, key, admin=1)
    assert (refused.status_code, refused.json()["reason"]) == (400, "SEQUENCE_REUSED")
    assert fronts.last_numbers(key) == [int(shard == owner) for shard in range(3)]

    answer = fronts.put(table, 5, key, admin=1)
    assert (answer.status_code, answer.json()["change_number"]) == (200, str(number))
    assert answer.headers["idempotency-replayed"] == "true"
    assert fronts.last_numbers(key) == [1, 1, 1]


def test_a_refused_change_is_refused_again_and_leaves_the_key_free(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    key = next(KEYS)
    for admin in (0, 1):
        refused = fronts.put(table, 5, key, admin, if_match="*")
        assert (refused.status_code, refused.json()["reason"]) == (412, "ETAG_MISMATCH")
    assert fronts.last_numbers(key) == [0, 0, 0]
    assert fronts.put(table, 5, next(KEYS)).status_code == 200
    assert fronts.put(table, 5, key, if_match="*").status_code == 200
    assert fronts.last_numbers(key) == [1, 1, 1]


def test_another_change_with_the_key_is_refused_by_every_process(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    key = next(KEYS)
    assert fronts.put(table, 5, key).status_code == 200
    path, headers = f"/v1/tables/{table.spec.name}/rows/5", {"Idempotency-Key": key}
    for admin in fronts.admins:
        for response in (
            admin.put(path, json={"weight": [9, 9]}, headers=headers),
            admin.delete(path, headers=headers),
            admin.post(f"{path}:clearMoments", headers=headers),
            admin.post("/v1/tables", json={"name": "fresh", "dim": 2}, headers=headers),
        ):
            assert (response.status_code, response.json()["reason"]) == (400, "SEQUENCE_REUSED")
            assert f"Idempotency-Key {key!r}" in response.json()["detail"]
    assert fronts.weight(table, 5) == WEIGHT
    assert fronts.admins[0].get("/v1/tables/fresh").status_code == 404


def test_a_delete_is_made_once_even_if_the_row_has_come_back(fronts: Fronts, table: common_pb2.TableInfo) -> None:
    path, headers = f"/v1/tables/{table.spec.name}/rows/5", {"Idempotency-Key": next(KEYS)}
    fronts.put(table, 5, next(KEYS))
    first = fronts.admins[0].delete(path, headers=headers)
    fronts.put(table, 5, next(KEYS))
    again = fronts.admins[1].delete(path, headers=headers)
    assert (first.status_code, again.status_code, again.json()) == (200, 200, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    assert fronts.weight(table, 5) == WEIGHT


def test_a_table_is_created_under_a_key_once(fronts: Fronts) -> None:
    body, headers = {"name": next(NAMES), "dim": 3}, {"Idempotency-Key": next(KEYS)}
    first, again = (admin.post("/v1/tables", json=body, headers=headers) for admin in fronts.admins)
    assert (first.status_code, again.status_code) == (200, 200)
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    assert first.json() == again.json()
    response = fronts.admins[0].post("/v1/tables", json={**body, "name": "other"}, headers=headers)
    assert (response.status_code, response.json()["reason"]) == (400, "SEQUENCE_REUSED")
    assert fronts.admins[1].get("/v1/tables/other").status_code == 404


def test_a_change_from_outside_a_sync_group_is_refused_and_its_key_stays_free(
    fronts: Fronts, table: common_pb2.TableInfo
) -> None:
    key, client_id = next(KEYS), secrets.token_bytes(16)
    worker = [dataclasses.replace(client, client_id=client_id) for client in fronts.grpc.clients]
    for client in worker:
        client.open(heartbeats=True)
    terms = group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_SYNC, reduce=group_pb2.REDUCE_SUM, world_size=1)
    join = embedding_pb2.JoinGroupRequest(header=worker[0].header(), group="workers", terms=terms)
    worker[0].call(worker[0].embedding.JoinGroup, join)
    refused = fronts.put(table, 5, key)
    assert (refused.status_code, refused.json()["reason"]) == (400, "NOT_A_MEMBER")
    assert fronts.last_numbers(key) == [0, 0, 0]
    worker[0].leave()
    answer = fronts.put(table, 5, key)
    assert (answer.status_code, "idempotency-replayed" in answer.headers) == (200, False)
    assert fronts.weight(table, 5) == WEIGHT
