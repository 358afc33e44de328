"""Home's checkpoints: who asks for what, the schedule, and the jobs that do it (PROTOCOL.md, section 8)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from shardam_proto.errors import BadOption, CheckpointFailed, CheckpointRunning, ShardamError, StepTimeout
from shardam_proto.schema import check_name
from shardam_proto.v1 import checkpoint_pb2, job_pb2
from shardam_server.shard.background import Background
from shardam_server.shard.checkpoints.catalogue import LATEST, Catalogue
from shardam_server.shard.checkpoints.checking import CheckFiles
from shardam_server.shard.checkpoints.collective import Gathering
from shardam_server.shard.checkpoints.creation import Creation, Terms
from shardam_server.shard.checkpoints.cutting import Cutting
from shardam_server.shard.checkpoints.extras import Extras
from shardam_server.shard.checkpoints.jobs import Job, Jobs, ReportProgress
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.context import ShardContext

logger = logging.getLogger(__name__)

MAX_KEYS = 1024
"""Keys of requests that are remembered, so that a repeat is answered as the first call was."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When home makes checkpoints by itself, and how long members wait for each other.

    Attributes:
        every_s: seconds between two; 0: none.
        step_timeout_s: how long members of a group wait for the others to ask.
    """

    every_s: float
    step_timeout_s: float


class Restores(Protocol):
    """Replaces the state of all shards by a checkpoint's."""

    async def run(
        self,
        name: str,
        options: checkpoint_pb2.RestoreOptions,
        *,
        only_if_empty: bool,
        report_progress: ReportProgress,
        alone: AbstractAsyncContextManager[None],
    ) -> job_pb2.RestoreReport:
        """Does it; raises ShardamError where nothing was replaced. `alone` is entered until it is decided."""
        ...


class Reshards(Protocol):
    """Moves the state to another number of shards."""

    async def run(self, num_shards: int, report_progress: ReportProgress) -> None:
        """Does it; raises ShardamError where nothing was moved."""
        ...


@dataclasses.dataclass(frozen=True)
class Replacing:
    """What replaces the state.

    Attributes:
        restoring: by a checkpoint's.
        resharding: by the same one on other shards.
        needed_folder: returns the folder, relative to the root folder, that shards have not all loaded yet; blocking.
    """

    restoring: Restores
    resharding: Reshards
    needed_folder: Callable[[], str | None]


