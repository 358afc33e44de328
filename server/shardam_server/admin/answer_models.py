"""The shapes of answers, for OpenAPI.

Answers are encoded from arrays (encoding.py), not from these models; a test holds the two against each other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shardam_server.admin.request_models import TableSpecModel

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A float; what JSON cannot write is spelled out."""

RowId = Annotated[str, Field(pattern="^(0|-?[1-9][0-9]{0,18})$", description="an int64 in decimal", examples=["5", "-1"])]


class ProblemModel(BaseModel):
    """An error (RFC 9457); the values of the detail follow as further members."""

    type: str
    title: str
    status: int
    detail: str = Field(description="what was wrong, with which value, and what to do")
    reason: str = Field(description="stable reason, the same as over gRPC")
    request_id: str


class OptimizerModel(BaseModel):
    """SparseAdam's state of a row."""

    exp_avg: list[Number]
    exp_avg_sq: list[Number]
    step: int = Field(description="the step that enters bias correction: the table's")


class RowModel(BaseModel):
    """A row."""

    id: RowId
    found: bool = Field(description="false: the row does not exist yet")
    shard: int = Field(description="the shard that owns the id")
    bucket: int = Field(description="the id's bucket, 0 to 4,095")
    weight: list[Number]
    optimizer: OptimizerModel | None = Field(None, description="only with include=optimizer, and for a single row")
    last_touched_step: int = Field(description="the table's step when a push last touched the row")
    change_number: str = Field(description="the owner's change number (uint64) when the row last changed")
    has_nonfinite: bool = Field(description="true: a value of this answer is NaN or infinite, and spelled as a string")


class SingleRowModel(RowModel):
    """A row that exists, with its optimizer state and its table."""

    table: str
    dim: int
    table_step: int


class RowsModel(BaseModel):
    """Rows of one table."""

    table: str
    dim: int
    table_step: int = Field(description="the highest step of the shards that were asked")
    table_steps: dict[str, int] = Field(description="the table's step by shard; they differ only while pushes are in flight")
    rows: list[RowModel]


class RowPageModel(RowsModel):
    """A page of existing rows."""

    next_cursor: str | None = Field(description="cursor of the next page; null: this was the last")


class ManyTablesModel(BaseModel):
    """Rows of several tables, in the order asked for."""

    tables: list[RowsModel]


class DeletedRowModel(BaseModel):
    """A row that was deleted."""

    table: str
    id: RowId
    shard: int = Field(description="the shard that owns the id")
    bucket: int = Field(description="the id's bucket, 0 to 4,095")


class ChangedRowModel(DeletedRowModel):
    """A row that was written; the answer's ETag names its new state."""

    change_number: str = Field(description="the owner's change number (uint64) of this change")


class MemoryModel(BaseModel):
    """Bytes over all shards; null while a shard does not answer."""

    weight_bytes: int | None = Field(description="weights of the rows")
    exp_avg_bytes: int | None = Field(description="first moments of the rows")
    exp_avg_sq_bytes: int | None = Field(description="second moments of the rows")
    record_bytes: int | None = Field(description="what the records take on the devices, with padding")
    index_bytes: int | None = Field(description="indexes and per-row counters")


class OptionsModel(BaseModel):
    """Hyper-parameters of the last push."""

    lr: Number
    betas: tuple[Number, Number]
    eps: Number
    weight_decay: Number
    decoupled_weight_decay: bool
    maximize: bool
    grad_scale: Number


class TableOnShardModel(BaseModel):
    """A table on one shard."""

    shard: int
    table_step: int
    num_rows: int
    record_bytes: int
    index_bytes: int
    saturated_values: int
    nonfinite_pushes: int


class TableModel(BaseModel):
    """A table over all shards; sums are null while a shard does not answer."""

    name: str
    table_id: str
    table_seed: str
    spec: TableSpecModel
    table_step: int = Field(description="how often the table's optimizer has stepped")
    num_rows: int | None
    memory: MemoryModel
    last_options: OptionsModel | None
    saturated_values: int | None
    nonfinite_pushes: int | None
    read_only: bool = Field(description="true: restored for reading alone, pushes and row changes are refused")
    shards: list[TableOnShardModel]
    missing_shards: list[int] = Field(description="shards that did not answer")


class TablePageModel(BaseModel):
    """A page of tables by name."""

    tables: list[TableModel]
    next_after_name: str | None = Field(description="value of after_name for the next page; null: this was the last")


