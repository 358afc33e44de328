"""Calls of CheckpointService on a cluster's home, made of generated stubs alone; also as a process that can be killed.

Usage: python -m shardam_testing.faults.checkpoint_calls REDIS_URL CLUSTER create|restore|reshard NAME

The process begins a job, waits for its end, and prints a JSON line for each.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Callable, Iterator

from shardam_proto.channels import Request, Response, UnaryCall, call
from shardam_proto.errors import ShardamError
from shardam_proto.registry import ClusterView, Keys, connect_redis, read_cluster
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.waiting import wait_for

CUT_TIMEOUT_S = 130.0
"""Home tries to cut for two minutes."""

JOB_TIMEOUT_S = 150.0
"""A checkpoint of the tests takes a second, a restore a few, with shards that start again in between."""

ENDED = (job_pb2.JOB_STATE_DONE, job_pb2.JOB_STATE_FAILED)


class JobForgotten(AssertionError):
    """Home has started again and knows no more of a job."""


class CheckpointCalls:
    """Asks the present home of a cluster.

    Args:
        view: reads what Redis says.
    """

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def create(self, name: str = "", *, request_key: bytes = b"") -> job_pb2.Job:
        """Makes a checkpoint; returns once it is cut.

        Raises:
            ShardamError: it was refused, or home is gone.
        """
        key = request_key or secrets.token_bytes(16)
        with self._home() as (client, stub):
            request = checkpoint_pb2.CreateCheckpointRequest(header=_header(client), request_key=key, name=name)
            return _ask(stub.CreateCheckpoint, request, CUT_TIMEOUT_S).job

    def restore(self, name: str = "latest", *, only_if_empty: bool = False, **options: bool | list[str]) -> job_pb2.Job:
        """Begins a restore; options are those of RestoreOptions."""
        with self._home() as (client, stub):
            request = checkpoint_pb2.RestoreCheckpointRequest(
                header=_header(client),
                name=name,
                options=checkpoint_pb2.RestoreOptions(**options),  # type: ignore[arg-type]  # names are checked at run time
                only_if_empty=only_if_empty,
            )
            return _ask(stub.RestoreCheckpoint, request).job

    def reshard(self, num_shards: int) -> job_pb2.Job:
        """Begins to move the state to another number of shards."""
        with self._home() as (client, stub):
            return _ask(stub.Reshard, checkpoint_pb2.ReshardRequest(header=_header(client), num_shards=num_shards)).job

    def verify(self, name: str) -> job_pb2.Job:
        """Begins to read all files of a checkpoint."""
        with self._home() as (client, stub):
            return _ask(stub.VerifyCheckpoint, checkpoint_pb2.VerifyCheckpointRequest(header=_header(client), name=name)).job

    def delete(self, name: str) -> None:
        """Deletes a checkpoint."""
        with self._home() as (client, stub):
            _ask(stub.DeleteCheckpoint, checkpoint_pb2.DeleteCheckpointRequest(header=_header(client), name=name))

    def list(self) -> list[checkpoint_pb2.CheckpointInfo]:
        """Returns all checkpoints, the newest first."""
        with self._home() as (client, stub):
            request = checkpoint_pb2.ListCheckpointsRequest(header=_header(client))
            return list(_ask(stub.ListCheckpoints, request).checkpoints)

    def get(self, name: str = "latest") -> checkpoint_pb2.CheckpointInfo:
        """Returns one checkpoint."""
        with self._home() as (client, stub):
            return _ask(stub.GetCheckpoint, checkpoint_pb2.GetCheckpointRequest(header=_header(client), name=name)).checkpoint

    def job(self, job_id: str) -> job_pb2.Job:
        """Returns a job.

        Raises:
            JobForgotten: home has started again since.
            ShardamError: home is not there.
        """
        with self._home() as (client, stub):
            try:
                return _ask(stub.GetJob, checkpoint_pb2.GetJobRequest(header=_header(client), id=job_id)).job
            except ShardamError as error:
                if error.rule.retryable:
                    raise
                raise JobForgotten(error.message) from error

    def wait(self, job: job_pb2.Job, timeout_s: float = JOB_TIMEOUT_S) -> job_pb2.Job:
        """Waits until a job has ended, also while home is away for a moment.

        Raises:
            JobForgotten: home has started again since.
            AssertionError: it does not end in time.
        """

        def ended() -> job_pb2.Job | None:
            with contextlib.suppress(ShardamError, KeyError):
                present = self.job(job.id)
                return present if present.state in ENDED else None
            return None

        return wait_for(f"the job {job.id} of {job.checkpoint!r} to end", ended, timeout_s)

    def done(self, job: job_pb2.Job) -> job_pb2.Job:
        """Waits for the end of a job that has to succeed.

        Raises:
            AssertionError: it failed.
        """
        ended = self.wait(job)
        assert ended.state == job_pb2.JOB_STATE_DONE, f"{job.checkpoint!r} failed: {ended.reason}: {ended.problem}"
        return ended

    def failed(self, job: job_pb2.Job) -> job_pb2.Job:
        """Waits for the end of a job that has to fail.

        Raises:
            AssertionError: it did not.
        """
        ended = self.wait(job)
        assert ended.state == job_pb2.JOB_STATE_FAILED, f"{job.checkpoint!r} was done, and had to fail"
        return ended

    @contextlib.contextmanager
    def _home(self) -> Iterator[tuple[RawClient, checkpoint_pb2_grpc.CheckpointServiceStub]]:
        with raw_client(self._view()) as client:
            yield client, checkpoint_pb2_grpc.CheckpointServiceStub(client.channel)


def _header(client: RawClient) -> common_pb2.RequestHeader:
    return client.header(client_id=b"", epoch=0)


def _ask(method: UnaryCall[Request, Response], request: Request, timeout_s: float = 30.0) -> Response:
    return call(method, request, timeout_s=timeout_s, token=None, peer="home")


def main(redis_url: str, cluster: str, what: str, name: str) -> None:
    """Begins one job, and waits for its end."""

    def view() -> ClusterView:
        with contextlib.closing(connect_redis(redis_url)) as connection:
            return read_cluster(connection, Keys(cluster))

    calls = CheckpointCalls(view)
    match what:
        case "create":
            job = calls.create(name)
        case "restore":
            job = calls.restore(name)
        case _:
            job = calls.reshard(int(name))
    _say(begun=job.id)
    ended = calls.wait(job)
    _say(ended=job_pb2.JobState.Name(ended.state), problem=ended.problem)


def _say(**values: str) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
