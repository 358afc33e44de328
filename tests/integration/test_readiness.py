"""What `up` reads from Redis of a shard that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import redis
from shardam_testing.processes import running_valkey

from shardam_proto.registry import ClusterEntry, ClusterView, Keys, ShardEntry, route_map_to_json
from shardam_proto.routing import RouteMap
from shardam_server.readiness import ClusterProbe

KEYS = Keys("default")
PID = 4711
HANG_S = 60.0
LOST = ShardEntry(0, "127.0.0.1:1", "127.0.0.1:2", 3, 0, "cpu", PID, ready=False, lost=True)
LOOKS = 3


class CountingProbe(ClusterProbe):
    """A probe that counts its looks."""

    looks = 0

    async def wait_for_looks(self, times: int) -> None:
        """Waits until Redis was read so many times more."""
        until = self.looks + times
        while self.looks < until:
            await asyncio.sleep(0.01)

    async def view(self) -> ClusterView:
        """Counts and reads."""
        self.looks += 1
        return await super().view()


def register(connection: redis.Redis, entry: ShardEntry) -> None:
    connection.set(KEYS.shard(entry.index), entry.to_json())


def test_a_lost_shard_is_reported_once_and_ready_only_when_it_serves_again() -> None:
    reported: list[ShardEntry] = []

    async def watch(connection: redis.Redis, url: str) -> None:
        probe = CountingProbe(url, KEYS.cluster, 3.0)
        with contextlib.closing(probe):
            waiting = asyncio.ensure_future(probe.shard_ready(0, PID, reported.append))
            register(connection, dataclasses.replace(LOST, pid=PID + 1))  # the lease of a predecessor
            await probe.wait_for_looks(LOOKS)
            assert reported == []
            register(connection, LOST)
            await probe.wait_for_looks(LOOKS)
            register(connection, dataclasses.replace(LOST, ready=True))
            await probe.wait_for_looks(LOOKS)
            assert not waiting.done()
            served = dataclasses.replace(LOST, lineage=5, ready=True, lost=False)
            register(connection, served)
            assert await waiting == served

    with running_valkey() as valkey, contextlib.closing(valkey.client()) as connection:
        connection.set(KEYS.cluster_entry, ClusterEntry("id", 1, 0).to_json())
        connection.set(KEYS.route_map, route_map_to_json(RouteMap(epoch=1, num_shards=1)))
        asyncio.run(asyncio.wait_for(watch(connection, valkey.url), HANG_S))
    assert [(entry.index, entry.pid) for entry in reported] == [(0, PID)]
