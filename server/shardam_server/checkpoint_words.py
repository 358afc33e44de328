"""How checkpoints, jobs and restores are said to an operator, by the command line, REST and the console in the same words."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, common_pb2, job_pb2
from shardam_server.table_words import Words, options_to_json, spec_to_json, spelled
from shardam_server.terminal_text import bytes_words, seconds_words

CREATE, VERIFY, RESTORE, RESHARD = "create", "verify", "restore", "reshard"

KINDS: Mapping[job_pb2.JobKind.ValueType, str] = {
    job_pb2.JOB_KIND_CREATE: CREATE,
    job_pb2.JOB_KIND_VERIFY: VERIFY,
    job_pb2.JOB_KIND_RESTORE: RESTORE,
    job_pb2.JOB_KIND_RESHARD: RESHARD,
}

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"

STATES: Mapping[job_pb2.JobState.ValueType, str] = {
    job_pb2.JOB_STATE_WAITING: WAITING,
    job_pb2.JOB_STATE_RUNNING: RUNNING,
    job_pb2.JOB_STATE_DONE: DONE,
    job_pb2.JOB_STATE_FAILED: FAILED,
}

OUTCOMES: Mapping[job_pb2.TableOutcome.ValueType, str] = {
    job_pb2.TABLE_OUTCOME_LOADED: "loaded",
    job_pb2.TABLE_OUTCOME_KEPT: "kept",
    job_pb2.TABLE_OUTCOME_SKIPPED: "skipped",
}

LR_RULE = (
    "lr and the other hyper-parameters are not restored: each push brings its worker's own, and those are the active ones; "
    "shown are the last ones used before the checkpoint"
)
"""What a restore does with hyper-parameters; the answer to "which lr is active now"."""


def kind_word(job: job_pb2.Job) -> str:
    """Returns what a job does in one word; "unknown" for one of a newer version."""
    return KINDS.get(job.kind, "unknown")


def job_state(job: job_pb2.Job) -> str:
    """Returns how far a job is in one word; "unknown" for one of a newer version."""
    return STATES.get(job.state, "unknown")


def has_ended(job: job_pb2.Job) -> bool:
    """True: it is done or has failed."""
    return job_state(job) in (DONE, FAILED)


def job_to_json(job: job_pb2.Job) -> dict[str, Words]:
    """Returns a job as `--json` and /v1/jobs show it; what it does not have is null."""
    return {
        "id": job.id,
        "kind": kind_word(job),
        "state": job_state(job),
        "checkpoint": job.checkpoint or None,
        "phase": job.phase or None,
        "done_bytes": job.done_bytes,
        "total_bytes": job.total_bytes or None,
        "problem": job.problem or None,
        "reason": job.reason or None,
        "attempts": job.attempts,
        "age_s": round(job.age_s, 3),
        "seconds": round(job.seconds, 3) if has_ended(job) else None,
        "report": report_to_json(job.report) if job.HasField("report") else None,
    }


def report_to_json(report: job_pb2.RestoreReport) -> dict[str, Words]:
    """Returns what a restore did."""
    return {
        "checkpoint": report.name,
        "timeline": report.timeline,
        "num_shards": report.num_shards,
        "size_bytes": report.size_bytes,
        "tables": [_table_report_to_json(table) for table in report.tables],
        "options_rule": LR_RULE,
    }


def _table_report_to_json(table: job_pb2.TableReport) -> dict[str, Words]:
    return {
        "table": table.table,
        "outcome": OUTCOMES.get(table.outcome, "unknown"),
        "created": table.created,
        "moments_reset": table.moments_reset,
        "read_only": table.read_only,
        "num_rows": table.num_rows,
        "table_step": table.table_step,
        "last_options": options_to_json(table.last_options) if table.HasField("last_options") else None,
    }


def checkpoint_to_json(info: checkpoint_pb2.CheckpointInfo) -> dict[str, Words]:
    """Returns a checkpoint as a list shows it."""
    return {
        "name": info.name,
        "folder": info.folder,
        "complete": info.complete,
        "problem": info.problem or None,
        "created": timestamp(info.created_unix_s) if info.created_unix_s else None,
        "created_unix_s": info.created_unix_s or None,
        "cluster": info.cluster,
        "timeline": info.timeline,
        "num_shards": info.num_shards,
        "num_rows": info.num_rows,
        "size_bytes": info.size_bytes,
        "ranks_with_extra": [extra.rank for extra in info.extra],
        "group_step": info.group_step or None,
        "version": info.version or None,
        "seconds": round(info.seconds, 3),
    }


def checkpoint_details_to_json(info: checkpoint_pb2.CheckpointInfo) -> dict[str, Words]:
    """Returns a checkpoint with its tables and files."""
    return {
        **checkpoint_to_json(info),
        "tables": [_table_to_json(table) for table in info.tables],
        "shards": [_shard_to_json(shard) for shard in info.shards],
        "extra": [{"rank": extra.rank, "file": _file_to_json(extra.file)} for extra in info.extra],
    }


def _table_to_json(table: common_pb2.TableInfo) -> dict[str, Words]:
    return {
        "name": table.spec.name,
        "spec": spec_to_json(TableSpec.from_proto(table.spec)),
        "table_step": table.table_step,
        "num_rows": table.num_rows,
        "last_options": options_to_json(table.last_options) if table.HasField("last_options") else None,
    }


def _shard_to_json(shard: checkpoint_pb2.CheckpointShard) -> dict[str, Words]:
    return {
        "shard": shard.index,
        "host_name": shard.host_name,
        "folder": shard.folder,
        "change_number": str(shard.change_number),
        "files": [_file_to_json(file) for file in shard.files],
    }


def _file_to_json(file: checkpoint_pb2.CheckpointFile) -> dict[str, Words]:
    return {"name": file.name, "size_bytes": file.size_bytes, "xxh3": file.xxh3, "num_rows": file.num_rows}


def job_words(job: job_pb2.Job) -> str:
    """Says in one line how a job is, without a line break."""
    subject = f"{kind_word(job)} {job.checkpoint}".rstrip()
    match job_state(job):
        case "done":
            return f"{subject}: done in {seconds_words(job.seconds)}"
        case "failed":
            return f"{subject}: failed ({job.reason or 'INTERNAL'}): {job.problem}"
        case state:
            parts = [f"{subject}: {state}", progress_words(job), job.phase]
            tried = f"attempt {job.attempts}: {job.problem}" if job.problem else ""
            return ", ".join(part for part in (*parts, tried) if part)


def progress_words(job: job_pb2.Job) -> str:
    """Says how many bytes are done; empty before there are any."""
    if not job.total_bytes:
        return bytes_words(job.done_bytes) if job.done_bytes else ""
    share = min(100 * job.done_bytes // job.total_bytes, 100)
    return f"{bytes_words(job.done_bytes)} of {bytes_words(job.total_bytes)} ({share} %)"


def report_lines(report: job_pb2.RestoreReport, before: Mapping[str, common_pb2.AdamOptions]) -> list[str]:
    """Says what a restore did, a line for each table, then what it means for the learning rate.

    Args:
        report: the restore's.
        before: hyper-parameters of the last push to each table before the restore.
    """
    lines = [f"timeline {report.timeline}, from {report.num_shards} shards' files, {bytes_words(report.size_bytes)} read"]
    lines += [f"  {table.table}: {_outcome_words(table)}" for table in report.tables]
    loaded = [table for table in report.tables if table.outcome == job_pb2.TABLE_OUTCOME_LOADED]
    rates = [_rate_words(table, before.get(table.table)) for table in loaded]
    return [*lines, *(f"  {words}" for words in rates if words), LR_RULE]


def _outcome_words(table: job_pb2.TableReport) -> str:
    word = OUTCOMES.get(table.outcome, "unknown")
    if table.outcome == job_pb2.TABLE_OUTCOME_KEPT:
        return f"{word} as it was"
    if table.outcome == job_pb2.TABLE_OUTCOME_SKIPPED:
        return f"{word}, it is in the checkpoint and was not loaded"
    words = [f"{word}, {table.num_rows} rows"]
    words.append("moments and steps begin anew" if table.moments_reset else f"step {table.table_step}")
    words += ["new in this cluster"] if table.created else []
    words += ["read-only"] if table.read_only else []
    return ", ".join(words)


def _rate_words(table: job_pb2.TableReport, before: common_pb2.AdamOptions | None) -> str:
    if not table.HasField("last_options"):
        return ""
    now = "" if before is None else f", {spelled(before.lr)} in the last push before this restore"
    return f"{table.table}: lr {spelled(table.last_options.lr)} in the checkpoint{now}; active: the next push's own"


def timestamp(unix_s: float) -> str:
    """Returns a time in UTC as ISO 8601 writes it, to the second."""
    return datetime.datetime.fromtimestamp(int(unix_s), datetime.UTC).isoformat().replace("+00:00", "Z")
