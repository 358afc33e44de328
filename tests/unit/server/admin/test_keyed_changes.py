"""A change with an Idempotency-Key is made once, whatever is repeated, lost, refused or cut off in between."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest
import xxhash
from fastapi.testclient import TestClient
from shardam_testing.numbered_shards import FAIL_BEFORE, LOSE_ANSWER, Fault, NumberedShard, numbered_cluster

from shardam_proto.errors import ResourceExhausted, RowLimit, ShardLost
from shardam_proto.registry import ClusterView
from shardam_server.admin.cluster import ClusterReader
from shardam_server.admin.keyed_changes import IdempotencyKey
from shardam_server.admin.shard_calls import ShardCalls

from .conftest import OpenAdmin

KEY = "5f0c1a52-0b5e-4a7e-9f58-9f3c3ad1b3a1"
CLIENT_ID = xxhash.xxh3_128_digest(KEY.encode())
REUSED = (400, "SEQUENCE_REUSED")


class Cluster:
    """Three shards, two admin APIs over them, and the owners of two rows."""

    def __init__(self, view: ClusterView, shards: list[NumberedShard], open_admin: OpenAdmin) -> None:
        assert view.route_map is not None
        self.shards = shards
        self.admins = [open_admin(lambda: view, timeout_s=2.0) for _ in range(2)]
        calls = ShardCalls(ClusterReader(lambda: view, "c"), None, 1.0)
        owner_of = {row_id: owner(calls, row_id) for row_id in range(100)}
        calls.close()
        self.row = next(row_id for row_id, shard in owner_of.items() if shard == 1)
        self.owner = shards[1]
        self.others = [shards[0], shards[2]]
        self.row_elsewhere = next(row_id for row_id, shard in owner_of.items() if shard == 2)

    def path(self, row_id: int | None = None, table: str = "items") -> str:
        return f"/v1/tables/{table}/rows/{self.row if row_id is None else row_id}"

    def put(self, *, admin: int = 0, key: str = KEY, row_id: int | None = None, **headers: str) -> httpx2.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.admins[admin].put(self.path(row_id), json={"weight": [1, 2]}, headers={"Idempotency-Key": key, **named})

    def used(self, key: str = KEY) -> list[int]:
        """The key's last number on each shard."""
        return [shard.last(xxhash.xxh3_128_digest(key.encode())) for shard in self.shards]

    def changes(self) -> list[int]:
        return [shard.change_number for shard in self.shards]


def owner(calls: ShardCalls, row_id: int) -> int:
    return int(calls.reader.formed().route_map.shards_of(np.array([row_id], np.int64))[0])


@pytest.fixture
def cluster(open_admin: OpenAdmin) -> Iterator[Cluster]:
    with numbered_cluster(3) as (view, shards):
        yield Cluster(view, shards, open_admin)


def outcome(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["reason"]


def replayed(response: httpx2.Response) -> bool:
    return response.headers.get("idempotency-replayed") == "true"


def same_answer(first: httpx2.Response, second: httpx2.Response) -> bool:
    facts = [
        (
            answer.status_code,
            answer.headers.get("etag"),
            {name: value for name, value in answer.json().items() if name != "request_id"},
        )
        for answer in (first, second)
    ]
    return facts[0] == facts[1]


def test_a_key_is_the_client_id_that_any_client_can_compute() -> None:
    key = IdempotencyKey.parse([KEY])
    assert key is not None
    assert key.client_id == xxhash.xxh3_128(KEY.encode()).intdigest().to_bytes(16, "big")
    assert IdempotencyKey.parse([]) is None


@pytest.mark.parametrize("text", ["", " ", "a b", "ü", "x" * 256, "a\tb", "\x7f"])
def test_a_key_of_another_form_is_refused_before_any_shard_is_asked(cluster: Cluster, text: str) -> None:
    for path, body in ((cluster.path(), {"weight": [1, 2]}), ("/v1/tables", {"name": "t", "dim": 2})):
        method = "PUT" if "rows" in path else "POST"
        headers = {b"Idempotency-Key": text.encode("latin-1")}
        response = cluster.admins[0].request(method, path, json=body, headers=headers)
        assert outcome(response) == (400, "BAD_OPTION")
        assert "Idempotency-Key" in response.json()["detail"]
    assert [len(shard.clients) for shard in cluster.shards] == [0, 0, 0]


def test_two_keys_in_one_request_are_refused(cluster: Cluster) -> None:
    response = cluster.admins[0].delete(cluster.path(), headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])
    assert outcome(response) == (400, "BAD_OPTION")


