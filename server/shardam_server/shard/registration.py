"""A shard's entries in Redis: the cluster, its name lease, the route map, table schemas. Blocking; used off the event loop.

Redis grants names only; whether a shard may serve its state is decided by the shard (PROTOCOL.md, section 9).
"""

from __future__ import annotations

import contextlib
import enum
import secrets
from collections.abc import Iterator, Sequence
from typing import cast

import redis

from shardam_proto.errors import BadOption
from shardam_proto.registry import (
    ClusterEntry,
    ClusterView,
    Keys,
    ShardEntry,
    connect_redis,
    read_cluster,
    route_map_from_json,
    route_map_to_json,
)
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2
from shardam_server.redis_errors import redis_unreachable

_TAKE_OR_RENEW = """
local held = redis.call('GET', KEYS[1])
if held and not string.find(held, ARGV[1], 1, true) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
"""Sets the lease unless another incarnation holds it. The incarnation is compared as text: Lua's numbers have 53 bits."""

_RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.find(held, ARGV[1], 1, true) then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Lease(enum.Enum):
    """Who holds a shard's name."""

    HELD = "held"
    TAKEN = "taken"


class Registration:
    """One shard's view of Redis and its entries there.

    Args:
        url: Redis URL.
        cluster: cluster name.
        timeout_s: seconds until a Redis call has failed.

    All methods raise RedisUnreachable if Redis does not answer.
    """

    def __init__(self, url: str, cluster: str, timeout_s: float) -> None:
        self._url = url
        self.keys = Keys(cluster)
        self._redis = connect_redis(url, timeout_s)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise redis_unreachable(self._url, error) from error

    def view(self) -> ClusterView:
        """Reads the cluster."""
        return read_cluster(self._redis, self.keys)

    def create_cluster(self, num_shards: int, seed: int) -> ClusterEntry:
        """Creates the cluster's entry, or returns the one that is there."""
        new = ClusterEntry(cluster_id=secrets.token_hex(8), num_shards=num_shards, seed=seed)
        self.publish_cluster(new)
        with self._reaching():
            return ClusterEntry.from_json(cast(bytes, self._redis.get(self.keys.cluster_entry)))

    def publish_cluster(self, entry: ClusterEntry) -> None:
        """Writes the cluster's entry if it is absent."""
        with self._reaching():
            self._redis.set(self.keys.cluster_entry, entry.to_json(), nx=True)

    def publish_route_map(self, route_map: RouteMap) -> RouteMap:
        """Writes the route map if it is absent, and returns the one that is there.

        Raises:
            BadOption: it was made by a routing version that this program does not know.
        """
        with self._reaching():
            self._redis.set(self.keys.route_map, route_map_to_json(route_map), nx=True)
            text = cast(bytes, self._redis.get(self.keys.route_map))
        try:
            return route_map_from_json(text)
        except ValueError as error:
            raise BadOption(f"cluster {self.keys.cluster!r} in Redis: {error}") from error

    def renew(self, entry: ShardEntry, lease_s: float) -> Lease:
        """Takes or renews the shard's name with its present entry."""
        with self._reaching():
            done = self._redis.eval(
                _TAKE_OR_RENEW,
                1,
                self.keys.shard(entry.index),
                _incarnation_text(entry.incarnation),
                entry.to_json(),
                str(int(lease_s * 1000)),
            )
        return Lease.HELD if done else Lease.TAKEN

    def release(self, index: int, incarnation: int) -> None:
        """Gives the name back, if this incarnation holds it."""
        with self._reaching():
            self._redis.eval(_RELEASE, 1, self.keys.shard(index), _incarnation_text(incarnation))

    def record_lineage(self, index: int, lineage: int) -> bool:
        """Records the lineage that the shard serves now; returns whether it served another one before."""
        with self._reaching():
            before = cast("bytes | None", self._redis.getset(self.keys.lineage(index), str(lineage)))
        return before is not None and int(before) != lineage

    def publish_tables(self, tables: Sequence[common_pb2.TableInfo]) -> list[common_pb2.TableInfo]:
        """Writes schemas that are absent, and returns the entry that is there for each name, in order."""
        if not tables:
            return []
        with self._reaching(), self._redis.pipeline(transaction=False) as pipeline:
            for table in tables:
                schema = common_pb2.TableInfo(spec=table.spec, table_id=table.table_id, table_seed=table.table_seed)
                pipeline.hsetnx(self.keys.tables, table.spec.name, schema.SerializeToString(deterministic=True))
            pipeline.hmget(self.keys.tables, [table.spec.name for table in tables])
            values = cast("list[bytes]", pipeline.execute()[-1])
        return [common_pb2.TableInfo.FromString(value) for value in values]

    def present_tables(self, names: Sequence[str]) -> dict[str, common_pb2.TableInfo]:
        """Reads the schemas of those names that are taken."""
        with self._reaching():
            values = cast("list[bytes | None]", self._redis.hmget(self.keys.tables, list(names)))
        return {
            name: common_pb2.TableInfo.FromString(value) for name, value in zip(names, values, strict=True) if value is not None
        }

    def load_tables(self) -> list[common_pb2.TableInfo]:
        """Reads all schemas."""
        with self._reaching():
            values = cast("list[bytes]", self._redis.hvals(self.keys.tables))
        return [common_pb2.TableInfo.FromString(value) for value in values]

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()


def _incarnation_text(incarnation: int) -> str:
    """Returns how ShardEntry.to_json writes an incarnation; the comma ends the number."""
    return f'"incarnation": {incarnation},'
