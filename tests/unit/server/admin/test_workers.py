"""/v1/workers shows what home says of the workers: groups first, a page at a time, and for whom a group waits."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster
from shardam_testing.listed_workers import SYNC, bounded_workers, client_id, member, sync_workers

from shardam_proto.v1 import shard_pb2
from shardam_server.admin.answer_models import WorkerPageModel


def listed(client: TestClient, query: str = "") -> WorkerPageModel:
    response = client.get(f"/v1/workers{query}")
    assert response.status_code == 200, response.text
    return WorkerPageModel.model_validate_json(response.content, extra="forbid")


def test_without_workers_the_list_is_empty(client: TestClient) -> None:
    assert client.get("/v1/workers").json() == {"workers": [], "waiting_groups": [], "next_cursor": None}


@pytest.mark.case("C054")
def test_members_of_a_sync_group_are_shown_before_async_workers(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[0].workers = sync_workers()
    page = listed(client)
    assert [(worker.group, worker.rank, worker.mode) for worker in page.workers] == [
        ("trainers", 0, "sync"),
        ("trainers", 2, "sync"),
        (None, None, "async"),
    ]
    last = page.workers[1]
    assert (last.client_id, last.restart_count, last.world_size, last.reduce) == (client_id(2).hex(), 1, 3, "mean")
    assert (last.step, last.arrived, last.last_number, last.last_heartbeat_s) == (17, True, 20, 0.25)
    assert (last.staleness, last.max_staleness) == (None, None)
    alone = page.workers[2]
    assert (alone.last_number, alone.last_heartbeat_s) == (5, 1.5)
    assert (alone.step, alone.arrived, alone.world_size, alone.restart_count, alone.reduce) == (None,) * 5


@pytest.mark.case("C053")
def test_the_ranks_that_a_group_waits_for_are_named_with_the_time(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[0].workers = sync_workers()
    (waiting,) = listed(client).waiting_groups
    assert (waiting.group, waiting.step, waiting.ranks, waiting.waited_s) == ("trainers", 18, [1], 2.5)
    assert waiting.summary == "group trainers waits for rank 1 before step 18, for 2.5 s now"


@pytest.mark.case("C056")
def test_members_of_a_bounded_group_have_a_staleness_and_a_bound(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[0].workers = bounded_workers()
    workers = listed(client).workers
    assert [(worker.mode, worker.max_staleness, worker.step, worker.staleness) for worker in workers] == [
        ("bounded", 4, 12, 0),
        ("bounded", 4, 9, 3),
    ]
    assert (workers[0].reduce, workers[0].arrived) == (None, None)


def test_many_workers_are_listed_a_page_at_a_time_while_they_come_and_go(client: TestClient, shards: FakeCluster) -> None:
    members = [member("a-b.c", SYNC, rank) for rank in range(5)]
    others = [shard_pb2.Worker(client_id=client_id(100 + number)) for number in range(3)]
    shards.shards[0].workers = shard_pb2.ListWorkersResponse(workers=[*others, *reversed(members)])
    first = listed(client, "?page_size=3")
    assert [worker.rank for worker in first.workers] == [0, 1, 2]
    shards.shards[0].workers = shard_pb2.ListWorkersResponse(workers=[*others, *members[3:]])
    second = listed(client, f"?page_size=3&cursor={first.next_cursor}")
    assert [worker.rank for worker in second.workers] == [3, 4, None]
    third = listed(client, f"?page_size=3&cursor={second.next_cursor}")
    assert [worker.client_id for worker in third.workers] == [client_id(101).hex(), client_id(102).hex()]
    assert third.next_cursor is None


@pytest.mark.parametrize("cursor", ["x", "1:zz:", "0:00", "-1:00:a", "1:00:a/b"])
def test_a_cursor_of_something_else_is_refused(client: TestClient, cursor: str) -> None:
    response = client.get("/v1/workers", params={"cursor": cursor})
    assert (response.status_code, response.json()["reason"]) == (400, "BAD_OPTION")
    assert "pass next_cursor of the page before" in response.json()["detail"]


@pytest.mark.parametrize("size", ["0", "1001", "x"])
def test_a_page_size_out_of_range_is_refused(client: TestClient, size: str) -> None:
    assert client.get(f"/v1/workers?page_size={size}").status_code == 422


def test_while_home_is_away_the_list_is_503_and_other_shards_do_not_matter(client: TestClient, shards: FakeCluster) -> None:
    shards.servers[1].stop(None).wait()
    assert listed(client).workers == []
    shards.servers[0].stop(None).wait()
    response = client.get("/v1/workers")
    assert (response.status_code, response.json()["reason"]) == (503, "SHARD_UNREACHABLE")
    assert response.headers["retry-after"]


def test_a_home_of_an_older_version_is_said(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[0].workers = None
    response = client.get("/v1/workers")
    assert response.json()["reason"] == "VERSION_MISMATCH"
    assert "shard 0 at 127.0.0.1:" in response.json()["detail"]
    assert "runs another version of shardam" in response.json()["detail"]
