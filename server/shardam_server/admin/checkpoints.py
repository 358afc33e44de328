"""Asks home for checkpoints and jobs; home alone decides and does, the admin API keeps nothing."""

from __future__ import annotations

import secrets

from shardam_proto.limits import CLIENT_ID_BYTES
from shardam_proto.v1 import checkpoint_pb2, job_pb2
from shardam_server.admin.keyed_changes import IdempotencyKey
from shardam_server.admin.shard_calls import ShardCalls

HOME = 0
"""Index of the shard that makes checkpoints and runs jobs."""


def create_checkpoint(calls: ShardCalls, name: str | None, key: IdempotencyKey | None, request_id: int) -> job_pb2.Job:
    """Has home make a checkpoint; returns the job once the state is cut, or while it waits for that.

    Args:
        calls: reaches home.
        name: the checkpoint's; None: home makes one.
        key: home answers a repeat with the same key as the first request; None: each request asks anew.
        request_id: for home's log.

    Raises:
        ShardamError: home refused, could not cut, or did not answer.
    """
    request_key = secrets.token_bytes(CLIENT_ID_BYTES) if key is None else key.client_id
    request = checkpoint_pb2.CreateCheckpointRequest(request_key=request_key, name=name or "")
    request.header.budget_s = calls.timeout_s  # home answers before it is over, with a job that waits
    return calls.call(HOME, lambda stubs: stubs.checkpoints.CreateCheckpoint, request, request_id).job


def list_checkpoints(calls: ShardCalls, request_id: int) -> checkpoint_pb2.ListCheckpointsResponse:
    """Returns all checkpoints, the newest first, and where they lie."""
    request = checkpoint_pb2.ListCheckpointsRequest()
    return calls.call(HOME, lambda stubs: stubs.checkpoints.ListCheckpoints, request, request_id)


def find_checkpoint(calls: ShardCalls, name: str, request_id: int) -> checkpoint_pb2.CheckpointInfo:
    """Returns a checkpoint with its tables and files.

    Raises:
        NotFound: UNKNOWN_CHECKPOINT.
        ShardamError: the name leads outside the root folder, or home did not answer.
    """
    request = checkpoint_pb2.GetCheckpointRequest(name=name)
    return calls.call(HOME, lambda stubs: stubs.checkpoints.GetCheckpoint, request, request_id).checkpoint


def verify_checkpoint(calls: ShardCalls, name: str, request_id: int) -> job_pb2.Job:
    """Has home read all files of a checkpoint; returns the job."""
    request = checkpoint_pb2.VerifyCheckpointRequest(name=name)
    return calls.call(HOME, lambda stubs: stubs.checkpoints.VerifyCheckpoint, request, request_id).job


def delete_checkpoint(calls: ShardCalls, name: str, request_id: int) -> None:
    """Deletes a checkpoint."""
    request = checkpoint_pb2.DeleteCheckpointRequest(name=name)
    calls.call(HOME, lambda stubs: stubs.checkpoints.DeleteCheckpoint, request, request_id)


def restore_checkpoint(calls: ShardCalls, name: str, options: checkpoint_pb2.RestoreOptions, request_id: int) -> job_pb2.Job:
    """Has home replace the state of all shards by a checkpoint's; returns the job."""
    request = checkpoint_pb2.RestoreCheckpointRequest(name=name, options=options)
    return calls.call(HOME, lambda stubs: stubs.checkpoints.RestoreCheckpoint, request, request_id).job


def list_jobs(calls: ShardCalls, request_id: int) -> list[job_pb2.Job]:
    """Returns the jobs, the newest first."""
    request = checkpoint_pb2.ListJobsRequest()
    return list(calls.call(HOME, lambda stubs: stubs.checkpoints.ListJobs, request, request_id).jobs)


def find_job(calls: ShardCalls, job_id: str, request_id: int) -> job_pb2.Job:
    """Returns a job.

    Raises:
        NotFound: UNKNOWN_CHECKPOINT: home does not know it, or not any more.
    """
    request = checkpoint_pb2.GetJobRequest(id=job_id)
    return calls.call(HOME, lambda stubs: stubs.checkpoints.GetJob, request, request_id).job