@pytest.mark.parametrize("key", ["x", "!" * 255, '"quoted"', "~"])
def test_every_visible_character_makes_a_key(cluster: Cluster, key: str) -> None:
    assert not replayed(cluster.put(key=key))
    assert replayed(cluster.put(key=key))
    assert cluster.used(key) == [1, 1, 1]


def test_a_repeat_gets_the_first_answer_through_any_admin_process(cluster: Cluster) -> None:
    first = cluster.put()
    assert (first.status_code, replayed(first)) == (200, False)
    for admin in (0, 1, 1):
        again = cluster.put(admin=admin)
        assert same_answer(first, again)
        assert replayed(again)
    assert cluster.changes() == [1, 1, 1]
    assert cluster.used() == [1, 1, 1]
    assert [shard.left for shard in cluster.shards] == [[], [], []]
    entries = [shard.clients.get(CLIENT_ID) for shard in cluster.shards]
    assert [entry.heartbeats for entry in entries] == [False] * 3


def test_a_repeat_after_other_changes_of_the_row_still_gets_the_first_answer(cluster: Cluster) -> None:
    first = cluster.put()
    assert cluster.put(key="other").status_code == 200
    assert cluster.admins[0].delete(cluster.path()).status_code == 200
    assert same_answer(first, cluster.put())
    assert cluster.row not in cluster.owner.rows


def test_a_repeat_after_a_restart_that_kept_the_state_gets_the_first_answer(cluster: Cluster) -> None:
    first = cluster.put()
    for shard in cluster.shards:
        shard.restart()
    again = cluster.put(admin=1)
    assert same_answer(first, again)
    assert replayed(again)


@pytest.mark.parametrize("method", ["DELETE", "CLEAR"])
def test_deletes_and_clears_are_made_once_too(cluster: Cluster, method: str) -> None:
    assert cluster.put(key="made").status_code == 200

    def change() -> httpx2.Response:
        headers = {"Idempotency-Key": KEY}
        if method == "DELETE":
            return cluster.admins[0].delete(cluster.path(), headers=headers)
        return cluster.admins[0].post(f"{cluster.path()}:clearMoments", headers=headers)

    first = change()
    assert first.status_code == 200
    assert cluster.put(key="made-again").status_code == 200
    again = change()
    assert same_answer(first, again)
    assert replayed(again)
    assert cluster.row in cluster.owner.rows


@pytest.mark.parametrize("method", ["DELETE", "CLEAR"])
def test_a_404_is_an_answer_and_is_repeated(cluster: Cluster, method: str) -> None:
    path, headers = cluster.path(), {"Idempotency-Key": KEY}

    def change() -> httpx2.Response:
        admin = cluster.admins[0]
        return (
            admin.delete(path, headers=headers) if method == "DELETE" else admin.post(f"{path}:clearMoments", headers=headers)
        )

    first = change()
    assert (outcome(first), replayed(first)) == ((404, "UNKNOWN_ROW"), False)
    assert cluster.put(key="made").status_code == 200
    again = change()
    assert same_answer(first, again)
    assert replayed(again)


def others_of(cluster: Cluster, kind: str) -> httpx2.Response:
    """Sends another change with the key."""
    admin, headers = cluster.admins[1], {"Idempotency-Key": KEY}
    match kind:
        case "another body":
            return admin.put(cluster.path(), json={"weight": [1, 3]}, headers=headers)
        case "moments":
            return admin.put(cluster.path(), json={"weight": [1, 2], "optimizer": {"exp_avg": [0, 0]}}, headers=headers)
        case "another row of the same shard":
            return cluster.put(row_id=next(row_id for row_id in range(cluster.row + 1, 999) if same_owner(cluster, row_id)))
        case "a row of another shard":
            return cluster.put(row_id=cluster.row_elsewhere)
        case "another condition":
            return cluster.put(if_none_match="*")
        case "a tag of another state":
            return cluster.put(if_match='"1:99:1:1"')
        case "a delete":
            return admin.delete(cluster.path(), headers=headers)
        case "a clear":
            return admin.post(f"{cluster.path()}:clearMoments", headers=headers)
        case _:
            return admin.post("/v1/tables", json={"name": "fresh", "dim": 2}, headers=headers)


