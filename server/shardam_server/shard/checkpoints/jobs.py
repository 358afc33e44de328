"""What home does in the background, and how far it is; known to this home process alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from shardam_proto.errors import CheckpointRunning, ShardamError, UnknownCheckpoint
from shardam_proto.v1 import job_pb2

logger = logging.getLogger(__name__)

MAX_ENDED = 100
"""Ended jobs that are remembered: a day of checkpoints made every quarter of an hour."""

KIND_WORDS = {
    job_pb2.JOB_KIND_CREATE: "a checkpoint",
    job_pb2.JOB_KIND_VERIFY: "a verification",
    job_pb2.JOB_KIND_RESTORE: "a restore",
    job_pb2.JOB_KIND_RESHARD: "a reshard",
}
"""How a kind of job is called in messages."""


ReportProgress = Callable[[int, int, str], None]
"""Is told bytes done, bytes there will be, and what is done."""


@dataclasses.dataclass
class Job:
    """A job. Used on the event loop.

    Attributes:
        kind: what it does.
        checkpoint: name of the checkpoint; empty: not known yet.
        job_id: a short text.
        state: how far it is.
        phase: what it waits for or does, in words.
        done_bytes: bytes read or written, over all shards.
        total_bytes: bytes there will be; zero: not known.
        problem: why it has to try again, or has failed.
        error: why it has failed.
        attempts: tries to cut.
        report: of a restore that is done.
        begun: time.monotonic() when it was begun.
        seconds: how long it took; zero: it goes on.
        under_way: set once the state is cut, or the job has ended.
        ended: set at its end.
    """

    kind: job_pb2.JobKind.ValueType
    checkpoint: str = ""
    job_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))
    state: job_pb2.JobState.ValueType = job_pb2.JOB_STATE_WAITING
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    problem: str = ""
    error: ShardamError | None = None
    attempts: int = 0
    report: job_pb2.RestoreReport | None = None
    begun: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0
    under_way: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def advance(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        """Notes how far it is."""
        self.state = job_pb2.JOB_STATE_RUNNING
        self.done_bytes, self.total_bytes, self.phase = done_bytes, total_bytes, phase

    def message(self) -> job_pb2.Job:
        """Returns the job as a message."""
        return job_pb2.Job(
            id=self.job_id,
            kind=self.kind,
            state=self.state,
            checkpoint=self.checkpoint,
            phase=self.phase,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            problem=self.problem,
            reason="" if self.error is None else self.error.reason,
            attempts=self.attempts,
            age_s=time.monotonic() - self.begun,
            seconds=self.seconds,
            report=self.report,
        )


class Jobs:
    """All jobs of home. Used on the event loop.

    Attributes:
        last_created: the last job that made, or failed to make, a checkpoint.
        may_begin: set but while home clears up after a former process; what is asked for meanwhile waits.
    """

    def __init__(self) -> None:
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.last_created: Job | None = None
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Lock()
        self._holder: Job | None = None

    def add(self, job: Job) -> None:
        """Adds a job that waits for something before it is begun."""
        self._jobs[job.job_id] = job
        ended = [job_id for job_id, known in self._jobs.items() if known.ended.is_set()]
        for job_id in ended[:-MAX_ENDED]:
            del self._jobs[job_id]

    def begin(self, job: Job, work: Callable[[], Awaitable[None]], *, alone: bool, waits: bool = False) -> None:
        """Begins a job.

        Args:
            job: the job.
            work: does it; what it raises is why the job failed.
            alone: no other such job runs beside it.
            waits: wait for the other one; else it is refused.

        Raises:
            CheckpointRunning: there is another one, which has to end first.
        """
        if alone and not waits:
            self.check_free()
        self.add(job)
        task = asyncio.create_task(self._run(job, work, alone=alone))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check_free(self) -> None:
        """Refuses to begin a job that has to be alone.

        Raises:
            CheckpointRunning: another one runs.
        """
        if self._alone.locked() and self._holder is not None:
            holder = self._holder
            done = f", {100 * holder.done_bytes // holder.total_bytes} % done" if holder.total_bytes else ""
            raise CheckpointRunning(
                f"{KIND_WORDS[holder.kind]} ({holder.checkpoint or 'job ' + holder.job_id}{done}) runs; try again "
                "once it has ended",
                metadata={"job": holder.job_id, "checkpoint": holder.checkpoint},
            )

    @contextlib.asynccontextmanager
    async def alone(self, job: Job) -> AsyncIterator[None]:
        """Has a job be the only one of those that have to be alone; waits for another one."""
        if self._alone.locked():
            job.phase = "waits for another job to end"
        async with self._alone:
            self._holder = job
            try:
                yield
            finally:
                self._holder = None

    async def _run(self, job: Job, work: Callable[[], Awaitable[None]], *, alone: bool) -> None:
        try:
            await self.may_begin.wait()
            if alone:
                async with self.alone(job):
                    await work()
            else:
                await work()
            job.state, job.problem = job_pb2.JOB_STATE_DONE, ""
        except ShardamError as error:
            self._fail(job, error)
        except asyncio.CancelledError:
            self._fail(job, ShardamError("the home shard ends"))
            raise
        except Exception as error:  # a task's edge: the job has failed, training goes on
            logger.error("job %s failed", job.job_id, exc_info=error)
            self._fail(job, ShardamError(f"{type(error).__name__}: {error}; the home shard's log has the details"))
        finally:
            job.seconds = time.monotonic() - job.begun
            job.phase = ""
            job.under_way.set()
            job.ended.set()
            if job.kind == job_pb2.JOB_KIND_CREATE:
                self.last_created = job

    def _fail(self, job: Job, error: ShardamError) -> None:
        logger.error("%s failed: %s", KIND_WORDS[job.kind], error.message)
        job.state, job.error, job.problem = job_pb2.JOB_STATE_FAILED, error, error.message

    def find(self, job_id: str) -> Job:
        """Returns a job.

        Raises:
            UnknownCheckpoint: there is none of this id.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownCheckpoint(
                f"no job has the id {job_id!r}: it was forgotten, or the home shard was started anew since; `shardam "
                "checkpoint list` shows what is complete",
                metadata={"job": job_id},
            )
        return job

    def all(self) -> list[Job]:
        """Returns all jobs, the newest first."""
        return list(reversed(self._jobs.values()))

    @property
    def last_checkpoint(self) -> Job | None:
        """The checkpoint that is being made, or else the last one."""
        making = [job for job in self._jobs.values() if job.kind == job_pb2.JOB_KIND_CREATE and not job.ended.is_set()]
        return making[-1] if making else self.last_created

    async def stop(self) -> None:
        """Ends all jobs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
