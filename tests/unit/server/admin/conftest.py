"""The admin API over fake shards, called without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster, running_fake_shards

from shardam_proto.registry import ClusterView
from shardam_server.admin.app import create_app
from shardam_server.admin.cluster import ClusterReader
from shardam_server.admin.context import AdminContext
from shardam_server.admin.metrics import RestMetrics
from shardam_server.admin.shard_calls import ShardCalls

BASE_URL = "http://127.0.0.1:8080"


OpenAdmin = Callable[..., TestClient]


@pytest.fixture
def shards() -> Iterator[FakeCluster]:
    with running_fake_shards(3) as cluster:
        yield cluster


@pytest.fixture
def open_admin() -> Iterator[OpenAdmin]:
    """Returns a function that builds an admin API over a way to read the view."""
    opened: list[ShardCalls] = []

    def build(
        read: Callable[[], ClusterView], *, token: str | None = None, host: str = "127.0.0.1", timeout_s: float = 5.0
    ) -> TestClient:
        calls = ShardCalls(ClusterReader(read, "test"), token, timeout_s)
        opened.append(calls)
        metrics = RestMetrics("test")
        context = AdminContext("test", "redis://127.0.0.1:1/0", "0.0.0", calls, metrics, max_batch_ids=10_000, max_import_mib=1)
        return TestClient(create_app(context, token=token, host=host), base_url=BASE_URL, raise_server_exceptions=False)

    yield build
    for calls in opened:
        calls.close()


@pytest.fixture
def client(open_admin: OpenAdmin, shards: FakeCluster) -> TestClient:
    """An admin API over three fake shards."""
    return open_admin(lambda: shards.view)
