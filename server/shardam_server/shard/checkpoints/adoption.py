"""How a shard takes a checkpoint over that its cluster goes on from: in place of the state it has, or lacks.

A plan in Redis is decided (shardam_proto.registry.Plan). Whatever this process does or suffers, its shard loads its share
sooner or later: its folder holds the former state until the new one is whole there, and the plan says which of the two it is.
A shard that has done so says so by a lineage; all serve once all have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from shardam_proto.errors import RedisUnreachable, ShardamError
from shardam_proto.registry import Plan
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.checkpoints.tasks import Dropped, Progress
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import random_63_bits
from shardam_server.shard.membership import Membership
from shardam_server.shard.registration import Registration
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
"""Waits between two looks at Redis, or two tries to load, double from the first to the longest."""

T = TypeVar("T")

Load = Callable[[ShardState, Plan, Progress], None]
"""Puts this shard's share of a plan's checkpoint into an empty state; blocking. Raises ShardamError, or Dropped."""


class ServingLife(Protocol):
    """What begins and ends with serving; the process has it."""

    async def suspend(self) -> None:
        """Ends what runs beside serving; may be called without `serve`."""
        ...

    async def serve(self) -> None:
        """Has the shard serve."""
        ...


class _Superseded(Exception):
    """There is a newer plan."""


class Adoption:
    """Takes plans over, one at a time. Used on the event loop.

    Args:
        shard: the shard.
        registration: its entries in Redis.
        membership: its place in the cluster.
        life: what begins and ends with serving.
        make_state: makes an empty state.
        load: reads a checkpoint.
        end_epoch: called with a plan that moves the state to other shards: this process is to end.

    Attributes:
        turn: held by whoever changes what this shard serves: its start, and each adoption.
        progress: how far the present load is, or the last one was.
        failed: set when an adoption has ended by a defect; the process cannot go on.
    """

    def __init__(
        self,
        shard: ShardContext,
        registration: Registration,
        membership: Membership,
        life: ServingLife,
        make_state: Callable[[], ShardState],
        load: Load,
        end_epoch: Callable[[Plan], None],
    ) -> None:
        self.turn = asyncio.Lock()
        self.progress = Progress()
        self.failed = asyncio.Event()
        self._shard = shard
        self._registration = registration
        self._membership = membership
        self._life = life
        self._make_state = make_state
        self._load = load
        self._end_epoch = end_epoch
        self._wanted: Plan | None = None
        self._task: asyncio.Task[None] | None = None

    def notice(self, plan: Plan) -> None:
        """Takes a plan over, beside everything else; one that is known or older is passed over."""
        wanted = self._wanted
        if not self._shard.identity.is_before(plan) or (wanted is not None and not _is_newer(plan, wanted)):
            return
        self._wanted = plan
        if self._ends(plan):
            self._end_epoch(plan)
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def _ends(self, plan: Plan) -> bool:
        """True: others serve this process's rows from here on."""
        identity = self._shard.identity
        return identity.route_map is not None and plan.epoch > identity.epoch

    async def _run(self) -> None:
        try:
            async with self.turn:
                while (
                    (wanted := self._wanted) is not None and self._shard.identity.is_before(wanted) and not self._ends(wanted)
                ):
                    await self.adopt(wanted)
        except Exception:  # a task's edge: without a state there is nothing to go on with
            logger.critical("a checkpoint could not be taken over", exc_info=True)
            self.failed.set()

    async def stop(self) -> None:
        """Ends; what is not taken over yet is so after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def adopt(self, plan: Plan) -> None:
        """Takes a plan over, and then a newer one, until the shard serves; or is LOST, or is to end. The caller has the turn.

        Raises:
            ShardamError: home could not begin to serve.
        """
        shard = self._shard
        while True:
            if self._ends(plan):
                self._end_epoch(plan)
                self._wanted = None  # nothing is left to do here, and the state stays before the plan
                return
            kept = await self._let_go(plan)
            if kept is None:
                return
            try:
                await self._begin(plan, *kept)
                await self._wait_for_all(plan)
                break
            except _Superseded:
                plan = self._wanted or plan
        await self._membership.install(await self._reaching(self._registration.load_tables))
        shard.waiting_for = ""
        await self._life.serve()
        self._membership.ready = True
        await self._reaching(self._membership.renew)
        logger.info("goes on from checkpoint %s on timeline %d: %d rows", plan.folder, plan.timeline, shard.state.num_rows)

    # -- the former state

    async def _let_go(self, plan: Plan) -> tuple[Sequence[Table], int] | None:
        """Stops serving and gives the former state up.

        Returns:
            Its tables that stay, and its change number; None: a table that stays is not here, so that the shard is LOST.
        """
        shard = self._shard
        shard.serving = shard_pb2.SERVING_STATE_STARTING
        shard.waiting_for, shard.lost_because = f"checkpoint {plan.folder} to be loaded", ""
        self._membership.ready = False
        logger.info("stops serving: the cluster goes on from checkpoint %s, on timeline %d", plan.folder, plan.timeline)
        await self._life.suspend()
        shard.streams.end_all()
        await shard.tasks.drop(0)
        async with shard.kept.without_base():
            tables, change_number = await shard.sequencer.change(lambda: self._give_up(plan))
        await asyncio.to_thread(self._membership.turn_to, plan)
        shard.holding.release(shard.holding.hold_id)  # what was held back was meant for the former state, and is refused
        missing = sorted(set(plan.keep) - {table.spec.name for table in tables})
        if not missing:
            return tables, change_number
        shard.lost_because = (
            f"shard {shard.identity.index} is LOST: the cluster was restored from checkpoint {plan.folder} but for tables "
            f"{', '.join(map(repr, missing))}, which were to stay, and their rows are not here any more. Restore a checkpoint "
            "that has them, or all tables of this one"
        )
        shard.serving, shard.waiting_for = shard_pb2.SERVING_STATE_LOST, "a restore of all tables"
        logger.error("%s", shard.lost_because)
        return None

    def _give_up(self, plan: Plan) -> tuple[Sequence[Table], int]:
        """Has an empty state in its place; on the sequencer's thread, where no change comes between."""
        shard, former = self._shard, self._shard.state
        shard.kept.give_up()
        shard.state = self._make_state()
        return [table for table in former.tables() if table.spec.name in plan.keep], former.change_number

    # -- the new one

    async def _begin(self, plan: Plan, kept: Sequence[Table], change_number: int) -> None:
        """Loads the new state, has it kept, and tells its lineage.

        Raises:
            _Superseded: there is a newer plan.
        """
        state = await self._trying(plan, lambda: self._loaded(plan))
        state.put_tables(kept)
        if kept:  # their rows have change numbers up to this one
            state.change_number = max(state.change_number, change_number)
        identity, lineage = self._shard.identity, random_63_bits()
        cluster = identity.require_cluster()

        def begin() -> None:
            self._shard.kept.begin(cluster, lineage, plan.timeline, plan.epoch, state, plan.to_json())
            self._shard.state = state

        await self._trying(plan, lambda: self._shard.sequencer.change(begin))
        identity.lineage = lineage
        await self._reaching(self._membership.renew)

    async def _loaded(self, plan: Plan) -> ShardState:
        state, progress = self._make_state(), Progress()
        self.progress = progress
        try:
            await asyncio.to_thread(self._load_on_thread, state, plan, progress)
        except asyncio.CancelledError:
            progress.drop()
            raise
        return state

    def _load_on_thread(self, state: ShardState, plan: Plan, progress: Progress) -> None:
        try:
            self._load(state, plan, progress)
        except (ShardamError, Dropped):
            raise
        except Exception as error:  # the thread's edge: tried again, and said
            logger.error("checkpoint %s could not be loaded", plan.folder, exc_info=error)
            raise ShardamError(f"{type(error).__name__}: {error}; the shard's log has the details") from error

    async def _wait_for_all(self, plan: Plan) -> None:
        """Waits until all shards have taken the plan over.

        Raises:
            _Superseded: there is a newer plan.
        """
        wait_s = FIRST_WAIT_S
        while True:
            shared = await self._reaching(self._registration.read_shared)
            known = shared.plan
            if known is not None and _is_newer(known, plan):
                self._wanted = known
            self._check_newest(plan)
            missing = [index for index in range(plan.num_shards) if index not in shared.lineages]
            if known is not None and known.plan_id == plan.plan_id and not missing:
                return
            self._shard.waiting_for = f"shards {missing or 'all'} to load checkpoint {plan.folder}"
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    # -- tries

    def _check_newest(self, plan: Plan) -> None:
        if self._wanted is not None and _is_newer(self._wanted, plan):
            raise _Superseded

    async def _trying(self, plan: Plan, action: Callable[[], Awaitable[T]]) -> T:
        """Does what may fail until it works: files may come back, a disk may be emptied, and it is decided.

        Raises:
            _Superseded: there is a newer plan.
        """
        wait_s, shown = FIRST_WAIT_S, ""
        while True:
            self._check_newest(plan)
            try:
                return await action()
            except ShardamError as error:
                self._shard.waiting_for = f"checkpoint {plan.folder} to be loaded: {error.message}"
                if error.message != shown:
                    shown = error.message
                    logger.error("checkpoint %s cannot be taken over yet: %s", plan.folder, error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    async def _reaching(self, action: Callable[[], T]) -> T:
        """Calls Redis until it answers."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return await asyncio.to_thread(action)
            except RedisUnreachable as error:
                self._shard.waiting_for = f"Redis: {error.message}"
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)


def _is_newer(plan: Plan, other: Plan) -> bool:
    return plan.is_ahead_of(other.timeline, other.epoch)
