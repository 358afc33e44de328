"""What begins and ends with serving, which a restore makes a shard do more than once."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from grpc_health.v1 import health_pb2

from shardam_proto.v1 import shard_pb2
from shardam_server.shard.client_liveness import ClientWatch
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.home import HomeGroups

logger = logging.getLogger(__name__)


class Serving:
    """Has a shard serve, and pause. Used on the event loop.

    Args:
        shard: the shard.
        groups: groups of workers.
        client_watch: notices clients that are gone.
        set_health: tells gRPC health checks.

    Attributes:
        when_serving: called each time that the shard begins to serve.
    """

    def __init__(
        self,
        shard: ShardContext,
        groups: HomeGroups,
        client_watch: ClientWatch,
        set_health: Callable[[int], Awaitable[None]],
    ) -> None:
        self.when_serving: Callable[[], None] = lambda: None
        self._shard = shard
        self._groups = groups
        self._client_watch = client_watch
        self._set_health = set_health

    async def serve(self) -> None:
        """Has the shard serve.

        Raises:
            ShardamError: home could not take up what a former process began.
        """
        shard = self._shard
        shard.serving = shard_pb2.SERVING_STATE_SERVING
        await self._groups.start()
        await self._client_watch.start()
        self.when_serving()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        logger.info("serves at %s on device %s", shard.address, shard.device.name)

    async def suspend(self) -> None:
        """Ends what runs beside serving; may be called without `serve`. The caller has set the state that the shard is in."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._client_watch.stop()
        await self._groups.stop()
