"""A restore on home: everything is checked first, then one step in Redis decides it, then every shard does its part.

Nothing is changed before that step, and nothing is undone after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from contextlib import AbstractAsyncContextManager

from shardam_proto.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointMismatch,
    RedisUnreachable,
    ShardamError,
    ShardLost,
    ShardNotReady,
    StaleState,
    make_error,
)
from shardam_proto.registry import Plan
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, common_pb2, cut_pb2, job_pb2
from shardam_server.shard.checkpoints import plans
from shardam_server.shard.checkpoints.adoption import Adoption
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.cutting import Cutting, Tries
from shardam_server.shard.checkpoints.jobs import ReportProgress
from shardam_server.shard.checkpoints.manifest import Manifest, StoredTable
from shardam_server.shard.checkpoints.table_choice import TableChoice, choose_tables
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import random_63_bits
from shardam_server.shard.option_messages import encode_options
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.registration import Registration

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Shards are asked this often how far they are."""

AWAY_S = 30.0
"""A shard that checks files may be unreachable for so long; nothing is decided yet."""

MAX_CHECKS = 3
"""How often files are checked where a shard forgets what it was asked: it was started anew, or home was a moment ago."""

COMMIT_S = 15.0
"""The plan is written to Redis, or found not to be, within this time and that of one more call."""