def same_owner(cluster: Cluster, row_id: int) -> bool:
    calls = cluster.admins[0].app.state.context.calls  # type: ignore[attr-defined]  # the app of create_app
    return owner(calls, row_id) == cluster.owner.index


OTHER_CHANGES = (
    "another body",
    "moments",
    "another row of the same shard",
    "a row of another shard",
    "another condition",
    "a tag of another state",
    "a delete",
    "a clear",
    "a table",
)


@pytest.mark.parametrize("kind", OTHER_CHANGES)
def test_another_change_with_the_key_is_refused_and_changes_nothing(cluster: Cluster, kind: str) -> None:
    assert cluster.put().status_code == 200
    before = [dict(shard.rows) for shard in cluster.shards]
    response = others_of(cluster, kind)
    assert outcome(response) == REUSED
    assert "Idempotency-Key" in response.json()["detail"]
    assert response.json()["idempotency_key"] == KEY
    assert [shard.rows for shard in cluster.shards] == before
    assert "fresh" not in cluster.owner.tables
    assert replayed(cluster.put())


@pytest.mark.parametrize("fault", [LOSE_ANSWER, FAIL_BEFORE])
def test_a_lost_answer_within_one_request_is_asked_for_again_and_is_no_replay(cluster: Cluster, fault: Fault) -> None:
    for shard in cluster.shards:
        shard.faults.append(fault)
    response = cluster.put()
    assert (response.status_code, replayed(response)) == (200, False)
    assert cluster.changes() == [1, 1, 1]


def dies_after(cluster: Cluster, shards: list[NumberedShard]) -> None:
    """Leaves behind what an admin process does that dies when only some shards have taken their part."""
    stopped = [shard for shard in cluster.shards if shard not in shards]
    for shard in stopped:
        shard.faults.extend([FAIL_BEFORE] * 50)
    response = cluster.put()
    assert response.status_code == 503
    assert "same Idempotency-Key" in response.json()["detail"]
    for shard in stopped:
        shard.faults.clear()


@pytest.mark.case("C130")
@pytest.mark.parametrize("taken", ["the owner alone", "the owner and one more", "none"])
def test_a_repeat_finishes_what_a_dead_admin_process_began(cluster: Cluster, taken: str) -> None:
    shards = {"the owner alone": [cluster.owner], "the owner and one more": [cluster.owner, cluster.others[0]], "none": []}
    dies_after(cluster, shards[taken])
    assert cluster.used() == [int(shard in shards[taken]) for shard in cluster.shards]
    number = cluster.owner.rows.get(cluster.row)
    response = cluster.put(admin=1)
    assert (response.status_code, replayed(response)) == (200, taken != "none")
    assert cluster.used() == [1, 1, 1]
    assert cluster.changes() == [1, 1, 1]
    assert number in (None, cluster.owner.rows[cluster.row])


def test_what_a_dead_admin_process_began_is_not_mixed_with_another_change(cluster: Cluster) -> None:
    dies_after(cluster, [cluster.owner])
    assert outcome(cluster.put(admin=1, row_id=cluster.row_elsewhere)) == REUSED
    assert [shard.rows for shard in cluster.shards] == [{}, {cluster.row: 1}, {}]
    assert cluster.used() == [0, 1, 0]
    assert cluster.put(admin=1).status_code == 200


@pytest.mark.parametrize("error", [RowLimit("too many rows")])
def test_a_refusal_leaves_the_key_free_so_that_a_repeat_is_judged_anew(cluster: Cluster, error: ResourceExhausted) -> None:
    for _ in range(2):
        cluster.owner.faults.append(error)
        response = cluster.put()
        assert outcome(response) == (error.rule.http_status, error.reason)
        assert "the row was not changed" in response.json()["detail"]
        assert cluster.used() == [0, 0, 0]
    assert [shard.seen for shard in cluster.others] == [[], []]
    assert not replayed(cluster.put())


def test_a_condition_that_does_not_hold_is_refused_again_until_it_does(cluster: Cluster) -> None:
    tag = cluster.put(key="first").headers["etag"]
    newer = cluster.put(key="second").headers["etag"]
    for _ in range(2):
        assert outcome(cluster.put(if_match=tag)) == (412, "ETAG_MISMATCH")
    response = cluster.put(if_match=newer)  # another change: nothing has been made with the key
    assert (response.status_code, replayed(response)) == (200, False)
    again = cluster.put(admin=1, if_match=newer)  # the tag does not fit the row any more, but this change was made
    assert same_answer(response, again)
    assert outcome(cluster.put(if_match=tag)) == REUSED


