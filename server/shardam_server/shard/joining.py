"""A shard's way into its cluster: the cluster's entry, its state, its name, the route map, its tables.

Source: PROTOCOL.md, sections 6 and 9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shardam_proto.errors import BadOption, RedisUnreachable, ShardNotReady, WrongCluster
from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import shard_pb2
from shardam_server.settings import ShardSettings
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import random_63_bits
from shardam_server.shard.known_lineages import HighMark, is_lost
from shardam_server.shard.membership import Membership
from shardam_server.shard.registration import Lease, Registration, Standing
from shardam_server.shard.renewal import RENEWALS_PER_LEASE
from shardam_server.shard.state import ShardState

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
"""Waits between two looks at Redis double from the first to the longest, so that a start is quick and an outage cheap."""

TAKEN_LEASES = 2.5
"""A name that is still held after so many leases is being renewed by a living process."""


class Joining:
    """Brings a shard into the cluster. Waits as long as it takes, and says for what.

    Args:
        shard: the shard.
        settings: its settings.
        registration: its entries in Redis.
        membership: its place in the cluster.
        make_state: makes an empty state.
        adopt: takes a plan's checkpoint over, and has the shard serve.
    """

    def __init__(
        self,
        shard: ShardContext,
        settings: ShardSettings,
        registration: Registration,
        membership: Membership,
        make_state: Callable[[], ShardState],
        adopt: Callable[[Plan], Awaitable[None]],
    ) -> None:
        self._shard = shard
        self._settings = settings
        self._registration = registration
        self._membership = membership
        self._make_state = make_state
        self._adopt = adopt
        self._plan: Plan | None = None

    async def register(self) -> None:
        """Takes the shard's name: with its state, without one as yet where a plan gives it another, or as LOST.

        Raises:
            BadOption: the settings contradict the cluster.
            WrongCluster: Redis or the folder belongs to another cluster, or another process holds this shard's name.
            JournalFailed: the folder cannot be written.
            ShardNotReady: another process came and went as this shard in the meantime.
        """
        shard, current = self._shard, self._shard.kept.current
        if current is not None:
            shard.identity.timeline = current.timeline
            shard.identity.plan = Plan.from_json(current.plan) if current.plan else None
            if current.epoch:
                shard.identity.route_map = RouteMap(current.epoch, current.cluster.num_shards)
        entry = await self._wait(f"Redis and the entry of cluster {self._settings.cluster!r}", self._cluster_entry)
        self._check_cluster(entry)
        self._check_count(entry)
        shard.identity.cluster = entry
        await self._warn_of_eviction()
        shared = await self._wait("Redis", self._registration.read_shared)
        own = None if current is None or current.is_unfinished else current.lineage
        known = shared.lineages.get(shard.identity.index)
        mark = shared.marks.get(shard.identity.index)
        plan = shared.plan
        if plan is None and shard.identity.plan is None:
            self._check_seed(entry)
        if plan is not None and (current is None or shard.identity.is_before(plan)):
            # A shard that was lost before the plan, or has lost since what it took over, is known by another lineage.
            self._membership.turn_to(plan)
            self._plan = plan if known in (None, own) else None
        if current is not None and self._plan is None:
            self._check_count(current.cluster)
        if self._plan is not None:
            logger.info("the cluster goes on from checkpoint %s: takes its share over", self._plan.folder)
        elif is_lost(own, known, cluster_formed=shared.route_map is not None) or self._is_behind(own, mark):
            self._lose(known)
        else:
            await self._go_on(own)
        standing = await self._take_name()
        if standing.before_plan:
            raise self._overtaken()
        if own is None and shard.identity.lineage and standing.had_map:
            raise self._overtaken()

    async def finish(self) -> None:
        """Waits for the route map, learns the cluster's tables, and registers as ready unless the shard is LOST.

        A shard that takes a checkpoint over serves when it returns, or is LOST.
        """
        shard = self._shard
        if self._plan is not None:
            await self._adopt(self._plan)
            return
        route_map = await self._wait("the other shards", self._route_map)
        shard.identity.route_map = route_map
        await shard.sequencer.change(lambda: shard.kept.note_epoch(route_map.epoch))
        if shard.serving == shard_pb2.SERVING_STATE_LOST:
            what = "its newer data folder, or --truncate-journal" if shard.lost_because else "its data folder"
            shard.waiting_for = f"{what}, or `shardam forget-shard --index {shard.identity.index}`"
            return
        await self._membership.install(await self._wait("Redis", self._registration.load_tables))
        self._membership.ready = True
        lease = await self._wait("Redis", self._membership.renew)
        if lease is not Lease.HELD:
            raise WrongCluster(
                f"shard {shard.identity.index} of cluster {self._settings.cluster!r} lost its name in Redis while it started "
                f"({lease.value}); stop the other process, or use another --index or --cluster"
            )

    # -- the state

    async def _go_on(self, own: int | None) -> None:
        """Has all further changes kept: behind those of the state that was recovered, or from an empty start on."""
        shard = self._shard
        if own is not None:
            shard.identity.lineage = own
            await shard.sequencer.change(lambda: shard.kept.resume(shard.state))
        else:
            shard.identity.lineage = await begin_empty(shard)

    def _is_behind(self, own: int | None, mark: HighMark | None) -> bool:
        """Says whether the cluster has seen more of the state than is here and than may be given up; notes why."""
        shard, has = self._shard, self._shard.state.change_number
        if own is None or mark is None or not mark.is_above(own, has):
            return False
        index, folder = shard.identity.index, shard.kept.folder
        if self._settings.truncate_journal:
            logger.warning(
                "--truncate-journal: starts as of change %d, the cluster has seen change %d; what came between is lost",
                has,
                mark.change_number,
            )
            return False
        shard.lost_because = (
            f"shard {index} is LOST: {folder} holds its state up to change {has}, and the cluster has seen change "
            f"{mark.change_number}; it is an older copy, or the machine lost what was not on its disk yet. Start the shard "
            f"with the newer folder; or accept the loss, with --truncate-journal, which starts it as of change {has}, or with "
            f"`shardam forget-shard --index {index}`, which gives all its rows up"
        )
        return True

    def _overtaken(self) -> ShardNotReady:
        """Returns the error of a start that was overtaken after Redis had been read; the next one knows what it met."""
        return ShardNotReady(
            f"another process served as shard {self._shard.identity.index} while this one started; start it again"
        )

    def _lose(self, known: int | None) -> None:
        shard = self._shard
        shard.identity.lineage = 0
        shard.state = self._make_state()
        shard.serving = shard_pb2.SERVING_STATE_LOST
        folder = "no data folder" if shard.kept.folder is None else f"{shard.kept.folder}"
        found = "" if shard.kept.current is None else f" of lineage {shard.kept.current.lineage}"
        logger.error(
            "%s (it started with %s%s; the cluster knows lineage %s)", shard.lost_message, folder, found, known or "unknown"
        )

    # -- steps; each runs off the event loop and returns None to be tried again

    def _cluster_entry(self) -> ClusterEntry | None:
        current = self._shard.kept.current
        if current is not None and current.cluster.num_shards != self._settings.shards:
            # A plan may have moved the state to other shards; else the settings are wrong.
            return self._registration.view().entry or current.cluster
        if current is not None:
            return self._registration.publish_cluster(current.cluster, self._shard.identity.route_map)
        if self._shard.identity.is_home:
            return self._registration.create_cluster(self._settings.shards, self._settings.seed)
        return self._registration.view().entry

    def _route_map(self) -> RouteMap | None:
        identity = self._shard.identity
        own, view, plan = identity.route_map, self._registration.view(), self._registration.read_shared().plan
        if plan is not None and identity.is_before(plan):
            raise self._overtaken()
        if view.route_map is not None and (own is None or view.route_map.epoch > own.epoch):
            return self._checked(view.route_map)
        if own is not None:
            return own
        num_shards = identity.require_cluster().num_shards
        missing = [index for index in range(num_shards) if index not in view.shards]
        if missing:
            self._shard.waiting_for = f"shards {missing} to register"
            return None
        if not identity.is_home:
            self._shard.waiting_for = "the home shard to make the route map"
            return None
        return self._checked(self._registration.publish_route_map(RouteMap(epoch=1, num_shards=num_shards)))

    async def _take_name(self) -> Standing:
        shard = self._shard
        index, lease_s = shard.identity.index, self._settings.lease_s
        deadline = asyncio.get_running_loop().time() + TAKEN_LEASES * lease_s
        while True:
            standing = await self._wait("Redis", self._membership.take)
            if standing.lease is Lease.HELD:
                return standing
            if standing.lease in (Lease.OTHER_LINEAGE, Lease.BEHIND):
                raise self._overtaken()
            if standing.lease is Lease.OTHER_CLUSTER:
                found = (await self._wait("Redis", self._registration.read_shared)).cluster
                if found is not None:
                    self._check_cluster(found)
                continue
            shard.waiting_for = f"the name of shard {index}, which another process holds"
            if asyncio.get_running_loop().time() > deadline:
                holder = (await self._wait("Redis", self._registration.view)).shards.get(index)
                where = "" if holder is None else f" (pid {holder.pid} at {holder.address})"
                raise WrongCluster(
                    f"shard {index} of cluster {self._settings.cluster!r} is already running{where}; stop it "
                    "first, or use another --index or --cluster"
                )
            await asyncio.sleep(min(LONGEST_WAIT_S, lease_s / RENEWALS_PER_LEASE))

    async def _warn_of_eviction(self) -> None:
        policy = await asyncio.to_thread(self._registration.eviction_policy)
        if policy not in (None, "noeviction"):
            logger.warning(
                "Redis may delete what the cluster keeps there: its maxmemory-policy is %s; set it to noeviction", policy
            )

    # -- checks

    def _check_cluster(self, entry: ClusterEntry) -> None:
        """Refuses a cluster that is not the folder's."""
        known = self._shard.identity.cluster
        kept = self._shard.kept
        if kept.current is not None:
            known = kept.current.cluster
        if known is None or known.cluster_id == entry.cluster_id:
            return
        name = self._settings.cluster
        if kept.current is None:
            raise WrongCluster(
                f"cluster {name!r} in Redis was id {known.cluster_id} and now is id {entry.cluster_id}; start this shard again"
            )
        raise WrongCluster(
            f"{kept.folder} holds a shard of cluster id {known.cluster_id}, Redis knows cluster {name!r} as id "
            f"{entry.cluster_id}. If shard 0 was started without its data folder, stop it and give it its folder back; or "
            "delete this folder to start empty; or use another --cluster or --data-dir"
        )

    def _checked(self, route_map: RouteMap) -> RouteMap:
        if route_map.num_shards != self._settings.shards:
            raise self._other_count("has a route map over", route_map.num_shards)
        return route_map

    def _check_count(self, entry: ClusterEntry) -> None:
        if entry.num_shards != self._settings.shards:
            raise self._other_count("was created with", entry.num_shards)

    def _check_seed(self, entry: ClusterEntry) -> None:
        """Refuses a seed that the cluster was not created with; a checkpoint brings its own."""
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

    # -- waiting

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


async def begin_empty(shard: ShardContext) -> int:
    """Has an empty state kept from now on; returns its new lineage, which the shard's identity does not have yet.

    Raises:
        JournalFailed: the folder cannot be written.
    """
    lineage, identity = random_63_bits(), shard.identity
    cluster, plan = identity.require_cluster(), "" if identity.plan is None else identity.plan.to_json()
    await shard.sequencer.change(
        lambda: shard.kept.begin(cluster, lineage, identity.timeline, identity.epoch, shard.state, plan)
    )
    return lineage