HOLD_S = 30.0
"""Shards whose tables stay are held for so long, which is well above COMMIT_S: none goes on before the plan is decided."""


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checkpoint that may be restored.

    Attributes:
        manifest: its manifest.
        folder: its folder, relative to the root folder.
        choice: what becomes of each table.
    """

    manifest: Manifest
    folder: str
    choice: TableChoice


class Restoring:
    """Replaces the state of all shards by a checkpoint's. Used on home's event loop, once at a time.

    Args:
        shard: home.
        registration: its entries in Redis.
        cuts: asks shards, home itself among them.
        cutting: brings shards level where tables stay.
        catalogue: where checkpoints lie.
        adoption: takes the plan over here.
    """

    def __init__(
        self,
        shard: ShardContext,
        registration: Registration,
        cuts: PeerCuts,
        cutting: Cutting,
        catalogue: Catalogue,
        adoption: Adoption,
    ) -> None:
        self._shard = shard
        self._registration = registration
        self._cuts = cuts
        self._cutting = cutting
        self._catalogue = catalogue
        self._adoption = adoption

    async def run(
        self,
        name: str,
        options: checkpoint_pb2.RestoreOptions,
        *,
        only_if_empty: bool,
        report_progress: ReportProgress,
        alone: AbstractAsyncContextManager[None],
    ) -> job_pb2.RestoreReport:
        """Does it, and returns once all shards serve the new state.

        Once it is decided another restore may begin, which takes its place: files may be gone by then that shards still need.

        Args:
            name: the checkpoint's name, "latest", or a path below the root folder.
            options: what it may leave out.
            only_if_empty: refuse a cluster that has tables.
            report_progress: is told how far it is.
            alone: entered until it is decided; no other job changes checkpoints or state meanwhile.

        Raises:
            CheckpointFailed: it was decided, and another restore took its place before all shards had loaded it.
            CheckpointMismatch, SchemaMismatch: the tables do not fit.
            CheckpointDamaged, UnknownCheckpoint, VersionMismatch: the checkpoint cannot be used.
            ShardNotReady, ShardLost: a shard is not there, or lacks rows that are to stay.
            ShardamError: something else refused. Nothing was changed in any case.
        """
        shard = self._shard
        shard.identity.require_home("checkpoints are restored by")
        shard.tenure.check()
        async with alone:
            report_progress(0, 0, "checks the checkpoint")
            checked = await self._check(name, options, only_if_empty=only_if_empty)
            await self._check_files(checked, report_progress)
            plan = self._plan(checked, options)
            report_progress(checked.manifest.size_bytes, checked.manifest.size_bytes, "decides")
            await self._decide(plan, checked)
            logger.warning("restores checkpoint %s: the state so far is given up", checked.folder)
            self._adoption.notice(plan)
        await self._tell(plan)
        await self._until_served(plan, report_progress)
        return _report(checked, plan)

    # -- before the decision

    async def _check(self, name: str, options: checkpoint_pb2.RestoreOptions, *, only_if_empty: bool) -> _Checked:
        manifest, folder = await asyncio.to_thread(self._catalogue.read, name)
        manifest.check_arithmetic(accept=options.accept_arithmetic_change)
        present = await self._present_tables()
        if only_if_empty and present:
            names = ", ".join(map(repr, sorted(present)))
            raise CheckpointMismatch(
                f"the cluster has tables ({names}), and a restore at a start does not replace a state: leave --restore out to "
                f"go on with it, or replace it with `shardam checkpoint restore {manifest.name}`",
                metadata={"tables": ",".join(sorted(present))},
            )
        choice = choose_tables(manifest, present, options)
        await self._check_shards(choice)
        return _Checked(manifest, await asyncio.to_thread(self._catalogue.relative, folder), choice)

    async def _present_tables(self) -> dict[str, TableSpec]:
        """Returns the cluster's tables, those that home has and those that only Redis knows."""
        found = await asyncio.to_thread(self._registration.load_tables)
        specs = [TableSpec.from_proto(info.spec) for info in found]
        return {spec.name: spec for spec in [*specs, *(table.spec for table in self._shard.state.tables())]}

    async def _check_shards(self, choice: TableChoice) -> None:
        shared = await asyncio.to_thread(self._registration.read_shared)
        if shared.route_map is None:
            raise ShardNotReady("the cluster has not come together yet; try again once its shards have started")
        entries = (await asyncio.to_thread(self._registration.view)).shards
        await self._cuts.refresh()
        missing = [index for index in self._cuts.shards if index not in entries]
        if missing:
            raise ShardNotReady(f"shards {missing} are not registered; start them, and restore again")
        lost = [index for index in self._cuts.shards if entries[index].lost]
        if lost and choice.keep:
            raise ShardLost(
                f"shards {lost} are LOST, so tables {', '.join(map(repr, choice.keep))} cannot stay as they are; restore a "
                "checkpoint that has all tables",
                metadata={"shard": str(lost[0])},
            )

    async def _check_files(self, checked: _Checked, report_progress: ReportProgress) -> None:
        """Has every shard read the files that it will load.

        Raises:
            ShardamError: one of them is not as it was written, or a shard does not see it.
        """
        for _ in range(MAX_CHECKS - 1):
            try:
                return await self._check_files_once(checked, report_progress)
            except StaleState as error:
                logger.info("%s", error.message)
                await self._cuts.refresh()
        return await self._check_files_once(checked, report_progress)

    async def _check_files_once(self, checked: _Checked, report_progress: ReportProgress) -> None:
        task_id = random_63_bits()
        try:
            for index in self._cuts.shards:
                request = cut_pb2.CheckFilesRequest(task_id=task_id, folder=checked.folder, num_shards=len(self._cuts.shards))
                await self._cuts.check_files(index, request)
            await self._until_checked(task_id, report_progress)
        finally:
            await asyncio.shield(self._drop(task_id))

    async def _until_checked(self, task_id: int, report_progress: ReportProgress) -> None:
        shards = self._cuts.shards
        answers: dict[int, cut_pb2.GetTaskResponse] = {}
        seen = dict.fromkeys(shards, time.monotonic())
        while True:
            for index in shards:
                try:
                    answers[index] = await self._cuts.get_task(index, cut_pb2.GetTaskRequest(task_id=task_id))
                except ShardamError as error:
                    if time.monotonic() - seen[index] > AWAY_S:
                        raise ShardNotReady(f"shard {index} does not answer: {error.message}") from error
                    await self._cuts.refresh()
                    continue
                seen[index] = time.monotonic()
                _check_task(index, answers[index])
            done = sum(answer.done_bytes for answer in answers.values())
            report_progress(done, sum(answer.total_bytes for answer in answers.values()), "checks files")
            if len(answers) == len(shards) and all(one.state == job_pb2.JOB_STATE_DONE for one in answers.values()):
                return
            await asyncio.sleep(POLL_S)

    async def _drop(self, task_id: int) -> None:
        for index in self._cuts.shards:
            try:
                await self._cuts.drop_task(index, cut_pb2.DropTaskRequest(task_id=task_id))
            except ShardamError as error:
                logger.debug("shard %d goes on checking files: %s", index, error.message)

    def _plan(self, checked: _Checked, options: checkpoint_pb2.RestoreOptions) -> Plan:
        identity, choice = self._shard.identity, checked.choice
        return Plan(
            plan_id=plans.new_plan_id(),
            timeline=identity.timeline + 1,
            epoch=identity.epoch,
            num_shards=identity.require_cluster().num_shards,
            seed=checked.manifest.seed,
            folder=checked.folder,
            checkpoint_id=checked.manifest.checkpoint_id,
            weights_only=options.weights_only,
            read_only=options.read_only,
            load=choice.load,
            keep=choice.keep,
            created=choice.created,
        )

    # -- the decision

    async def _decide(self, plan: Plan, checked: _Checked) -> None:
        """Decides the plan; tables that stay are brought to the same steps on all shards first.

        Raises:
            ShardamError: nothing is decided.
        """
        hold_id = await self._level() if plan.keep else 0
        try:
            tables = [*plans.schemas(checked.manifest, plan), *await self._kept_schemas(plan)]
            await self._commit(plan, tables)
        except BaseException:
            if hold_id:
                await asyncio.shield(self._cutting.release(hold_id))
            raise

    async def _level(self) -> int:
        tries = Tries()
        while True:
            try:
                return await self._cutting.level(HOLD_S, without=tries.without)
            except ShardamError as error:
                await tries.wait_after(error)

    async def _kept_schemas(self, plan: Plan) -> list[common_pb2.TableInfo]:
        found = await asyncio.to_thread(self._registration.load_tables)
        return [info for info in found if info.spec.name in plan.keep]

    async def _commit(self, plan: Plan, tables: list[common_pb2.TableInfo]) -> None:
        """Commits; where Redis does not answer, finds out whether it was done."""
        deadline = time.monotonic() + COMMIT_S
        while True:
            try:
                await plans.commit(self._shard, self._registration, plan, tables)
                return
            except RedisUnreachable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(POLL_S)

    # -- after it

    async def _tell(self, plan: Plan) -> None:
        """Tells the other shards; one that does not answer reads it in Redis."""
        for index in self._cuts.shards:
            if index == self._shard.identity.index:
                continue
            try:
                await self._cuts.adopt_plan(index, cut_pb2.AdoptPlanRequest(plan=plan.to_json()))
            except ShardamError as error:
                logger.info("shard %d could not be told of the plan and will read it in Redis: %s", index, error.message)

    async def _until_served(self, plan: Plan, report_progress: ReportProgress) -> None:
        shard, load = self._shard, self._adoption.progress
        while shard.identity.is_before(plan) or not shard.is_serving:
            load = self._adoption.progress
            report_progress(load.done_bytes, load.total_bytes, f"waits for {shard.waiting_for or 'home to serve again'}")
            self._check_newest(plan)
            if shard.lost_because:
                raise ShardLost(shard.lost_because, metadata={"shard": str(shard.identity.index)})
            await asyncio.sleep(POLL_S)
        self._check_newest(plan)
        report_progress(load.done_bytes, load.total_bytes, "waits for all shards to serve")
        await self._until_all_ready()

    def _check_newest(self, plan: Plan) -> None:
        newest = self._shard.identity.plan
        if newest is not None and newest.is_ahead_of(plan.timeline, plan.epoch):
            raise CheckpointFailed(
                f"another restore, of {newest.folder}, took its place before all shards had loaded {plan.folder}"
            )

    async def _until_all_ready(self) -> None:
        """Waits until the other shards serve, too; one that died meanwhile has the state, and is not waited for long."""
        deadline = time.monotonic() + AWAY_S
        while time.monotonic() < deadline:
            try:
                shards = (await asyncio.to_thread(self._registration.view)).shards
            except RedisUnreachable:
                shards = {}
            if all(index in shards and shards[index].ready for index in self._cuts.shards):
                return
            await asyncio.sleep(POLL_S)


