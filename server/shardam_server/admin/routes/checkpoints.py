"""/v1/checkpoints and /v1/jobs: made, listed, verified, restored and deleted by home."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body

from shardam_proto.v1 import checkpoint_pb2, job_pb2
from shardam_server.admin import checkpoints
from shardam_server.admin.checkpoint_models import (
    CheckpointDetailsModel,
    CheckpointListModel,
    CreateCheckpointBody,
    DeletedCheckpointModel,
    JobListModel,
    JobModel,
    RestoreBody,
)
from shardam_server.admin.context import Admin, RequestNumber
from shardam_server.admin.encoding import JsonResponse
from shardam_server.admin.routes.keys import Key
from shardam_server.checkpoint_words import checkpoint_details_to_json, checkpoint_to_json, job_to_json

router = APIRouter(tags=["checkpoints"])

ACCEPTED = 202
"""What was asked for goes on in the background; Location names its job."""

_CREATE = CreateCheckpointBody.model_validate({})
_RESTORE = RestoreBody.model_validate({})

CreateBody = Annotated[CreateCheckpointBody, Body(description="may be left out")]
RestoreOptionsBody = Annotated[
    RestoreBody, Body(description="may be left out: all tables, and none may be missing or unexpected")
]


@router.get("/v1/checkpoints", response_model=CheckpointListModel, summary="All checkpoints, the newest first")
def get_checkpoints(admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows the cluster's checkpoints; one that is not complete says why, and is never "latest"."""
    answer = checkpoints.list_checkpoints(admin.calls, request_number)
    return JsonResponse({"root": answer.root, "checkpoints": [checkpoint_to_json(info) for info in answer.checkpoints]})


@router.post("/v1/checkpoints", response_model=JobModel, status_code=ACCEPTED, summary="Make a checkpoint")
def post_checkpoint(admin: Admin, request_number: RequestNumber, key: Key, body: CreateBody = _CREATE) -> JsonResponse:
    """Cuts one state of all shards and writes it beside training; answers with the job once the state is cut.

    If shards cannot agree on a cut within the time of a call, the job waits and they go on trying. A request while another
    one waits for its cut joins it; one while a checkpoint is being written is 409 CHECKPOINT_RUNNING. A repeat with the same
    Idempotency-Key is answered with the same job, as long as home is not started anew. What a trainer adds (dense weights, data
    position) only a trainer can bring: a checkpoint made here has none.
    """
    return _accepted(checkpoints.create_checkpoint(admin.calls, body.name, key, request_number))


@router.get("/v1/checkpoints/{name}", response_model=CheckpointDetailsModel, summary="One checkpoint")
def get_checkpoint(name: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows a checkpoint with its tables, their steps and last hyper-parameters, and its files; `latest` is the newest one."""
    return JsonResponse(checkpoint_details_to_json(checkpoints.find_checkpoint(admin.calls, name, request_number)))


@router.delete("/v1/checkpoints/{name}", response_model=DeletedCheckpointModel, summary="Delete a checkpoint")
def delete_checkpoint(name: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Deletes a checkpoint; 409 while a job makes, reads or restores it."""
    checkpoints.delete_checkpoint(admin.calls, name, request_number)
    return JsonResponse({"deleted": name})


@router.post(
    "/v1/checkpoints/{name}:verify", response_model=JobModel, status_code=ACCEPTED, summary="Read all files of a checkpoint"
)
def verify_checkpoint(name: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Reads all files and compares them with the manifest; the job fails with the file that is missing, short or damaged."""
    return _accepted(checkpoints.verify_checkpoint(admin.calls, name, request_number))


@router.post("/v1/checkpoints/{name}:restore", response_model=JobModel, status_code=ACCEPTED, summary="Restore a checkpoint")
def restore_checkpoint(
    name: str, admin: Admin, request_number: RequestNumber, body: RestoreOptionsBody = _RESTORE
) -> JsonResponse:
    """Replaces the state of all shards by a checkpoint's, on a new timeline.

    Everything is checked before anything is replaced; a job that fails (CHECKPOINT_MISMATCH with the tables that are missing
    or unexpected, SCHEMA_MISMATCH, CHECKPOINT_DAMAGED, ...) leaves the state as it was. Programs that were connected raise
    ClusterRestored and have to connect anew. The report of a job that is done names each table with what was done.
    """
    options = checkpoint_pb2.RestoreOptions(
        allow_missing_tables=body.allow_missing_tables,
        allow_unexpected_tables=body.allow_unexpected_tables,
        weights_only=body.weights_only,
        read_only=body.read_only,
        tables=body.tables,
        accept_arithmetic_change=body.accept_arithmetic_change,
    )
    return _accepted(checkpoints.restore_checkpoint(admin.calls, name, options, request_number))


@router.get("/v1/jobs", response_model=JobListModel, summary="Jobs, the newest first")
def get_jobs(admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows what home does in the background, and how the last ones ended; a home that is started anew has forgotten them."""
    return JsonResponse({"jobs": [job_to_json(job) for job in checkpoints.list_jobs(admin.calls, request_number)]})


@router.get("/v1/jobs/{job_id}", response_model=JobModel, summary="One job")
def get_job(job_id: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows how far a job is."""
    return JsonResponse(job_to_json(checkpoints.find_job(admin.calls, job_id, request_number)))


def _accepted(job: job_pb2.Job) -> JsonResponse:
    return JsonResponse(job_to_json(job), ACCEPTED, {"Location": f"/v1/jobs/{job.id}"})
