"""What calls for checkpoints return, as plain values."""

from __future__ import annotations

import dataclasses
from typing import Literal

from shardam._parts import options_value
from shardam_kernels.factors import AdamOptions
from shardam_proto.v1 import checkpoint_pb2, job_pb2

TableOutcome = Literal["loaded", "kept", "skipped"]
"""What a restore did with a table: loaded it; left it as it was; left it in the checkpoint."""

_OUTCOMES: dict[int, TableOutcome] = {
    job_pb2.TABLE_OUTCOME_LOADED: "loaded",
    job_pb2.TABLE_OUTCOME_KEPT: "kept",
    job_pb2.TABLE_OUTCOME_SKIPPED: "skipped",
}


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint.

    Attributes:
        name: its name within the cluster.
        folder: its folder on the home shard's host.
        complete: all of it is there, as far as its manifest says.
        problem: why it is not complete; empty if it is.
        created_unix_s: seconds since 1970 when the state was cut.
        cluster: name of the cluster.
        timeline: timeline of the state.
        num_shards: shards that wrote it; it can be restored on any number.
        num_rows: rows of all tables.
        size_bytes: bytes of all files.
        tables: names of its tables; empty in lists.
        extra_ranks: ranks whose trainer added something; rank 0 without a group.
        group_step: step of the sync group whose members asked for it; 0: it was asked for otherwise.
        version: version of shardam that wrote it.
        seconds: from the cut until it was complete.
    """

    name: str
    folder: str
    complete: bool
    problem: str
    created_unix_s: float
    cluster: str
    timeline: int
    num_shards: int
    num_rows: int
    size_bytes: int
    tables: tuple[str, ...]
    extra_ranks: tuple[int, ...]
    group_step: int
    version: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class TableReport:
    """What a restore did with one table.

    Attributes:
        table: its name.
        outcome: "loaded" from the checkpoint; "kept" as it was; "skipped": in the checkpoint and not loaded.
        created: the cluster did not have it before.
        moments_reset: moments and steps were not loaded and begin anew.
        read_only: it refuses pushes and row changes.
        num_rows: rows loaded.
        table_step: its step then.
        last_options: hyper-parameters of the last push before the checkpoint, or None; they are shown only: those of the next
            push come with it.
    """

    table: str
    outcome: TableOutcome
    created: bool
    moments_reset: bool
    read_only: bool
    num_rows: int
    table_step: int
    last_options: AdamOptions | None


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        name: the checkpoint's name.
        timeline: timeline of the state since.
        tables: all tables of the checkpoint and of the cluster, by name.
        num_shards: shards that wrote the checkpoint.
        size_bytes: bytes read.
    """

    name: str
    timeline: int
    tables: tuple[TableReport, ...]
    num_shards: int
    size_bytes: int

    def table(self, name: str) -> TableReport:
        """Returns what was done with a table.

        Raises:
            KeyError: neither the checkpoint nor the cluster has it.
        """
        for table in self.tables:
            if table.table == name:
                return table
        raise KeyError(name)


def checkpoint_info(message: checkpoint_pb2.CheckpointInfo) -> CheckpointInfo:
    """Converts a checkpoint from its message."""
    return CheckpointInfo(
        name=message.name,
        folder=message.folder,
        complete=message.complete,
        problem=message.problem,
        created_unix_s=message.created_unix_s,
        cluster=message.cluster,
        timeline=message.timeline,
        num_shards=message.num_shards,
        num_rows=message.num_rows,
        size_bytes=message.size_bytes,
        tables=tuple(table.spec.name for table in message.tables),
        extra_ranks=tuple(extra.rank for extra in message.extra),
        group_step=message.group_step,
        version=message.version,
        seconds=message.seconds,
    )


def restore_report(message: job_pb2.RestoreReport) -> RestoreReport:
    """Converts a report from its message."""
    tables = tuple(
        TableReport(
            table=table.table,
            outcome=_OUTCOMES[table.outcome],
            created=table.created,
            moments_reset=table.moments_reset,
            read_only=table.read_only,
            num_rows=table.num_rows,
            table_step=table.table_step,
            last_options=options_value(table.last_options) if table.HasField("last_options") else None,
        )
        for table in message.tables
    )
    return RestoreReport(message.name, message.timeline, tables, message.num_shards, message.size_bytes)
