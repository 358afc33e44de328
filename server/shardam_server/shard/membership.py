"""How a shard stays in its cluster: what it says of itself, what it learns, what it writes again (PROTOCOL.md, section 9)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from shardam_proto.errors import RedisUnreachable, ShardNotReady
from shardam_proto.registry import ClusterEntry, Plan, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, shard_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.known_lineages import HighMark, KnownLineages
from shardam_server.shard.registration import Claim, Lease, Registration, Standing
from shardam_server.shard.shared_entries import PlanEntry, Shared
from shardam_server.shard.table import table_from_info

logger = logging.getLogger(__name__)


class Membership:
    """One shard's place in the cluster. Methods without `async` block and may be called from any thread.

    Args:
        shard: the shard.
        registration: its entries in Redis.
        lease_s: how long its name outlives its last renewal.
        notice_map: called, from any thread, with a route map of a higher epoch than the shard's.
        notice_plan: called, from any thread, with a plan that the shard's state is from before, again and again.
        accepts_loss: the shard may start from an older state than the cluster has seen.

    Attributes:
        ready: what the shard registers as.
        registered: it has taken its name.
    """

    def __init__(
        self,
        shard: ShardContext,
        registration: Registration,
        lease_s: float,
        notice_map: Callable[[RouteMap], None],
        notice_plan: Callable[[Plan], None],
        *,
        accepts_loss: bool = False,
    ) -> None:
        self._shard = shard
        self._registration = registration
        self._lease_s = lease_s
        self._notice_map = notice_map
        self._notice_plan = notice_plan
        self._accepts_loss = accepts_loss
        self._seen = KnownLineages(shard.identity.index)
        self._calling = threading.Lock()
        self._left = False
        self.ready = False
        self.registered = False

    # -- the name

    def take(self) -> Standing:
        """Takes the shard's name for this process, and writes what Redis lacks.

        A lineage that Redis knows differently, or further, refuses it. A name whose owner must be dead, because this
        process holds its folder, is taken over.
        """
        with self._calling:
            shared = self._registration.read_shared()
            if self._shard.identity.lineage:
                self._put_plan_back(shared)
                self._publish_missing_tables(shared)
            standing = self._registration.claim(self._claim(shared, taking=True))
            self.registered = standing.lease is Lease.HELD
            return standing

    def renew(self) -> Lease:
        """Renews the name with what is known now, writes again what Redis has lost, learns what is new there."""
        with self._calling:
            if self._left:
                return Lease.HELD
            asked_at = self._shard.tenure.tick()
            shared = self._registration.read_shared()
            plan = shared.plan if self._is_ours(shared) else None
            before_plan = plan is not None and self._shard.identity.is_before(plan)
            if plan is not None and before_plan:
                self._notice_plan(plan)
            else:
                self._learn(shared)
                self._put_plan_back(shared)
                self._publish_missing_tables(shared)
            standing = self._registration.claim(self._claim(shared, taking=False))
            if standing.lease is Lease.HELD and not (before_plan or standing.before_plan):
                self._shard.tenure.confirm(asked_at)  # else what it has is no longer the cluster's state
            return standing.lease

    async def withdraw(self) -> None:
        """Registers as not ready, so that new clients do not come while the shard drains."""
        self.ready = False
        try:
            await asyncio.to_thread(self.renew)
        except RedisUnreachable as error:
            logger.warning("%s; draining without telling it", error.message)

    async def leave(self) -> None:
        """Gives the name back for good; if Redis does not answer, the lease runs out by itself."""
        try:
            await asyncio.to_thread(self._leave)
        except RedisUnreachable as error:
            logger.warning("%s; the name becomes free when its lease runs out", error.message)

    def _leave(self) -> None:
        with self._calling:  # a renewal under way would take the name again
            self._left = True
            identity = self._shard.identity
            self._registration.release(identity.index, identity.incarnation)

    def _claim(self, shared: Shared, *, taking: bool) -> Claim:
        identity, kept = self._shard.identity, self._shard.kept
        cluster = identity.require_cluster()
        same = self._is_ours(shared)
        entry = self._entry()
        lineage = entry.lineage  # looked at once: it begins on the event loop's thread, whenever a new state is kept
        return Claim(
            entry=entry,
            lease_s=self._lease_s,
            cluster=cluster,
            route_map=identity.route_map,
            lineages=self._seen.missing_from(shared.lineages, without_own=lineage != 0) if same else {},
            has_folder=taking and kept.live,
            change_number=self._kept_change() if lineage else None,
            accepts_loss=taking and self._accepts_loss,
            marks=self._seen.marks_missing_from(shared.marks) if same else {},
            timeline=identity.timeline,
        )

    def _is_ours(self, shared: Shared) -> bool:
        return shared.cluster is None or shared.cluster.cluster_id == self._shard.identity.require_cluster().cluster_id

    def _kept_change(self) -> int | None:
        """Returns the last change that a killed process comes back with; never one that may still be taken back."""
        kept_change = self._shard.kept.kept_change
        return None if kept_change is None else min(kept_change, self._shard.state.change_number)

    def _entry(self) -> ShardEntry:
        shard = self._shard
        return ShardEntry(
            index=shard.identity.index,
            address=shard.address,
            http_address=shard.http_address,
            incarnation=shard.identity.incarnation,
            lineage=shard.identity.lineage,
            device=shard.device.name,
            pid=shard.pid,
            ready=self.ready,
            lost=shard.serving == shard_pb2.SERVING_STATE_LOST,
            folder=shard.kept.identity,
        )

    # -- what is shared

    def _learn(self, shared: Shared) -> None:
        identity = self._shard.identity
        if shared.cluster is None or not self._is_ours(shared):
            return
        self._seen.note(shared.lineages, shared.marks)
        own, found = identity.route_map, shared.route_map
        if own is not None and found is not None and found.epoch > own.epoch:
            if found.num_shards != own.num_shards:
                logger.error("Redis has a route map over %d shards, not %d: not taken", found.num_shards, own.num_shards)
                return
            self._notice_map(found)

    def _put_plan_back(self, shared: Shared) -> None:
        """Writes the plan that this state comes from again, if Redis has lost it, with what is known since."""
        identity, kept_change = self._shard.identity, self._kept_change()
        plan, known = identity.plan, shared.plan
        if plan is None or not self._is_ours(shared):
            return
        if known is not None and not plan.is_ahead_of(known.timeline, known.epoch):
            return
        own = {identity.index: identity.lineage} if identity.lineage else {}
        marks = {} if kept_change is None or not own else {identity.index: HighMark(identity.lineage, kept_change)}
        self._registration.put_plan_back(
            PlanEntry(
                plan,
                identity.require_cluster(),
                [table.schema_info() for table in self._shard.state.tables()],
                {**self._seen.missing_from({}, without_own=True), **own},
                {**self._seen.marks_missing_from({}), **marks},
            )
        )
        logger.warning("Redis had lost the plan to go on from checkpoint %s: written again", plan.folder)

    def _publish_missing_tables(self, shared: Shared) -> None:
        """Comes before the map is written: who sees the map may rely on the tables."""
        tables = self._shard.state.tables()
        if shared.route_map is None or shared.num_tables < len(tables):
            self._registration.publish_tables([table.schema_info() for table in tables])

    async def install(self, infos: Sequence[common_pb2.TableInfo]) -> None:
        """Installs the tables of Redis that this shard lacks; they were made while it was away.

        Raises:
            SchemaMismatch: Redis knows another table by a name that is used here.
            JournalFull, JournalFailed: they cannot be kept.
        """
        shard = self._shard
        tables = [table_from_info(info, shard.device.make_records) for info in infos if _is_new(info, shard)]
        if tables:
            await shard.sequencer.change(lambda: shard.state.install(tables))
            await shard.state.journal.durable()

    # -- a new start

    def turn_to(self, plan: Plan) -> None:
        """Makes the shard one of a plan's cluster, without a state as yet; what was known of the former one is forgotten."""
        identity = self._shard.identity
        with self._calling:
            identity.lineage = 0
            identity.timeline, identity.plan = plan.timeline, plan
            identity.cluster = ClusterEntry(identity.require_cluster().cluster_id, plan.num_shards, plan.seed)
            identity.route_map = RouteMap(plan.epoch, plan.num_shards)
            self._seen = KnownLineages(identity.index)

    def replace_lineage(self, lineage: int) -> None:
        """Records in Redis that this LOST shard starts on a new lineage.

        Raises:
            ShardNotReady: another process has its name.
        """
        identity = self._shard.identity
        with self._calling:
            known = self._registration.read_shared().lineages.get(identity.index)
            if not self._registration.replace_lineage(identity.index, identity.incarnation, known, lineage):
                raise ShardNotReady(f"shard {identity.index} does not hold its name in Redis now; try again")
            self._seen.note({identity.index: lineage}, {})


def _is_new(info: common_pb2.TableInfo, shard: ShardContext) -> bool:
    table = shard.state.find_table(info.spec.name)
    return table is None or table.table_id != info.table_id
