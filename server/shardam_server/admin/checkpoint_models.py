"""The shapes of checkpoints and jobs, for OpenAPI; a test holds them against what checkpoint_words.py makes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from shardam_server.admin.answer_models import OptionsModel
from shardam_server.admin.request_models import RequestModel, TableSpecModel


class TableReportModel(BaseModel):
    """What a restore did with a table."""

    table: str
    outcome: Literal["loaded", "kept", "skipped", "unknown"] = Field(
        description="loaded: from the checkpoint; kept: as it was; skipped: in the checkpoint and not loaded"
    )
    created: bool = Field(description="true: the cluster did not have it before")
    moments_reset: bool = Field(description="true: moments and steps begin anew")
    read_only: bool = Field(description="true: it refuses pushes and row changes")
    num_rows: int
    table_step: int
    last_options: OptionsModel | None = Field(
        description="hyper-parameters of the last push before the checkpoint; those of the next push come with it"
    )


class RestoreReportModel(BaseModel):
    """What a restore did."""

    checkpoint: str
    timeline: int = Field(description="the timeline of the state since")
    num_shards: int = Field(description="shards that wrote the checkpoint")
    size_bytes: int
    tables: list[TableReportModel]
    options_rule: str = Field(description="which hyper-parameters are active now, in words")


class JobModel(BaseModel):
    """Something that home does in the background; known to that home process alone."""

    id: str
    kind: Literal["create", "verify", "restore", "reshard", "unknown"]
    state: Literal["waiting", "running", "done", "failed", "unknown"]
    checkpoint: str | None
    phase: str | None = Field(description="what it waits for or does, in words")
    done_bytes: int
    total_bytes: int | None = Field(description="null: not known yet")
    problem: str | None = Field(description="why it failed, or has to try again")
    reason: str | None = Field(description="stable reason of the failure, the same as over gRPC")
    attempts: int = Field(description="tries to cut the state")
    age_s: float
    seconds: float | None = Field(description="how long it took; null: it goes on")
    report: RestoreReportModel | None = Field(description="of a restore that is done")


class JobListModel(BaseModel):
    """Jobs that run, and the last ones that ended, the newest first."""

    jobs: list[JobModel]


class CheckpointModel(BaseModel):
    """A checkpoint as a list shows it; of one that is not complete only name, folder and problem are known."""

    name: str
    folder: str = Field(description="its folder on home's host")
    complete: bool
    problem: str | None = Field(description="why it is not complete")
    created: str | None = Field(description="when the state was cut, in UTC", examples=["2026-11-30T14:44:25Z"])
    created_unix_s: float | None
    cluster: str
    timeline: int
    num_shards: int = Field(description="shards that wrote it; it may be restored on any number")
    num_rows: int
    size_bytes: int
    ranks_with_extra: list[int] = Field(description="ranks whose trainer added something (dense weights, data position)")
    group_step: int | None = Field(description="step of the sync group whose members asked for it; null: asked for otherwise")
    version: str | None = Field(description="version of the package that wrote it")
    seconds: float = Field(description="from the cut until it was complete")


class CheckpointListModel(BaseModel):
    """All checkpoints of the cluster, the newest first."""

    root: str = Field(description="the root folder on home's host")
    checkpoints: list[CheckpointModel]


class CheckpointFileModel(BaseModel):
    """A file of a checkpoint."""

    name: str
    size_bytes: int
    xxh3: str = Field(description="xxh3_128 of its content, in hexadecimal")
    num_rows: int


class CheckpointShardModel(BaseModel):
    """What one shard wrote."""

    shard: int
    host_name: str
    folder: str = Field(description="the folder as that host names it")
    change_number: str = Field(description="the shard's change number (uint64) at the cut")
    files: list[CheckpointFileModel]


class CheckpointTableModel(BaseModel):
    """A table in a checkpoint."""

    name: str
    spec: TableSpecModel
    table_step: int
    num_rows: int
    last_options: OptionsModel | None


class CheckpointExtraModel(BaseModel):
    """What one rank's trainer added."""

    rank: int
    file: CheckpointFileModel


class CheckpointDetailsModel(CheckpointModel):
    """A checkpoint with its tables and files."""

    tables: list[CheckpointTableModel]
    shards: list[CheckpointShardModel]
    extra: list[CheckpointExtraModel]


class DeletedCheckpointModel(BaseModel):
    """A checkpoint that was deleted."""

    deleted: str


class ImportedTableModel(BaseModel):
    """A file that was read into a table."""

    table: str
    created: bool = Field(description="true: the cluster did not have it before")
    num_rows: int = Field(description="rows written")
    num_deleted: int = Field(description="rows that the table had and the file has not (overwrite)")
    table_step: int
    moments_reset: bool = Field(description="true: moments and steps were not read")
    other_seed: bool = Field(
        description="true: rows that are not in the file start from other initial weights than where it was made"
    )
    one_moment: bool = Field(description="false: the table was changed while the file was made")


class CreateCheckpointBody(RequestModel):
    """How a checkpoint is made."""

    name: str | None = Field(
        None, description="its name; null: the time and a number. Named ones are kept until they are deleted"
    )


class RestoreBody(RequestModel):
    """What a restore may leave out or do otherwise."""

    allow_missing_tables: bool = Field(
        False, description="tables that the checkpoint lacks stay; else they are a reason to refuse"
    )
    allow_unexpected_tables: bool = Field(
        False, description="tables that the cluster lacks are created and loaded; else they are a reason to refuse"
    )
    weights_only: bool = Field(False, description="load weights alone: moments and steps begin anew")
    read_only: bool = Field(False, description="the tables refuse pushes and row changes")
    tables: list[str] = Field([], description="load these tables alone, the cluster's others stay; empty: all")
    accept_arithmetic_change: bool = Field(
        False, description="load a checkpoint of an older arithmetic version; steps may then come out with other bits"
    )


class ClusterModel(BaseModel):
    """The cluster as Redis knows it."""

    cluster: str
    version: str = Field(description="version of the admin API's package")
    cluster_id: str | None
    seed: str | None
    num_shards: int | None
    num_buckets: int
    epoch: int | None
    routing_version: int | None
    ready: bool = Field(description="true: every shard takes pulls and changes, as /readyz says")
    waiting_for: list[str]
    warnings: list[str] = Field(description="what an operator should know of shards that serve")
    redis: str = Field(description="Redis' URL without its password")
    redis_error: str | None = Field(description="why Redis does not answer; the last known view is shown then")
    checkpoint_root: str | None = Field(
        description="folder of checkpoints on home's host; null: there is none, or home is away"
    )
    last_checkpoint: JobModel | None = Field(
        description="the checkpoint that is being made, or else the last that was tried; null: none since home was started"
    )
    jobs: list[JobModel] | None = Field(description="what home does now; null: home does not say")