def test_an_empty_part_that_is_refused_is_voided_and_the_repeat_is_answered(cluster: Cluster) -> None:
    cluster.others[1].faults.append(ShardLost("shard 2 is LOST: `shardam forget-shard --index 2`"))
    response = cluster.put()
    assert outcome(response) == (400, "SHARD_LOST")
    assert "the row was changed, but not every shard" in response.json()["detail"]
    assert "forget-shard" in response.json()["detail"]
    assert cluster.used() == [1, 1, 1]
    again = cluster.put(admin=1)
    assert (again.status_code, replayed(again)) == (200, True)
    assert cluster.owner.change_number == 1


def test_an_owner_that_lost_its_state_makes_the_change_again(cluster: Cluster) -> None:
    first = cluster.put()
    cluster.owner.lose_state()
    again = cluster.put(admin=1)
    assert (again.status_code, replayed(again)) == (200, False)
    assert again.headers["etag"] != first.headers["etag"]
    assert cluster.row in cluster.owner.rows
    assert cluster.used() == [1, 1, 1]


def test_a_shard_that_restarts_within_the_change_leaves_it_to_a_repeat(cluster: Cluster) -> None:
    restarts = [cluster.owner.restart]
    cluster.owner.before_change = lambda: restarts.pop()() if restarts else None
    response = cluster.put()
    assert outcome(response) == (409, "NEW_INCARNATION")
    assert "not known; send it again with the same Idempotency-Key" in response.json()["detail"]
    assert (cluster.put().status_code, cluster.changes()) == (200, [1, 1, 1])


def test_the_same_request_twice_at_once_is_one_change(cluster: Cluster) -> None:
    for admin in cluster.admins:
        admin.get("/v1/none")  # FastAPI builds its routes now, with the process's warnings turned off
    together, turns = threading.Barrier(2, timeout=30), itertools.count()

    def meet() -> None:
        if next(turns) < 2:
            together.wait()

    cluster.owner.before_change = meet
    answers: list[httpx2.Response] = []
    threads = [threading.Thread(target=lambda admin=admin: answers.append(cluster.put(admin=admin))) for admin in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert same_answer(*answers)
    assert answers[0].status_code == 200
    assert cluster.changes() == [1, 1, 1]


def create(admin: TestClient, name: str = "users", dim: int = 4, key: str = KEY) -> httpx2.Response:
    return admin.post("/v1/tables", json={"name": name, "dim": dim}, headers={"Idempotency-Key": key})


def test_a_table_is_created_once_and_the_repeat_says_so(cluster: Cluster) -> None:
    first, again = create(cluster.admins[0]), create(cluster.admins[1])
    assert (first.status_code, replayed(first), replayed(again)) == (200, False, True)
    assert same_answer(first, again)
    assert cluster.used() == [1, 1, 1]
    assert cluster.changes() == [1, 1, 1]
    assert not replayed(create(cluster.admins[0], key="another"))


@pytest.mark.parametrize(("name", "dim"), [("fresh", 4), ("users", 5), ("items", 2)])
def test_another_table_with_the_key_is_refused_and_not_created(cluster: Cluster, name: str, dim: int) -> None:
    assert create(cluster.admins[0]).status_code == 200
    assert outcome(create(cluster.admins[1], name, dim)) == REUSED
    assert sorted(cluster.shards[0].tables) == ["items", "users"]


def test_a_row_with_a_tables_key_is_refused(cluster: Cluster) -> None:
    assert create(cluster.admins[0], "items", 2).status_code == 200
    assert outcome(cluster.put()) == REUSED
    assert cluster.owner.rows == {}


def test_openapi_says_what_a_key_does(cluster: Cluster) -> None:
    paths = cluster.admins[0].get("/openapi.json").json()["paths"]
    changing = [paths["/v1/tables"]["post"], *(paths["/v1/tables/{table}/rows/{row_id}"][name] for name in ("put", "delete"))]
    for operation in [*changing, paths["/v1/tables/{table}/rows/{row_id}:clearMoments"]["post"]]:
        (parameter,) = [known for known in operation["parameters"] if known["name"].lower() == "idempotency-key"]
        assert "24 h" in parameter["description"]
        assert "SEQUENCE_REUSED" in parameter["description"]
        assert "Idempotency-Replayed" in operation["responses"]["200"]["headers"]