class HomeCheckpoints:
    """All checkpoints of a cluster, on home. Used on the event loop.

    Args:
        shard: home.
        catalogue: where they lie.
        extras: what trainers add.
        creation: makes them.
        cutting: ends what a former home process began.
        replacing: restores and reshards.
        schedule: when they are made.

    Attributes:
        jobs: what home does and did.
        catalogue: where they lie.
        extras: what trainers add.
        problem: why none can be made on this shard; empty: they can, as far as is known.
    """

    def __init__(
        self,
        shard: ShardContext,
        catalogue: Catalogue,
        extras: Extras,
        creation: Creation,
        cutting: Cutting,
        replacing: Replacing,
        schedule: Schedule,
    ) -> None:
        self.jobs = Jobs()
        self.problem = ""
        self._shard = shard
        self.catalogue = catalogue
        self.extras = extras
        self._creation = creation
        self._cutting = cutting
        self._replacing = replacing
        self._schedule = schedule
        self._background = Background()
        self._by_key: dict[bytes, Job] = {}
        self._gatherings: dict[str, Gathering] = {}
        self._joinable: tuple[Job, Terms] | None = None

    async def check_folder(self) -> None:
        """Looks whether checkpoints can be written here; any shard does so at its start.

        Raises:
            CheckpointFailed: they cannot.
        """
        try:
            await asyncio.to_thread(self.catalogue.prepare)
        except CheckpointFailed as error:
            self.problem = error.message
            raise
        self.problem = ""

    def start(self) -> None:
        """Begins; on another shard than home there is nothing to do."""
        if self._shard.identity.is_home and not self._background.running:
            self.jobs.may_begin.clear()
            self._background.start(self._run())

    async def stop(self) -> None:
        """Ends all jobs; may be called without start."""
        await self._background.stop()
        await self.jobs.stop()

    async def _run(self) -> None:
        """Clears up after a former home process, then keeps the schedule."""
        try:
            await self._cutting.drop(0)
            await asyncio.to_thread(self.extras.remove_all)
            await asyncio.to_thread(self.catalogue.remove_incomplete)
        except ShardamError as error:
            logger.warning("%s", error.message)
        finally:
            self.jobs.may_begin.set()
        every_s = self._schedule.every_s
        while every_s:
            await asyncio.sleep(every_s)
            try:
                self._begin(Terms())
            except CheckpointRunning as error:
                logger.warning("the checkpoint that is due every %g s is left out: %s", every_s, error.message)
        await asyncio.Event().wait()

    # -- making one

    async def create(self, request: checkpoint_pb2.CreateCheckpointRequest, wait_s: float) -> Job:
        """Has a checkpoint made, and waits until the state is cut, or for a time; then a repeat goes on waiting.

        Raises:
            BadOption: a name or key that cannot be, or members ask after different steps.
            CheckpointRunning: another job has to end first.
            StepTimeout: a member of the group has not asked.
            ShardamError: why it failed before the cut.
        """
        job = self._by_key.get(request.request_key) if request.request_key else None
        if job is None:
            if request.name:
                self._check_name(request.name)
            if request.extra_id:
                await asyncio.to_thread(self.extras.size, request.extra_id)
                job = self._by_key.get(request.request_key) if request.request_key else None  # of a repeat meanwhile
        if job is None:
            job = self._ask(request)
            self._remember(request.request_key, job)
        try:
            await asyncio.wait_for(job.under_way.wait(), wait_s)
        except TimeoutError:
            return job
        if job.error is not None:
            raise job.error
        return job

    def _remember(self, request_key: bytes, job: Job) -> None:
        """Has repeats of a request answered with its job."""
        if request_key:
            self._by_key[request_key] = job
            for key in list(self._by_key)[:-MAX_KEYS]:
                del self._by_key[key]

    def _check_name(self, name: str) -> None:
        check_name(name, "checkpoint name")
        if name == LATEST:
            raise BadOption(f"{LATEST!r} stands for the newest checkpoint; choose another name")

    def _ask(self, request: checkpoint_pb2.CreateCheckpointRequest) -> Job:
        """Begins a checkpoint, or joins one whose state is not cut yet."""
        found = self._shard.state.groups.of_client(request.header.client_id)
        if found is not None:
            return self._gather(request, found[0].group.name, found[1].rank)
        if self._joinable is not None:
            job, terms = self._joinable
            same = not request.name or request.name == terms.name
            if not (terms.cut or job.ended.is_set()) and same and not (request.extra_id and 0 in terms.additions):
                if request.extra_id:
                    terms.additions[0] = request.extra_id
                return job
        return self._begin(Terms(request.name, {0: request.extra_id} if request.extra_id else {}))

    def _begin(self, terms: Terms) -> Job:
        job = Job(job_pb2.JOB_KIND_CREATE, terms.name)
        self.jobs.begin(job, lambda: self._creation.run(job, terms), alone=True)
        self._joinable = job, terms
        return job

    def _gather(self, request: checkpoint_pb2.CreateCheckpointRequest, group: str, rank: int) -> Job:
        """Notes that a member has asked; with the first one a job begins that waits for the others."""
        header = request.header
        gathering = self._gatherings.get(group)
        if gathering is None:
            job = Job(job_pb2.JOB_KIND_CREATE, request.name)
            gathering = self._gatherings[group] = Gathering(job, request.name, header.step)
            gathering.add(header.client_id, rank, header.step, request.name, request.extra_id)
            self.jobs.begin(job, self._collective(gathering, group), alone=False)
        else:
            gathering.add(header.client_id, rank, header.step, request.name, request.extra_id)
        return gathering.job

    def _collective(self, gathering: Gathering, group: str) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            try:
                await gathering.complete(self._shard.state.groups, group, self._schedule.step_timeout_s)
            except StepTimeout:
                self._gatherings.pop(group, None)
                raise
            entry = self._shard.state.groups.find(group)
            step = 0 if entry is None or entry.group.terms.mode != "sync" else entry.step
            self._gatherings.pop(group, None)
            terms = Terms(gathering.name, gathering.additions, group)
            async with self.jobs.alone(gathering.job):
                await self._creation.run(gathering.job, terms, step)

        return work

    # -- other jobs

    def verify(self, name: str) -> Job:
        """Begins to read all files of a checkpoint.

        Raises:
            ShardamError: there is none of this name, or its manifest cannot be used.
        """
        job = Job(job_pb2.JOB_KIND_VERIFY, name)

        async def work() -> None:
            manifest, folder = await asyncio.to_thread(self.catalogue.read, name)
            job.checkpoint = manifest.name
            progress = Progress(manifest.size_bytes)
            check = CheckFiles(self.catalogue.root, self.catalogue.relative(folder), 0, 1)  # one shard would read all of them
            reading = asyncio.create_task(asyncio.to_thread(check.run, progress))
            try:
                while not reading.done():
                    job.advance(progress.done_bytes, manifest.size_bytes, "reads files")
                    await asyncio.wait({reading}, timeout=0.1)
                reading.result()
                job.advance(manifest.size_bytes, manifest.size_bytes, "")
            finally:
                progress.drop()

        self.jobs.begin(job, work, alone=False)
        return job

    def restore(self, request: checkpoint_pb2.RestoreCheckpointRequest) -> Job:
        """Begins to replace the state by a checkpoint's; once for one key: by the time of a repeat others train on from it.

        Raises:
            CheckpointRunning: another job has to end first.
        """
        known = self._by_key.get(request.request_key) if request.request_key else None
        if known is not None:
            return known
        job = Job(job_pb2.JOB_KIND_RESTORE, request.name)

        async def work() -> None:
            job.report = await self._replacing.restoring.run(
                request.name,
                request.options,
                only_if_empty=request.only_if_empty,
                report_progress=job.advance,
                alone=self.jobs.alone(job),
            )
            job.checkpoint = job.report.name

        self.jobs.check_free()
        self.jobs.begin(job, work, alone=False)
        self._remember(request.request_key, job)
        return job

    def reshard(self, num_shards: int) -> Job:
        """Begins to move the state to another number of shards.

        Raises:
            CheckpointRunning: another job has to end first.
        """
        job = Job(job_pb2.JOB_KIND_RESHARD)
        self.jobs.begin(job, lambda: self._replacing.resharding.run(num_shards, job.advance), alone=True)
        return job

    def delete(self, name: str) -> None:
        """Deletes a checkpoint; blocking.

        Raises:
            BadOption: "latest" is no name of its own.
            UnknownCheckpoint: there is none of this name.
            CheckpointRunning: it is being made, read or restored.
        """
        if name == LATEST:
            raise BadOption("name the checkpoint to delete; `shardam checkpoint list` shows them")
        if self._replacing.needed_folder() == self.catalogue.relative(self.catalogue.resolve(name)):
            raise CheckpointRunning(f"checkpoint {name!r} is being restored, and not all shards have loaded it yet")
        self.catalogue.delete(name)

    def check_unused(self, name: str) -> None:
        """Refuses to delete what a job uses, or what shards go on from and have not loaded yet.

        Raises:
            CheckpointRunning: it is used.
        """
        folder = self.catalogue.folder / name
        for job in self.jobs.all():
            if not job.ended.is_set() and self._uses(job, folder):
                raise CheckpointRunning(f"job {job.job_id} uses checkpoint {name!r}; try again once it has ended")
        plan = self._shard.identity.plan
        if plan is not None and not self._shard.is_serving and self.catalogue.root / plan.folder == folder:
            raise CheckpointRunning(
                f"the cluster goes on from checkpoint {name!r}, and not all shards have loaded it; try again once they serve"
            )

    def _uses(self, job: Job, folder: Path) -> bool:
        """Whether a job uses a checkpoint's folder; which one a move has made is not told."""
        named = {job.checkpoint, os.path.normpath(self.catalogue.root / job.checkpoint)}
        return job.kind == job_pb2.JOB_KIND_RESHARD or bool(named & {LATEST, folder.name, str(folder)})
