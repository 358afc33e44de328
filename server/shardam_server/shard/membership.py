"""How a shard joins its cluster and stays in it: name, tables, route map, renewal (PROTOCOL.md, section 9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from shardam_proto.errors import BadOption, RedisUnreachable, ShardamError, WrongCluster
from shardam_proto.registry import ClusterEntry, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_server.settings import ShardSettings
from shardam_server.shard.context import ShardContext
from shardam_server.shard.peers import Peers
from shardam_server.shard.registration import Lease, Registration
from shardam_server.shard.table import table_from_info

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
"""Waits between two looks at Redis double from the first to the longest, so that a start is quick and an outage cheap."""

RENEWALS_PER_LEASE = 6
"""Five renewals may fail before the name is free for another, and a tick may be late by a third of a lease (tenure.py)."""

TAKEN_LEASES = 2.5
"""A name that is still held after so many leases is being renewed by a living process."""


class Membership:
    """One shard's way into the cluster.

    Args:
        shard: the shard.
        settings: its settings.
        registration: its entries in Redis.
    """

    def __init__(self, shard: ShardContext, settings: ShardSettings, registration: Registration) -> None:
        self._shard = shard
        self._settings = settings
        self._registration = registration
        self._ready = False

    async def join(self) -> None:
        """Joins: cluster entry, name, tables. Waits as long as it takes and says for what.

        Raises:
            BadOption: the settings contradict the cluster.
            WrongCluster: another process holds this shard's name.
        """
        entry = await self._wait(f"Redis and the entry of cluster {self._settings.cluster!r}", self._cluster_entry)
        self._check_settings(entry)
        self._shard.identity.cluster = entry
        await self._take_name()
        identity = self._shard.identity
        await self._wait("Redis", lambda: self._registration.record_lineage(identity.index, identity.lineage))
        infos = await self._wait("Redis", self._registration.load_tables)
        tables = [table_from_info(info, self._shard.device.make_records) for info in infos]
        await self._shard.sequencer.change(lambda: self._shard.state.install(tables))

    async def finish(self, peers: Peers) -> None:
        """Waits for the route map, takes over table steps from peers that serve, and registers as ready."""
        self._shard.identity.route_map = await self._wait("the other shards", self._route_map)
        await self._adopt_steps(peers)
        self._ready = True
        await self._wait("Redis", self._renew)

    async def renew_forever(self) -> None:
        """Keeps the name and publishes what Redis has lost; ends only if another process has taken the name."""
        reachable = True
        while True:
            await asyncio.sleep(self._settings.lease_s / RENEWALS_PER_LEASE)
            self._shard.tenure.tick()
            try:
                lease = await asyncio.to_thread(self._renew)
                if lease is Lease.HELD:
                    self._shard.tenure.confirm()
                if lease is Lease.TAKEN:
                    logger.error(
                        "another process has taken the name of shard %d in Redis; stopping", self._shard.identity.index
                    )
                    return
                if not reachable:
                    logger.info("Redis answers again")
                reachable = True
            except RedisUnreachable as error:
                if reachable:
                    logger.warning("%s; pulls and pushes go on, creating tables and new connections wait", error.message)
                reachable = False

    async def leave(self) -> None:
        """Gives the name back; if Redis does not answer, the lease runs out by itself."""
        identity = self._shard.identity
        try:
            await asyncio.to_thread(self._registration.release, identity.index, identity.incarnation)
        except RedisUnreachable as error:
            logger.warning("%s; the name becomes free when its lease runs out", error.message)

    async def withdraw(self) -> None:
        """Registers as not ready, so that new clients do not come while the shard drains."""
        self._ready = False
        try:
            await asyncio.to_thread(self._renew)
        except RedisUnreachable as error:
            logger.warning("%s; draining without telling it", error.message)

    # -- steps; each runs off the event loop and returns None to be tried again

    def _cluster_entry(self) -> ClusterEntry | None:
        if self._shard.identity.is_home:
            return self._registration.create_cluster(self._settings.shards, self._settings.seed)
        return self._registration.view().entry

    def _route_map(self) -> RouteMap | None:
        entry = self._shard.identity.require_cluster()
        view = self._registration.view()
        if view.route_map is not None:
            return self._checked(view.route_map)
        missing = [index for index in range(entry.num_shards) if index not in view.shards]
        if missing:
            self._shard.waiting_for = f"shards {missing} to register"
            return None
        if not self._shard.identity.is_home:
            self._shard.waiting_for = "the home shard to make the route map"
            return None
        return self._checked(self._registration.publish_route_map(RouteMap(epoch=1, num_shards=entry.num_shards)))

    def _checked(self, route_map: RouteMap) -> RouteMap:
        if route_map.num_shards != self._settings.shards:
            raise self._other_count("has a route map over", route_map.num_shards)
        return route_map

    def _entry(self) -> ShardEntry:
        identity = self._shard.identity
        return ShardEntry(
            index=identity.index,
            address=self._shard.address,
            http_address=self._shard.http_address,
            incarnation=identity.incarnation,
            lineage=identity.lineage,
            device=self._shard.device.name,
            pid=self._shard.pid,
            ready=self._ready,
        )

    def _renew(self) -> Lease:
        lease = self._registration.renew(self._entry(), self._settings.lease_s)
        identity = self._shard.identity
        if lease is Lease.HELD and identity.cluster is not None:
            self._registration.publish_cluster(identity.cluster)
            if identity.route_map is not None:
                self._republish(identity.route_map)
        return lease

    def _republish(self, route_map: RouteMap) -> None:
        """Writes back what a flushed Redis has lost."""
        if self._registration.view().route_map is None:
            self._registration.publish_route_map(route_map)
            self._registration.publish_tables([table.schema_info() for table in self._shard.state.tables()])

    async def _take_name(self) -> None:
        index, lease_s = self._shard.identity.index, self._settings.lease_s
        deadline = asyncio.get_running_loop().time() + TAKEN_LEASES * lease_s
        while await self._wait("Redis", self._renew) is Lease.TAKEN:
            self._shard.waiting_for = f"the name of shard {index}, which another process holds"
            if asyncio.get_running_loop().time() > deadline:
                holder = (await self._wait("Redis", self._registration.view)).shards.get(index)
                where = "" if holder is None else f" (pid {holder.pid} at {holder.address})"
                raise WrongCluster(
                    f"shard {index} of cluster {self._settings.cluster!r} is already running{where}; stop it "
                    "first, or use another --index or --cluster"
                )
            await asyncio.sleep(min(LONGEST_WAIT_S, lease_s / RENEWALS_PER_LEASE))

    def _check_settings(self, entry: ClusterEntry) -> None:
        if entry.num_shards != self._settings.shards:
            raise self._other_count("was created with", entry.num_shards)
        if "seed" in self._settings.model_fields_set and self._settings.seed != entry.seed:
            raise BadOption(
                f"cluster {self._settings.cluster!r} was created with seed {entry.seed}, this shard was started with --seed "
                f"{self._settings.seed}; leave --seed out or use another --cluster name"
            )

    def _other_count(self, verb: str, num_shards: int) -> BadOption:
        return BadOption(
            f"cluster {self._settings.cluster!r} {verb} {num_shards} shards, this shard was started with --shards "
            f"{self._settings.shards}; use --shards {num_shards} or another --cluster name"
        )

    async def _adopt_steps(self, peers: Peers) -> None:
        """Takes table steps from shards that serve already: t is the same on every shard (CONTRACT.md)."""
        view = await self._wait("Redis", self._registration.view)
        for entry in view.shards.values():
            if entry.index == self._shard.identity.index or not entry.ready:
                continue
            try:
                steps = await peers.table_steps(entry)
            except ShardamError as error:
                logger.warning("cannot ask shard %d for its table steps: %s", entry.index, error.message)
                continue
            await self._shard.sequencer.change(lambda steps=steps: self._shard.state.raise_steps(steps))  # type: ignore[misc]

    async def _wait(self, what: str, action: Callable[[], T | None]) -> T:
        """Runs an action until it returns something, with back-off; Redis may come late."""
        wait_s, announced = FIRST_WAIT_S, False
        self._shard.waiting_for = what
        while True:
            try:
                result = await asyncio.to_thread(action)
                if result is not None:
                    self._shard.waiting_for = ""
                    return result
            except RedisUnreachable as error:
                self._shard.waiting_for = f"Redis: {error.message}"
            if not announced and wait_s >= LONGEST_WAIT_S:
                logger.info("waits for %s", self._shard.waiting_for)
                announced = True
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, wait_s * 2)