def _check_task(index: int, answer: cut_pb2.GetTaskResponse) -> None:
    if answer.state == job_pb2.JOB_STATE_FAILED:
        raise make_error(answer.reason or CheckpointDamaged.reason, f"shard {index}: {answer.problem}", {"shard": str(index)})
    if answer.state == job_pb2.JOB_STATE_UNSPECIFIED:
        raise StaleState(f"shard {index} was started anew while it checked files; restore again", reason="NEW_INCARNATION")


def _report(checked: _Checked, plan: Plan) -> job_pb2.RestoreReport:
    manifest, choice = checked.manifest, checked.choice
    stored = {table.spec.name: table for table in manifest.tables}
    reports = {
        **{name: job_pb2.TableReport(table=name, outcome=job_pb2.TABLE_OUTCOME_SKIPPED) for name in choice.skipped},
        **{name: job_pb2.TableReport(table=name, outcome=job_pb2.TABLE_OUTCOME_KEPT) for name in choice.keep},
        **{name: _loaded(stored[name], plan) for name in choice.load},
    }
    return job_pb2.RestoreReport(
        name=manifest.name,
        timeline=plan.timeline,
        tables=[reports[name] for name in sorted(reports)],
        num_shards=manifest.num_shards,
        size_bytes=manifest.size_bytes,
    )


def _loaded(table: StoredTable, plan: Plan) -> job_pb2.TableReport:
    return job_pb2.TableReport(
        table=table.spec.name,
        outcome=job_pb2.TABLE_OUTCOME_LOADED,
        created=table.spec.name in plan.created,
        moments_reset=plan.weights_only,
        read_only=plan.read_only,
        num_rows=table.num_rows,
        table_step=0 if plan.weights_only else table.step,
        last_options=None if table.last_options is None else encode_options(table.last_options),
    )
