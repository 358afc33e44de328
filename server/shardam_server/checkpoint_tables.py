"""Checkpoints and jobs as `shardam checkpoint` prints them for people."""

from __future__ import annotations

from collections.abc import Sequence

from shardam_proto.v1 import checkpoint_pb2, common_pb2, job_pb2
from shardam_server.checkpoint_words import (
    FAILED,
    job_state,
    kind_word,
    progress_words,
    timestamp,
)
from shardam_server.table_words import spelled
from shardam_server.terminal_text import aligned, bytes_words, seconds_words

_LIST = ("name", "made", "rows", "size", "shards", "added by ranks", "")
_TABLES = ("table", "dim", "dtype", "rows", "step", "last lr")
_FILES = ("shard", "file", "rows", "size", "xxh3")
_JOBS = ("job", "kind", "state", "checkpoint", "progress", "took", "")


def list_lines(answer: checkpoint_pb2.ListCheckpointsResponse) -> list[str]:
    """Returns the list of checkpoints, the newest first, then where they lie."""
    if not answer.checkpoints:
        return [f"no checkpoints in {answer.root}: `shardam checkpoint create` makes one"]
    return [*aligned([_LIST, *(_row(info) for info in answer.checkpoints)]), "", f"in {answer.root}"]


def _row(info: checkpoint_pb2.CheckpointInfo) -> tuple[str, ...]:
    ranks = ", ".join(str(extra.rank) for extra in info.extra) or "-"
    if not info.complete:
        return (info.name, _made(info), "-", "-", "-", "-", f"not complete: {info.problem}")
    counts = (str(info.num_rows), bytes_words(info.size_bytes), str(info.num_shards))
    return (info.name, _made(info), *counts, ranks, "")


def _made(info: checkpoint_pb2.CheckpointInfo) -> str:
    return timestamp(info.created_unix_s) if info.created_unix_s else "-"


def checkpoint_lines(info: checkpoint_pb2.CheckpointInfo) -> list[str]:
    """Returns one checkpoint with its tables, its files and what trainers added."""
    state = "complete" if info.complete else f"not complete: {info.problem}"
    step = f"   group step {info.group_step}" if info.group_step else ""
    lines = [
        f"checkpoint {info.name}   {state}",
        f"made {_made(info)} in {seconds_words(info.seconds)} by shardam {info.version or '-'}   cluster {info.cluster}   "
        f"timeline {info.timeline}   {info.num_shards} shards{step}",
        f"{info.num_rows} rows, {bytes_words(info.size_bytes)} in {info.folder}",
    ]
    if info.tables:
        lines += ["", *aligned([_TABLES, *(_table_row(table) for table in info.tables)])]
    files = [
        (str(shard.index), file.name, str(file.num_rows), bytes_words(file.size_bytes), file.xxh3)
        for shard in info.shards
        for file in shard.files
    ]
    if files:
        lines += ["", *aligned([_FILES, *files])]
        lines += [f"shard {shard.index} wrote {shard.folder} on host {shard.host_name}" for shard in info.shards]
    if info.extra:
        lines += ["", *(f"rank {extra.rank} added {bytes_words(extra.file.size_bytes)}" for extra in info.extra)]
    else:
        lines += ["", "no trainer added anything (dense weights, data position)"]
    return lines


def _table_row(table: common_pb2.TableInfo) -> tuple[str, ...]:
    lr = str(spelled(table.last_options.lr)) if table.HasField("last_options") else "-"
    dtype = common_pb2.Dtype.Name(table.spec.dtype).removeprefix("DTYPE_").lower()
    return (table.spec.name, str(table.spec.dim), dtype, str(table.num_rows), str(table.table_step), lr)


def job_lines(jobs: Sequence[job_pb2.Job]) -> list[str]:
    """Returns the jobs, the newest first."""
    if not jobs:
        return ["no jobs since home was started"]
    return aligned([_JOBS, *(_job_row(job) for job in jobs)])


def _job_row(job: job_pb2.Job) -> tuple[str, ...]:
    state = job_state(job)
    problem = f"{job.reason}: {job.problem}" if state == FAILED else job.problem
    took = seconds_words(job.seconds) if job.seconds else f"{seconds_words(job.age_s)} so far"
    return (job.id, kind_word(job), state, job.checkpoint or "-", progress_words(job) or "-", took, problem or job.phase)
