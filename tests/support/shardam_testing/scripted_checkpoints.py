"""Home's CheckpointService for tests of what people see: checkpoints and jobs are what a test says they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import grpc

from shardam_proto.error_details import DETAILS_KEY, pack_status
from shardam_proto.errors import ShardamError, UnknownCheckpoint
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2

ROOT = "/srv/checkpoints"


@dataclasses.dataclass
class ScriptedCheckpoints:
    """What home knows.

    Attributes:
        infos: checkpoints, the newest first.
        jobs: jobs, the newest first.
        fail_with: every call is refused with it.
        on_get_job: runs when a job is asked for, so that a test can let it go on.
        created: requests that made a checkpoint.
        restored: requests that restored one.
        deleted: names.
    """

    infos: list[checkpoint_pb2.CheckpointInfo] = dataclasses.field(default_factory=list)
    jobs: list[job_pb2.Job] = dataclasses.field(default_factory=list)
    fail_with: ShardamError | None = None
    on_get_job: Callable[[job_pb2.Job], None] = lambda job: None
    created: list[checkpoint_pb2.CreateCheckpointRequest] = dataclasses.field(default_factory=list)
    restored: list[checkpoint_pb2.RestoreCheckpointRequest] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)

    def begin(self, kind: job_pb2.JobKind.ValueType, name: str) -> job_pb2.Job:
        job = job_pb2.Job(
            id=f"j{len(self.jobs) + 1}",
            kind=kind,
            state=job_pb2.JOB_STATE_RUNNING,
            checkpoint=name,
            phase="writes files",
            done_bytes=2**20,
            total_bytes=4 * 2**20,
            age_s=1.0,
        )
        self.jobs.insert(0, job)
        return job

    def find(self, name: str) -> checkpoint_pb2.CheckpointInfo:
        complete = [info for info in self.infos if info.complete]
        found = complete[:1] if name == "latest" else [info for info in self.infos if info.name == name]
        if not found:
            raise UnknownCheckpoint(
                f"there is no checkpoint {name!r} in {ROOT}; `shardam checkpoint list` shows those there are"
            )
        return found[0]


def finish(job: job_pb2.Job) -> None:
    """Ends a job well."""
    job.state, job.done_bytes, job.seconds = job_pb2.JOB_STATE_DONE, job.total_bytes, 2.5


def fail(job: job_pb2.Job, reason: str, problem: str) -> None:
    """Ends a job badly."""
    job.state, job.reason, job.problem, job.seconds = job_pb2.JOB_STATE_FAILED, reason, problem, 2.5


def checkpoint(name: str, *tables: common_pb2.TableInfo, created_unix_s: float = 1.8e9) -> checkpoint_pb2.CheckpointInfo:
    """Returns a complete checkpoint of two shards."""
    file = checkpoint_pb2.CheckpointFile(name="shard-0-of-2-000.rows", size_bytes=4096, xxh3="0" * 32, num_rows=7)
    return checkpoint_pb2.CheckpointInfo(
        name=name,
        folder=f"{ROOT}/test/{name}",
        complete=True,
        created_unix_s=created_unix_s,
        cluster="test",
        timeline=1,
        num_shards=2,
        num_rows=12,
        size_bytes=8192,
        tables=tables,
        shards=[
            checkpoint_pb2.CheckpointShard(
                index=0, host_name="host-0", folder=f"{ROOT}/test/{name}", change_number=9, files=[file]
            )
        ],
        extra=[checkpoint_pb2.CheckpointExtra(rank=0, file=checkpoint_pb2.CheckpointFile(name="extra-rank-0.safetensors"))],
        version="0.1.0",
        seconds=1.5,
    )


def broken_checkpoint(name: str) -> checkpoint_pb2.CheckpointInfo:
    """Returns one that has no manifest."""
    return checkpoint_pb2.CheckpointInfo(name=name, folder=f"{ROOT}/test/{name}", problem="manifest.json is missing")


class ScriptedCheckpointService(checkpoint_pb2_grpc.CheckpointServiceServicer):
    def __init__(
        self, script: ScriptedCheckpoints, header: Callable[[common_pb2.RequestHeader], common_pb2.ResponseHeader]
    ) -> None:
        self._script = script
        self._header = header

    def _check(self, context: grpc.ServicerContext) -> None:
        if self._script.fail_with is not None:
            _refuse(context, self._script.fail_with)

    def _find(self, name: str, context: grpc.ServicerContext) -> checkpoint_pb2.CheckpointInfo:
        self._check(context)
        try:
            return self._script.find(name)
        except ShardamError as error:
            _refuse(context, error)
            raise

    def CreateCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._check(context)
        self._script.created.append(request)
        job = self._script.begin(job_pb2.JOB_KIND_CREATE, request.name or "20300101T000000-0001")
        return checkpoint_pb2.CreateCheckpointResponse(header=self._header(request.header), job=job)

    def PutExtra(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        raise NotImplementedError  # people bring nothing

    def GetExtra(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        raise NotImplementedError

    def ListCheckpoints(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._check(context)
        return checkpoint_pb2.ListCheckpointsResponse(
            header=self._header(request.header), checkpoints=self._script.infos, root=ROOT
        )

    def GetCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        info = self._find(request.name, context)
        return checkpoint_pb2.GetCheckpointResponse(header=self._header(request.header), checkpoint=info)

    def VerifyCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        info = self._find(request.name, context)
        job = self._script.begin(job_pb2.JOB_KIND_VERIFY, info.name)
        return checkpoint_pb2.VerifyCheckpointResponse(header=self._header(request.header), job=job)

    def DeleteCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        info = self._find(request.name, context)
        self._script.infos.remove(info)
        self._script.deleted.append(info.name)
        return checkpoint_pb2.DeleteCheckpointResponse(header=self._header(request.header))

    def RestoreCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        info = self._find(request.name, context)
        self._script.restored.append(request)
        job = self._script.begin(job_pb2.JOB_KIND_RESTORE, info.name)
        return checkpoint_pb2.RestoreCheckpointResponse(header=self._header(request.header), job=job)

    def Reshard(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        raise NotImplementedError

    def GetJob(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._check(context)
        job = next((job for job in self._script.jobs if job.id == request.id), None)
        if job is None:
            _refuse(context, UnknownCheckpoint(f"no job has the id {request.id!r}"))
            raise AssertionError("abort returned")  # it never does
        self._script.on_get_job(job)
        return checkpoint_pb2.GetJobResponse(header=self._header(request.header), job=job)

    def ListJobs(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._check(context)
        return checkpoint_pb2.ListJobsResponse(header=self._header(request.header), jobs=self._script.jobs)


def _refuse(context: grpc.ServicerContext, error: ShardamError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, pack_status(error)),))
    context.abort(error.rule.code, error.message)