class ShardModel(BaseModel):
    """A shard; what only the shard itself can say is null while it does not answer."""

    shard: int
    state: Literal["starting", "serving", "draining", "lost", "suspended", "unknown", "refused", "unreachable", "missing"] = (
        Field(
            description="what the shard says of itself; refused: it answers, but not to the admin API (a wrong token); "
            "unreachable: it is registered and does not answer; missing: it is not registered"
        )
    )
    waiting_for: str | None
    reason: str | None = Field(description="reason why it does not take pulls and changes; null: it does")
    problem: str | None = Field(description="the same in words, with what to do")
    warning: str | None = Field(description="what an operator should know of a shard that serves; DEGRADED is said here")
    registered: bool
    address: str | None
    http_address: str | None
    device: str | None
    pid: int | None
    incarnation: str | None
    lineage: str | None
    version: str | None = None
    host_name: str | None = None
    uptime_s: float | None = None
    timeline: int | None = None
    epoch: int | None = None
    change_number: str | None = None
    num_tables: int | None = None
    num_rows: int | None = None
    max_rows: int | None = Field(None, description="0: no limit")
    record_bytes: int | None = None
    index_bytes: int | None = None
    resident_bytes: int | None = None
    device_memory_bytes: int | None = Field(None, description="of the device's own memory; 0 on the CPU")
    queue_depth: int | None = Field(None, description="changes that wait to be applied")
    queue_bytes: int | None = Field(None, description="their bytes")
    reserved_bytes: int | None = Field(None, description="bytes reserved for pushes that arrive in chunks")
    parked_requests: int | None = Field(None, description="requests on streams that wait for something")
    num_clients: int | None = None
    journal_mode: Literal["off", "write", "fsync"] | None = Field(
        None, description="off: a killed process loses its rows; write: it loses nothing; fsync: nor does a power loss"
    )
    journal_state: Literal["ok", "degraded", "full", "failed"] | None = Field(
        None,
        description="degraded: the disk is full and changes are acknowledged without the journal; full: they are refused; "
        "failed: no more changes until the shard is started again",
    )
    journal_problem: str | None = Field(None, description="what is wrong with the journal, and what to do")
    journal_bytes: int | None = Field(None, description="bytes of the journal since its base")
    data_folder: str | None = Field(None, description="folder of the state on the shard's host; null: memory only")
    checkpoint_root: str | None = Field(None, description="folder of checkpoints on the shard's host; null: there is none")
    checkpoint_problem: str | None = Field(None, description="why checkpoints cannot be written there")
    pre_image_bytes: int | None = Field(None, description="bytes of rows that are kept as they were when a checkpoint was cut")


class ShardListModel(BaseModel):
    """All shards of the cluster."""

    shards: list[ShardModel]


class WorkerModel(BaseModel):
    """A client that sends heartbeats; what its mode does not have is null."""

    client_id: str = Field(description="the client, in hexadecimal")
    mode: Literal["async", "sync", "bounded", "unknown"] = Field(description="what a step means to it; async: it has no group")
    max_staleness: int | None = Field(description="bounded: steps that a member may be behind another one's pull")
    reduce: Literal["mean", "sum"] | None = Field(description="sync: how gradients of a step are merged")
    group: str | None
    rank: int | None
    world_size: int | None = Field(description="ranks of the group")
    restart_count: int | None = Field(description="how often its launcher has restarted it")
    step: int | None = Field(description="sync: steps of the group that it has been through; bounded: its clock")
    staleness: int | None = Field(description="bounded: steps that it is behind the member that is furthest")
    arrived: bool | None = Field(description="sync: it has arrived at the next step and waits for others")
    last_number: int = Field(description="its last closed number on home: how many pushes and changes it has made")
    last_heartbeat_s: float = Field(description="seconds since home last heard of it")


class WaitingGroupModel(BaseModel):
    """A sync group that cannot decide its next step yet."""

    group: str
    step: int = Field(description="its next step")
    ranks: list[int] = Field(description="ranks that have not arrived, or not joined")
    waited_s: float = Field(description="seconds since the first member arrived; 0: none has")
    summary: str = Field(description="the same in words")


class WorkerPageModel(BaseModel):
    """A page of workers, and all groups that wait."""

    workers: list[WorkerModel]
    waiting_groups: list[WaitingGroupModel]
    next_cursor: str | None = Field(description="cursor of the next page; null: this was the last")


class HealthModel(BaseModel):
    """The process lives."""

    status: Literal["ok"]


class ReadinessModel(BaseModel):
    """Every shard serves."""

    status: Literal["ready"]
    cluster: str
    num_shards: int
    warnings: list[str] = Field(description="what an operator should know of shards that serve")
