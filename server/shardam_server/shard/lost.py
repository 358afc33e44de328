"""A LOST shard: how it is told to give its state up, and starts empty (PROTOCOL.md, section 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardam_proto.errors import BadOption, ShardNotReady
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.joining import begin_empty
from shardam_server.shard.leveling import Leveling, take_over
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

    async def forget(self, *, without_lost: bool = False) -> None:
        """Starts empty on a new lineage and serves. Nothing to do if this process has done so already.

        All clients of before are ended on all shards. A call that breaks off leaves the shard LOST; it is finished by repeating
        it.

        Args:
            without_lost: go on without other shards that are LOST: their rows are given up, too.

        Raises:
            BadOption: the shard is not LOST.
            ShardNotReady: it does not hold its name now, or has not found out yet what it has; or another shard is away.
            RedisUnreachable: Redis does not answer.
            ShardamError: the folder cannot be written.
        """
        async with self._one_at_a_time:
            shard = self._shard
            if shard.serving == shard_pb2.SERVING_STATE_LOST:
                await self._forget(without_lost=without_lost)
            elif shard.serving == shard_pb2.SERVING_STATE_STARTING:
                raise ShardNotReady(f"shard {shard.identity.index} is starting, waits for {shard.waiting_for}; try again")
            elif not self._has_forgotten:
                raise BadOption(
                    f"shard {shard.identity.index} is not LOST: it has its state, {shard.state.num_rows} rows, and keeps it; "
                    "there is nothing to forget"
                )

    async def _forget(self, *, without_lost: bool) -> None:
        shard, membership = self._shard, self._membership
        shard.tenure.check()
        shard.identity.require_route_map()
        leveling = Leveling(self._peers, await self._others(without_lost=without_lost))
        level = await leveling.run()
        # Redis comes last: it never names a lineage that no state has, and a crash before leaves the shard LOST.
        if not self._new_lineage:  # else a former attempt broke off behind this point
            shard.state = self._make_state()
            self._new_lineage = await begin_empty(shard)
        lineage = self._new_lineage
        await membership.install(await asyncio.to_thread(self._registration.load_tables))
        await shard.sequencer.change(lambda: take_over(shard.state, level))
        await shard.state.journal.durable()
        await asyncio.to_thread(membership.replace_lineage, lineage)
        await leveling.settle(level)  # not before: until then the former state may still come back, and be brought level
        shard.identity.lineage = lineage
        shard.serving = shard_pb2.SERVING_STATE_STARTING
        shard.waiting_for = shard.lost_because = ""
        membership.ready = True
        self._has_forgotten = True
        await self._serve()
        if await asyncio.to_thread(membership.renew) is not Lease.HELD:
            raise ShardNotReady(f"shard {shard.identity.index} has lost its name in Redis; another process may be it now")
        logger.warning("was told to forget its state: starts empty on lineage %d; the rows it had are given up", lineage)

    async def _others(self, *, without_lost: bool) -> list[ShardEntry]:
        """Returns the other shards, all of which have to say what they have: t is the same on every shard (CONTRACT.md)."""
        identity = self._shard.identity
        shards = (await asyncio.to_thread(self._registration.view)).shards
        indexes = [index for index in range(identity.require_cluster().num_shards) if index != identity.index]
        lost = [index for index in indexes if index in shards and shards[index].lost]
        away = [index for index in indexes if index not in lost and (index not in shards or not shards[index].ready)]
        if away:
            raise ShardNotReady(
                f"shard {identity.index} can start empty only when all other shards serve, because it takes over their table "
                f"steps; shards {away} do not: start them and try again"
            )
        if lost and not without_lost:
            raise ShardNotReady(
                f"shard {identity.index} can start empty only when all other shards serve, because it takes over their table "
                f"steps; shards {lost} are LOST, too: bring their data folders back; or, to give up their rows as well, tell "
                f"each of shards {sorted([identity.index, *lost])} `shardam forget-shard --without-lost`"
            )
        return [shards[index] for index in indexes if index not in lost]
