"""The checkpoints in `shardam status`: asked of home, and shown as lines or as JSON."""

from __future__ import annotations

import dataclasses

from shardam_proto.channels import call, open_channel
from shardam_proto.errors import ShardamError
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2, shard_pb2
from shardam_server.checkpoint_words import (
    DONE,
    FAILED,
    checkpoint_to_json,
    has_ended,
    job_state,
    job_to_json,
    job_words,
    timestamp,
)
from shardam_server.settings import StatusSettings
from shardam_server.terminal_text import bytes_words, duration_words


@dataclasses.dataclass(frozen=True)
class CheckpointsReport:
    """The checkpoints as `status` sees them.

    Attributes:
        root: folder under which they lie, on home's host; empty: there is none.
        problem: why nothing is known of them; None: something is.
        last: the checkpoint that is being made, or else the last that was tried; None: none since home was started.
        newest: the newest complete one.
        jobs: what home does now.
    """

    root: str = ""
    problem: str | None = None
    last: job_pb2.Job | None = None
    newest: checkpoint_pb2.CheckpointInfo | None = None
    jobs: list[job_pb2.Job] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Returns what the JSON form of status has of it."""
        return {
            "checkpoints": {
                "root": self.root or None,
                "problem": self.problem,
                "last": None if self.last is None else job_to_json(self.last),
                "newest": None if self.newest is None else checkpoint_to_json(self.newest),
                "jobs": [job_to_json(job) for job in self.jobs],
            }
        }

    def lines(self) -> list[str]:
        """Returns what status says of them."""
        if self.problem is not None:
            return [f"checkpoints unknown: {self.problem}"]
        if not self.root:
            return ["no checkpoints: the shards have neither --data-dir nor --checkpoint-dir"]
        lines = [f"last checkpoint {self._last_words()}"]
        lines += [f"job {job.id}: {job_words(job)}" for job in self.jobs]
        return lines

    def _last_words(self) -> str:
        if self.last is not None and job_state(self.last) == DONE:
            ago = duration_words(max(self.last.age_s - self.last.seconds, 0))
            return f"{self.last.checkpoint}, {bytes_words(self.last.done_bytes)}, complete for {ago}"
        newest = self.newest
        words = f"of before: {newest.name}, made {timestamp(newest.created_unix_s)}" if newest else "none yet"
        if self.last is not None and job_state(self.last) == FAILED:
            ago = duration_words(max(self.last.age_s - self.last.seconds, 0))
            return f"FAILED {ago} ago ({self.last.reason or 'INTERNAL'}): {self.last.problem}; {words}"
        return words


NOT_ASKED = CheckpointsReport(problem="home, shard 0, cannot be asked, and only home knows them")


def ask_checkpoints(
    address: str, header: common_pb2.RequestHeader, status: shard_pb2.GetStatusResponse, settings: StatusSettings
) -> CheckpointsReport:
    """Asks home for its jobs and checkpoints; whatever is wrong is part of the report, so that the rest of status stands.

    Args:
        address: home's.
        header: of a request to it.
        status: home's own answer.
        settings: time-out and token.
    """
    if not status.checkpoint_root:
        return CheckpointsReport()
    peer = f"shard 0 at {address}"
    last = status.last_checkpoint if status.HasField("last_checkpoint") else None
    try:
        with open_channel(address) as channel:
            stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
            jobs = call(
                stub.ListJobs,
                checkpoint_pb2.ListJobsRequest(header=header),
                timeout_s=settings.shard_timeout_s,
                token=settings.plain_token,
                peer=peer,
            ).jobs
            listed = call(
                stub.ListCheckpoints,
                checkpoint_pb2.ListCheckpointsRequest(header=header),
                timeout_s=settings.shard_timeout_s,
                token=settings.plain_token,
                peer=peer,
            ).checkpoints
    except ShardamError as error:
        return CheckpointsReport(status.checkpoint_root, error.message, last)
    newest = next((info for info in listed if info.complete), None)
    return CheckpointsReport(status.checkpoint_root, None, last, newest, [job for job in jobs if not has_ended(job)])
