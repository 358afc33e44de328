"""How `up` sees that its children serve: Redis answers, a shard's registration says ready, the admin API is ready."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections.abc import Callable

import redis

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import ClusterView, Keys, Plan, ShardEntry, connect_redis, read_cluster
from shardam_server.command_errors import CommandError
from shardam_server.redis_errors import redis_unreachable

_POLL_S = 0.1  # how often readiness is looked at
_VIEW_AGE_S = 0.08  # shards that look at the same moment share one read of Redis
_HEALTH_TIMEOUT_S = 2.0  # the admin API answers from memory


class ClusterProbe:
    """Looks at a cluster from outside, without blocking the event loop.

    Args:
        url: Redis URL.
        cluster: name of the cluster.
        redis_timeout_s: seconds until a Redis call has failed.
    """

    def __init__(self, url: str, cluster: str, redis_timeout_s: float) -> None:
        self._url = url
        self._keys = Keys(cluster)
        self._connection = connect_redis(url, redis_timeout_s)
        self._lock = asyncio.Lock()
        self._view: ClusterView | None = None
        self._view_time = float("-inf")

    def close(self) -> None:
        """Closes the connection to Redis."""
        self._connection.close()

    async def check_redis(self) -> None:
        """Asks Redis once.

        Raises:
            RedisUnreachable: it did not answer.
        """
        try:
            await asyncio.to_thread(self._connection.ping)
        except redis.RedisError as error:
            raise redis_unreachable(self._url, error) from error

    async def redis_ready(self) -> None:
        """Waits until Redis answers."""
        while True:
            with contextlib.suppress(RedisUnreachable):
                return await self.check_redis()
            await asyncio.sleep(_POLL_S)

    async def shard_ready(self, index: int, pid: int, when_lost: Callable[[ShardEntry], None]) -> ShardEntry:
        """Waits until the process `pid` is registered as a shard and serves, and returns its registration.

        The process id tells it from the lease that a predecessor left. A shard that is LOST serves nothing, so it is not ready.

        Args:
            index: index of the shard.
            pid: its process id.
            when_lost: called once if the shard says that it is LOST.
        """
        lost = False
        while True:
            with contextlib.suppress(RedisUnreachable):
                view = await self.view()
                entry = view.shards.get(index)
                if entry is not None and entry.pid == pid:
                    if entry.lost and not lost:
                        lost = True
                        when_lost(entry)
                    if view.route_map is not None and entry.ready and not entry.lost:
                        return entry
            await asyncio.sleep(_POLL_S)

    async def num_shards(self) -> int | None:
        """Returns the number of shards that the cluster has now, once Redis answers; None: Redis knows no such cluster.

        Raises:
            CommandError: what Redis says is not of this version.
        """
        while True:
            with contextlib.suppress(RedisUnreachable):
                entry = (await self.view()).entry
                return None if entry is None else entry.num_shards
            await asyncio.sleep(_POLL_S)

    async def admin_ready(self, host: str, port: int) -> None:
        """Waits until the admin API says that it and all shards serve (/readyz)."""
        while not await asyncio.to_thread(_is_ready, host, port):
            await asyncio.sleep(_POLL_S)

    async def plan_timeline(self) -> int:
        """Returns the timeline of the last plan; zero: there is none.

        Raises:
            RedisUnreachable: Redis did not answer.
        """
        try:
            value = await asyncio.to_thread(self._connection.get, self._keys.plan)
        except redis.RedisError as error:
            raise redis_unreachable(self._url, error) from error
        return 0 if value is None else Plan.from_json(value).timeline

    async def view(self) -> ClusterView:
        """Returns what Redis says of the cluster, at most a moment old.

        Raises:
            RedisUnreachable: it did not answer.
            CommandError: what it says is not of this version.
        """
        async with self._lock:
            if self._view is None or time.monotonic() - self._view_time > _VIEW_AGE_S:
                try:
                    self._view = await asyncio.to_thread(read_cluster, self._connection, self._keys)
                except ValueError as error:
                    raise CommandError(f"cluster {self._keys.cluster!r} in Redis cannot be read: {error}") from error
                self._view_time = time.monotonic()
            return self._view


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_HEALTH_TIMEOUT_S)  # knows no proxy variables
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
