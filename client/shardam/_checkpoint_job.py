"""What home does in the background with checkpoints, as the caller who asked for it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from shardam._backoff import Backoff, Deadline
from shardam._checkpoint_values import RestoreReport, restore_report
from shardam._home_calls import HomeCalls
from shardam._session_options import SessionOptions
from shardam_proto.errors import CheckpointFailed, CheckpointRunning, ShardamError, UnknownCheckpoint, make_error
from shardam_proto.v1 import checkpoint_pb2, job_pb2

JobState = Literal["waiting", "running", "done", "failed"]

_STATES: dict[int, JobState] = {
    job_pb2.JOB_STATE_WAITING: "waiting",
    job_pb2.JOB_STATE_RUNNING: "running",
    job_pb2.JOB_STATE_DONE: "done",
    job_pb2.JOB_STATE_FAILED: "failed",
}

OTHER_JOB_S = 600.0
"""How long a call waits for another checkpoint, restore or move to end before it raises CheckpointRunning: at 100 MB/s, the
least that a disk gives, 60 GB."""


class CheckpointJob:
    """A checkpoint, or something that is done with one, in the background. Its values are as of the last refresh.

    Attributes:
        name: name of the checkpoint.
        state: "waiting", "running", "done" or "failed".
        phase: what it waits for or does, in words.
        done_bytes: bytes written or read so far, over all shards.
        total_bytes: bytes there will be; 0: not known yet.
        problem: why it failed, or has to try again; empty: it has not.
        report: of a restore that is done: what it did; else None.
    """

    name: str
    state: JobState
    phase: str
    done_bytes: int
    total_bytes: int
    problem: str
    report: RestoreReport | None

    def __init__(self, options: SessionOptions, job: job_pb2.Job) -> None:
        self._options = options
        self._take(job)

    def _take(self, job: job_pb2.Job) -> None:
        self._job = job
        self.name = job.checkpoint
        self.state = _STATES[job.state]
        self.phase = job.phase
        self.done_bytes, self.total_bytes = job.done_bytes, job.total_bytes
        self.problem = job.problem
        self.report = restore_report(job.report) if job.HasField("report") else None

    @property
    def ended(self) -> bool:
        """True: it is done, or has failed."""
        return self.state in ("done", "failed")

    def refresh(self) -> CheckpointJob:
        """Asks home how far it is; returns itself.

        Raises:
            ShardUnreachable: home did not answer within shard_timeout_s.
        """
        with HomeCalls(self._options) as home:
            self._refresh(home)
        return self

    def _refresh(self, home: HomeCalls) -> None:
        if self.ended:
            return
        try:
            answer = home.answer(lambda link: link.checkpoints.GetJob, checkpoint_pb2.GetJobRequest(id=self._job.id))
        except UnknownCheckpoint:
            self._take(self._forgotten(home))
        else:
            self._take(answer.job)

    def _forgotten(self, home: HomeCalls) -> job_pb2.Job:
        """Returns how a job ended that home does not know any more: it was started anew since."""
        if self._job.kind == job_pb2.JOB_KIND_CREATE and self.name:
            listed = home.answer(lambda link: link.checkpoints.ListCheckpoints, checkpoint_pb2.ListCheckpointsRequest())
            if any(info.name == self.name and info.complete for info in listed.checkpoints):
                return job_pb2.Job(id=self._job.id, kind=self._job.kind, state=job_pb2.JOB_STATE_DONE, checkpoint=self.name)
        failed = job_pb2.Job()
        failed.CopyFrom(self._job)
        failed.state, failed.reason = job_pb2.JOB_STATE_FAILED, "CHECKPOINT_FAILED"
        failed.problem = (
            "the home shard was started anew meanwhile, and knows nothing of it; `shardam status` and `shardam checkpoint "
            "list` show what there is"
        )
        return failed

    def wait(self, timeout_s: float | None = None) -> CheckpointJob:
        """Waits until it has ended; returns itself.

        Args:
            timeout_s: how long; None: as long as it takes.

        Raises:
            CheckpointFailed: the checkpoint could not be made; the message says why, and training is not affected.
            CheckpointRunning: it has not ended in that time; it goes on.
            ShardamError: why a restore or a verification failed.
            ShardUnreachable: home did not answer within shard_timeout_s; it may go on.
        """
        began, backoff = time.monotonic(), Backoff()
        with HomeCalls(self._options) as home:
            while not self.ended:
                left_s = None if timeout_s is None else began + timeout_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise CheckpointRunning(f"{self!r} has not ended within {timeout_s:g} s; wait again")
                time.sleep(backoff.next_s() if left_s is None else min(left_s, backoff.next_s()))
                self._refresh(home)
        if self.state == "failed":
            raise self._failure()
        return self

    def _failure(self) -> ShardamError:
        metadata = {"checkpoint": self.name, "cause": self._job.reason}
        if self._job.kind == job_pb2.JOB_KIND_CREATE:
            return CheckpointFailed(f"checkpoint {self.name!r} was not made: {self.problem}", metadata=metadata)
        return make_error(self._job.reason or "CHECKPOINT_FAILED", self.problem, metadata)

    def __repr__(self) -> str:
        done = f", {self.done_bytes} of {self.total_bytes} bytes" if self.total_bytes else ""
        return f"CheckpointJob({self.name!r}, {self.state}{', ' + self.phase if self.phase else ''}{done})"


def begin(start: Callable[[], job_pb2.Job]) -> job_pb2.Job:
    """Begins a job; while another one is in the way it is tried again, for OTHER_JOB_S.

    Raises:
        CheckpointRunning: the other one has not ended in that time.
        ShardamError: as start.
    """
    deadline, backoff = Deadline(OTHER_JOB_S), Backoff()
    while True:
        try:
            return start()
        except CheckpointRunning as error:
            if deadline.passed:
                raise CheckpointRunning(f"{error.message} (waited {OTHER_JOB_S:g} s for it)", metadata=error.metadata) from None
        backoff.wait(deadline)
