"""How home moves the state to another number of shards (PROTOCOL.md, section 8).

A cut whose hold does not end, its files, and a plan in Redis that names them: from then on other shards serve, and the present
ones end. Whatever fails before the plan is decided leaves the present ones as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from shardam_proto.errors import (
    BadOption,
    CheckpointFailed,
    RedisUnreachable,
    ShardamError,
    ShardLost,
    ShardNotReady,
    StaleState,
)
from shardam_proto.registry import Plan, lost_shard_problem
from shardam_proto.routing import NUM_BUCKETS
from shardam_proto.v1 import cut_pb2
from shardam_server.shard.checkpoints import plans
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.creation import Creation
from shardam_server.shard.checkpoints.cutting import CutResult, Cutting, Tries
from shardam_server.shard.checkpoints.jobs import ReportProgress
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import random_63_bits
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.registration import Registration

logger = logging.getLogger(__name__)

WRITE_HOLD_S = 10.0
"""How long shards stay held without hearing from home while files are written: training stands still as long if home dies."""

RENEWALS_PER_HOLD = 6
"""Five renewals may be late before a hold runs out."""

DECIDE_HOLD_S = 30.0
"""The last renewal before the decision: a call to Redis has failed or worked by then, however often it is repeated."""

DECIDE_AGAIN_S = 0.5
"""Pause before Redis is asked again whether it has decided; all shards stand still meanwhile."""


@dataclasses.dataclass
class _UnderWay:
    """A move under way.

    Attributes:
        name: name of its checkpoint.
        hold_id: the hold; zero: none yet.
        task_id: the task that writes files, on each shard; the checkpoint's id. Of the hold.
        is_open: Redis was asked to decide, and whether it has is not known.
    """

    name: str
    hold_id: int = 0
    task_id: int = 0
    is_open: bool = False


class Resharding:
    """Moves the state to another number of shards, one move at a time. Used on home's event loop.

    Args:
        shard: home.
        registration: its entries in Redis.
        cuts: asks shards, home itself among them.
        cutting: cuts.
        creation: has files written, and writes the manifest.
        catalogue: where checkpoints lie.
    """

    def __init__(
        self,
        shard: ShardContext,
        registration: Registration,
        cuts: PeerCuts,
        cutting: Cutting,
        creation: Creation,
        catalogue: Catalogue,
    ) -> None:
        self._shard = shard
        self._identity = shard.identity
        self._registration = registration
        self._cuts = cuts
        self._cutting = cutting
        self._creation = creation
        self._catalogue = catalogue

    async def check(self, num_shards: int) -> tuple[int, ...]:
        """Refuses what cannot be moved; returns the incarnations of all shards.

        Raises:
            BadOption: a number of shards that cannot be, or the present one.
            ShardNotReady: a shard is not there.
            ShardLost: a shard is LOST.
            RedisUnreachable: Redis does not answer.
        """
        present = self._identity.require_cluster().num_shards
        if not 1 <= num_shards <= NUM_BUCKETS:
            raise BadOption(f"a cluster has 1 to {NUM_BUCKETS} shards, got {num_shards}")
        if num_shards == present:
            raise BadOption(f"the cluster has {present} shards already: there is nothing to move")
        view = await asyncio.to_thread(self._registration.view)
        missing = [index for index in range(present) if index not in view.shards]
        if missing:
            raise ShardNotReady(f"shards {missing} are not registered, so their rows cannot be moved; start them and try again")
        for index, entry in sorted(view.shards.items()):
            if entry.lost:
                raise ShardLost(lost_shard_problem(index), metadata={"shard": str(index)})
        return tuple(view.shards[index].incarnation for index in range(present))

    async def run(self, num_shards: int, report_progress: ReportProgress) -> None:
        """Moves the state; once this returns, the present shards, this one among them, are told to end.

        Raises:
            ShardamError: nothing has moved; no shard is held, and nothing of it is left.
        """
        incarnations = await self.check(num_shards)
        await self._cuts.refresh()
        under_way = _UnderWay(await asyncio.to_thread(self._open, num_shards))
        try:
            cut = await self._cut(under_way, report_progress)
            async with self._renewing(under_way.hold_id):
                shards = await self._creation.written(report_progress, cut)
                folder = await asyncio.to_thread(self._creation.complete, under_way.name, cut, shards, {})
            report_progress(cut.size_bytes, cut.size_bytes, "decides")
            plan = self._plan(num_shards, folder, cut)
            await self._decide(under_way, plan, cut, incarnations)
        except BaseException:
            await asyncio.shield(self._undo(under_way))
            raise
        logger.info("the state has moved to %d shards (epoch %d): all present shards end", num_shards, plan.epoch)
        await asyncio.shield(self._tell(plan))

    def _open(self, num_shards: int) -> str:
        """Makes the folder of a checkpoint that is named after the move."""
        self._catalogue.prepare()
        self._catalogue.remove_incomplete()
        now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"reshard-{now}-to-{num_shards}-{secrets.token_hex(2)}"
        self._catalogue.new_folder(name)
        return name

    async def _cut(self, under_way: _UnderWay, report_progress: ReportProgress) -> CutResult:
        """Cuts with a hold that stays, as often as it takes."""
        folder = self._catalogue.relative(self._catalogue.resolve(under_way.name))
        tries = Tries()
        while True:
            report_progress(0, 0, "brings all shards to the same changes")
            try:
                cut = await self._cutting.cut(folder, random_63_bits(), final=True, without=tries.without)
            except ShardamError as error:
                await tries.wait_after(error)
                await self._cuts.refresh()
            else:
                under_way.hold_id, under_way.task_id = cut.hold_id, cut.task_id
                return cut

    @contextlib.asynccontextmanager
    async def _renewing(self, hold_id: int) -> AsyncIterator[None]:
        """Keeps all shards held; what runs inside is broken off if one does not stay so.

        Raises:
            CheckpointFailed: one did not.
        """
        inside = asyncio.current_task()
        lost: list[ShardamError] = []

        async def renew() -> None:
            renewed_at = time.monotonic()
            while True:
                try:
                    await self._cutting.renew(hold_id, WRITE_HOLD_S)
                    renewed_at = time.monotonic()
                except ShardamError as error:
                    if isinstance(error, StaleState) or time.monotonic() - renewed_at > WRITE_HOLD_S:
                        lost.append(error)
                        break
                    await self._cuts.refresh()
                await asyncio.sleep(WRITE_HOLD_S / RENEWALS_PER_HOLD)
            if inside is not None:
                inside.cancel()

        renewing = asyncio.create_task(renew())
        try:
            yield
        except asyncio.CancelledError:
            if lost and inside is not None and not inside.uncancel():
                raise CheckpointFailed(f"a shard did not stay held while files were written: {lost[0].message}") from lost[0]
            raise
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})

    def _plan(self, num_shards: int, folder: Path, cut: CutResult) -> Plan:
        identity = self._identity
        return Plan(
            plan_id=plans.new_plan_id(),
            timeline=identity.timeline,
            epoch=identity.require_route_map().epoch + 1,
            num_shards=num_shards,
            seed=identity.require_cluster().seed,
            folder=self._catalogue.relative(folder),
            checkpoint_id=cut.task_id,
            keep_clients=True,
            load=tuple(table.spec.name for table in cut.tables),
            read_only_tables=tuple(table.spec.name for table in cut.tables if table.read_only),
        )

    async def _decide(self, under_way: _UnderWay, plan: Plan, cut: CutResult, incarnations: tuple[int, ...]) -> None:
        """Has Redis decide the plan; goes on asking while the outcome is not known.

        Raises:
            ShardamError: it is not decided, and will not be.
        """
        await asyncio.to_thread(self._registration.allow_move, cut.hold_id, incarnations)
        await self._cutting.renew(cut.hold_id, DECIDE_HOLD_S)  # none has gone on before that could be noticed
        under_way.is_open = True
        while True:
            try:
                problem = await self._commit(plan, cut)
                break
            except RedisUnreachable as error:
                logger.warning("%s; whether the state has moved is not known yet, so all shards wait", error.message)
            with contextlib.suppress(ShardamError):
                await self._cutting.renew(cut.hold_id, DECIDE_HOLD_S)
            await asyncio.sleep(DECIDE_AGAIN_S)
        under_way.is_open = False
        if problem is not None:
            raise problem

    async def _commit(self, plan: Plan, cut: CutResult) -> ShardamError | None:
        """Asks Redis once; returns why the plan is not decided and will not be, or None: it is.

        Raises:
            RedisUnreachable: that is not known.
        """
        try:
            await plans.commit(self._shard, self._registration, plan, cut.tables, cut.hold_id)
        except RedisUnreachable:
            raise
        except ShardamError as error:
            # An earlier question may be decided still, unless it is not allowed any more.
            known = await asyncio.to_thread(self._registration.end_move, cut.hold_id)
            return None if known is not None and known.plan_id == plan.plan_id else error
        return None

    async def _undo(self, under_way: _UnderWay) -> None:
        """Lets all shards go on, and removes what there is of the checkpoint; an open move each shard asks Redis about."""
        if under_way.is_open:
            logger.warning("this process ends before it is known whether the state has moved: each shard asks Redis")
            return
        if under_way.hold_id:  # a cut that failed has given up all of its own
            await self._cutting.give_up(under_way.hold_id, under_way.task_id)
        await asyncio.to_thread(self._remove, under_way.name)

    def _remove(self, name: str) -> None:
        if name in self._catalogue.names():
            self._catalogue.delete(name)

    async def _tell(self, plan: Plan) -> None:
        """Tells all shards, home last; one that does not hear it reads it in Redis."""
        text = plan.to_json()
        others = [index for index in self._cuts.shards if index != self._identity.index]
        tell = [self._cuts.adopt_plan(index, cut_pb2.AdoptPlanRequest(plan=text)) for index in others]
        for index, answer in zip(others, await asyncio.gather(*tell, return_exceptions=True), strict=True):
            if isinstance(answer, ShardamError):
                logger.info("shard %d could not be told, and reads it in Redis: %s", index, answer.message)
            elif isinstance(answer, BaseException):
                raise answer
        await self._cuts.adopt_plan(self._identity.index, cut_pb2.AdoptPlanRequest(plan=text))
