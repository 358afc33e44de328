"""The admin API reads Redis at most once a second and serves on with what it knew."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from shardam_proto.errors import RedisUnreachable, ShardNotReady
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_server.admin.cluster import ClusterReader, describe_changes, waiting_for

EMPTY = ClusterView(None, None, {})


def shard(index: int, **changes: object) -> ShardEntry:
    entry = ShardEntry(index, f"127.0.0.1:{7000 + index}", "127.0.0.1:1", 5, 6, "cpu", 1, ready=True)
    return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]  # names are checked at run time


def view_of(*entries: ShardEntry, num_shards: int = 2) -> ClusterView:
    return ClusterView(ClusterEntry("c", num_shards, 0), RouteMap(1, num_shards), {entry.index: entry for entry in entries})


class FakeRedis:
    def __init__(self) -> None:
        self.time = 100.0
        self.reads = 0
        self.answer: ClusterView | RedisUnreachable = view_of(shard(0), shard(1))

    def read(self) -> ClusterView:
        self.reads += 1
        if isinstance(self.answer, RedisUnreachable):
            raise self.answer
        return self.answer

    def reader(self) -> ClusterReader:
        return ClusterReader(self.read, "c", clock=lambda: self.time)


def test_redis_is_read_once_a_second_whatever_the_number_of_requests() -> None:
    redis = FakeRedis()
    reader = redis.reader()
    for _ in range(100):
        reader.view()
    assert redis.reads == 1
    redis.time += 1.1
    for _ in range(100):
        reader.view()
    assert redis.reads == 2


def test_the_last_known_view_serves_on_while_redis_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    redis = FakeRedis()
    reader = redis.reader()
    known = reader.view()
    redis.answer = RedisUnreachable("Redis did not answer: refused")
    for _ in range(3):
        redis.time += 1.1
        assert reader.view() is known
        assert reader.redis_error is redis.answer
    assert [record.levelno for record in caplog.records if "last known view" in record.message] == [logging.WARNING]
    redis.answer = known
    redis.time += 1.1
    reader.view()
    assert reader.redis_error is None


def test_nothing_is_known_before_redis_answered_once() -> None:
    redis = FakeRedis()
    redis.answer = RedisUnreachable("Redis did not answer: refused")
    reader = redis.reader()
    for _ in range(2):
        with pytest.raises(RedisUnreachable, match="refused"):
            reader.view()
    assert redis.reads == 1  # within a second it is not asked again


def test_a_refresh_reads_again_unless_someone_else_just_did() -> None:
    redis = FakeRedis()
    reader = redis.reader()
    reader.view()
    redis.time += 0.1
    failed_at = redis.time
    redis.time += 0.1
    reader.refresh(failed_at)
    reader.refresh(failed_at)
    assert redis.reads == 2


def test_a_cluster_without_a_map_says_what_it_waits_for() -> None:
    redis = FakeRedis()
    redis.answer = ClusterView(ClusterEntry("c", 3, 0), None, {0: shard(0), 1: shard(1, ready=False)})
    with pytest.raises(ShardNotReady, match="shard 2 is not registered; shard 1 is registered but not ready"):
        redis.reader().formed()
    assert waiting_for(view_of(shard(0), shard(1)), "c") == []
    assert "no shard of cluster 'c' has registered" in waiting_for(EMPTY, "c")[0]
    assert waiting_for(ClusterView(ClusterEntry("c", 1, 0), None, {0: shard(0)}), "c") == ["the route map is not made yet"]


def test_changes_of_the_view_are_described_once() -> None:
    old, new = view_of(shard(0), shard(1)), view_of(shard(0), shard(1, incarnation=9))
    assert describe_changes(None, old) == [
        "id c, 2 shards",
        "route map with epoch 1",
        "shard 0 is ready at 127.0.0.1:7000, incarnation 5",
        "shard 1 is ready at 127.0.0.1:7001, incarnation 5",
    ]
    assert describe_changes(old, new) == ["shard 1 is ready at 127.0.0.1:7001, incarnation 9"]
    assert describe_changes(new, view_of(shard(0))) == ["shard 1 is no longer registered"]
    assert describe_changes(new, new) == []
