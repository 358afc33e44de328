"""The admin API follows a cluster that moves to another number of shards: each answer is whole, by one map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster, FakeShard

from shardam_proto.errors import StaleState
from shardam_proto.registry import ClusterView
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec

SPEC = TableSpec("items", 2)


class Moving:
    """Three shards that rows have moved to; until a shard is asked the view has two, as before the move."""

    def __init__(self, shards: FakeCluster) -> None:
        entry = shards.view.entry
        assert entry is not None
        registered = {index: shard for index, shard in shards.registered.items() if index < 2}
        self.before = ClusterView(dataclasses.replace(entry, num_shards=2), RouteMap(epoch=1, num_shards=2), registered)
        self.after = dataclasses.replace(shards.view, route_map=RouteMap(epoch=2, num_shards=3))
        self.view = self.before
        self.refused = 0
        for shard in shards.shards:
            shard.before_answer = self.refuse_once(shard)

    def refuse_once(self, shard: FakeShard) -> Callable[[], None]:
        """Has a shard refuse its first request, as one of a later epoch does."""
        stale = StaleState("another route epoch; refresh the map", reason="STALE_ROUTE")

        def hook() -> None:
            self.view = self.after
            refuses = shard.index < 2 and shard.fail_with is None and not shard.seen_request_ids
            shard.fail_with = stale if refuses else None
            self.refused += refuses
            shard.seen_request_ids.append(0)

        return hook


@pytest.fixture
def moving(shards: FakeCluster) -> Moving:
    shards.add_table(SPEC)
    for row_id in range(30):
        shards.put("items", row_id, [row_id, row_id])
    assert all(shard.rows for shard in shards.shards)
    return Moving(shards)


@pytest.fixture
def client(open_admin: Callable[..., TestClient], moving: Moving) -> TestClient:
    return open_admin(lambda: moving.view)


def test_rows_that_were_routed_by_the_former_map_are_read_by_the_present_one(client: TestClient, moving: Moving) -> None:
    ids = [str(row_id) for row_id in range(30)]
    first = client.post("/v1/tables/items/rows:batchGet", json={"ids": ids})
    answer = first if first.status_code == 200 else client.post("/v1/tables/items/rows:batchGet", json={"ids": ids})
    assert moving.refused
    assert [row["weight"][0] for row in answer.json()["rows"]] == list(range(30))
    assert all(row["found"] for row in answer.json()["rows"])


def test_a_table_is_shown_on_all_shards_of_the_present_map(client: TestClient, moving: Moving) -> None:
    table = client.get("/v1/tables/items").json()
    assert moving.refused
    assert [shard["shard"] for shard in table["shards"]] == [0, 1, 2]


def test_a_walk_does_not_go_on_by_another_map(client: TestClient, moving: Moving) -> None:
    page = client.get("/v1/tables/items/rows", params={"limit": 1, "cursor": "1:1:0"})
    if page.status_code != 400:  # the view was read before the move
        page = client.get("/v1/tables/items/rows", params={"limit": 1, "cursor": "1:1:0"})
    assert page.status_code == 400
    assert "is from before the cluster moved to 3 shards; begin the walk anew" in page.json()["detail"]
