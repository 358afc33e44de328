"""A LOST shard: how it is told to give its state up, and starts empty (PROTOCOL.md, section 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardam_proto.errors import BadOption, ShardamError, ShardNotReady
from shardam_proto.registry import ClusterView
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.joining import begin_empty
from shardam_server.shard.membership import Membership
from shardam_server.shard.peers import Peers
from shardam_server.shard.registration import Lease, Registration
from shardam_server.shard.state import ShardState

logger = logging.getLogger(__name__)


class LostShard:
    """What a shard does when it is told to forget the state that it has lost.

    Args:
        shard: the shard.
        registration: its entries in Redis.
        membership: its place in the cluster.
        peers: the other shards.
        make_state: makes an empty state.
        serve: has the shard serve.
    """

    def __init__(
        self,
        shard: ShardContext,
        registration: Registration,
        membership: Membership,
        peers: Peers,
        make_state: Callable[[], ShardState],
        serve: Callable[[], Awaitable[None]],
    ) -> None:
        self._shard = shard
        self._registration = registration
        self._membership = membership
        self._peers = peers
        self._make_state = make_state
        self._serve = serve
        self._one_at_a_time = asyncio.Lock()
        self._new_lineage = 0
        self._has_forgotten = False

    async def forget(self) -> None:
        """Starts empty on a new lineage and serves. Nothing to do if this process has done so already.

        A call that breaks off leaves the shard LOST; it is finished by repeating it.

        Raises:
            BadOption: the shard is not LOST.
            ShardNotReady: it does not hold its name now, or has not found out yet what it has.
            RedisUnreachable: Redis does not answer.
            ShardamError: the folder cannot be written.
        """
        async with self._one_at_a_time:
            shard = self._shard
            if shard.serving == shard_pb2.SERVING_STATE_LOST:
                await self._forget()
            elif shard.serving == shard_pb2.SERVING_STATE_STARTING:
                raise ShardNotReady(f"shard {shard.identity.index} is starting, waits for {shard.waiting_for}; try again")
            elif not self._has_forgotten:
                raise BadOption(
                    f"shard {shard.identity.index} is not LOST: it has its state, {shard.state.num_rows} rows, and keeps it; "
                    "there is nothing to forget"
                )

    async def _forget(self) -> None:
        shard, membership = self._shard, self._membership
        shard.tenure.check()
        shard.identity.require_route_map()
        view = await asyncio.to_thread(self._registration.view)
        # Redis comes last: it never names a lineage that no state has, and a crash before leaves the shard LOST.
        if not self._new_lineage:  # else a former attempt broke off behind this point
            shard.state = self._make_state()
            self._new_lineage = await begin_empty(shard)
        lineage = self._new_lineage
        await membership.install(await asyncio.to_thread(self._registration.load_tables))
        await self._adopt_steps(view)
        await asyncio.to_thread(membership.replace_lineage, lineage)
        shard.identity.lineage = lineage
        shard.serving = shard_pb2.SERVING_STATE_STARTING
        shard.waiting_for = ""
        membership.ready = True
        self._has_forgotten = True
        await self._serve()
        if await asyncio.to_thread(membership.renew) is not Lease.HELD:
            raise ShardNotReady(f"shard {shard.identity.index} has lost its name in Redis; another process may be it now")
        logger.warning("was told to forget its state: starts empty on lineage %d; the rows it had are given up", lineage)

    async def _adopt_steps(self, view: ClusterView) -> None:
        """Takes table steps from shards that serve already: t is the same on every shard (CONTRACT.md).

        Only a shard that starts empty does: the steps of a state that was recovered follow from its own pushes, those that its
        clients will send again included.
        """
        for entry in view.shards.values():
            if entry.index == self._shard.identity.index or not entry.ready:
                continue
            try:
                steps = await self._peers.table_steps(entry)
            except ShardamError as error:
                logger.warning("cannot ask shard %d for its table steps: %s", entry.index, error.message)
                continue
            await self._shard.sequencer.change(lambda steps=steps: self._shard.state.raise_steps(steps))  # type: ignore[misc]
