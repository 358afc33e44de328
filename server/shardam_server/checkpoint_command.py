"""`shardam checkpoint ACTION`: makes, lists, verifies, restores and deletes checkpoints, all of them through home."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence

from shardam_proto.errors import InvalidArgument, ShardamError
from shardam_proto.v1 import checkpoint_pb2, common_pb2, job_pb2, table_pb2
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.checkpoint_settings import (
    CheckpointCreateSettings,
    CheckpointDeleteSettings,
    CheckpointRestoreSettings,
    CheckpointSettings,
    CheckpointVerifySettings,
)
from shardam_server.checkpoint_tables import checkpoint_lines, job_lines, list_lines
from shardam_server.checkpoint_words import (
    checkpoint_details_to_json,
    checkpoint_to_json,
    job_to_json,
    job_words,
    report_lines,
    timestamp,
)
from shardam_server.cluster_calls import HOME, REQUEST_ID, open_calls
from shardam_server.command_errors import CommandError, UsageError
from shardam_server.confirming import confirm
from shardam_server.flags import parse_named, parse_settings
from shardam_server.job_progress import check_done, follow, make_progress
from shardam_server.subcommands import Action, dispatch
from shardam_server.terminal_text import bytes_words, seconds_words

LATEST = "latest"

REQUEST_KEY_BYTES = 16
"""Of the key that makes a repeated CreateCheckpoint the same one."""


def run_checkpoint(arguments: Sequence[str]) -> int:
    """Runs an action; returns its exit status.

    Raises:
        UsageError: there is no such action, or a flag is wrong.
        CommandError: it failed, or home refused what was asked.
        ShardamError: home did not answer, or is not ready.
    """
    try:
        return dispatch("checkpoint", ACTIONS, arguments)
    except InvalidArgument as error:  # flags are checked before; home refuses because of what it has
        raise CommandError(error.message) from error


def _create(arguments: list[str]) -> int:
    settings = parse_settings("checkpoint create", CheckpointCreateSettings, arguments, ACTIONS["create"].about)
    with open_calls(settings, settings.shard_timeout_s) as calls:
        request = checkpoint_pb2.CreateCheckpointRequest(
            request_key=secrets.token_bytes(REQUEST_KEY_BYTES), name=settings.name or ""
        )
        request.header.budget_s = settings.shard_timeout_s
        job = calls.call(HOME, lambda stubs: stubs.checkpoints.CreateCheckpoint, request, REQUEST_ID).job
        if settings.wait:
            job = follow(calls, job, make_progress())
        _show_job(settings, job)
        check_done(job)
        if not settings.as_json:
            written = f"{bytes_words(job.done_bytes)} in {seconds_words(job.seconds)}" if settings.wait else "being written"
            sys.stdout.write(f"checkpoint {job.checkpoint}: {written}\n")
    return 0


def _list(arguments: list[str]) -> int:
    settings = parse_settings("checkpoint list", CheckpointSettings, arguments, ACTIONS["list"].about)
    with open_calls(settings, settings.shard_timeout_s) as calls:
        request = checkpoint_pb2.ListCheckpointsRequest()
        answer = calls.call(HOME, lambda stubs: stubs.checkpoints.ListCheckpoints, request, REQUEST_ID)
    if settings.as_json:
        _print_json({"root": answer.root, "checkpoints": [checkpoint_to_json(info) for info in answer.checkpoints]})
    else:
        _print_lines(list_lines(answer))
    return 0


def _show(arguments: list[str]) -> int:
    settings, name = parse_named("checkpoint show", CheckpointSettings, arguments, ACTIONS["show"].about, "NAME")
    with open_calls(settings, settings.shard_timeout_s) as calls:
        info = _find(calls, name)
    if settings.as_json:
        _print_json(checkpoint_details_to_json(info))
    else:
        _print_lines(checkpoint_lines(info))
    return 0


def _verify(arguments: list[str]) -> int:
    settings, name = parse_named("checkpoint verify", CheckpointVerifySettings, arguments, ACTIONS["verify"].about, "NAME")
    with open_calls(settings, settings.shard_timeout_s) as calls:
        request = checkpoint_pb2.VerifyCheckpointRequest(name=name)
        job = calls.call(HOME, lambda stubs: stubs.checkpoints.VerifyCheckpoint, request, REQUEST_ID).job
        if settings.wait:
            job = follow(calls, job, make_progress())
    _show_job(settings, job)
    check_done(job)
    if not settings.as_json:
        read = f"all files are as written ({bytes_words(job.done_bytes)} read)" if settings.wait else "being verified"
        sys.stdout.write(f"checkpoint {job.checkpoint}: {read}\n")
    return 0


def _restore(arguments: list[str]) -> int:
    settings, name = parse_named("checkpoint restore", CheckpointRestoreSettings, arguments, ACTIONS["restore"].about, "NAME")
    with open_calls(settings, settings.shard_timeout_s) as calls:
        info = _find(calls, name)
        present = _tables(calls)
        confirm(_loss(settings, info, present), yes=settings.yes)
        request = checkpoint_pb2.RestoreCheckpointRequest(
            name=info.name if name == LATEST else name, options=_options(settings)
        )  # "latest" could be another one by now than the one that was confirmed
        job = calls.call(HOME, lambda stubs: stubs.checkpoints.RestoreCheckpoint, request, REQUEST_ID).job
        if settings.wait:
            job = follow(calls, job, make_progress())
    _show_job(settings, job)
    check_done(job)
    if not settings.as_json:
        if job.HasField("report"):
            before = {table: each.last_options for table, each in present.items() if each.HasField("last_options")}
            _print_lines([f"restored checkpoint {job.checkpoint}", *report_lines(job.report, before)])
        else:
            sys.stdout.write(f"checkpoint {job.checkpoint} is being restored\n")
    return 0


def _delete(arguments: list[str]) -> int:
    settings, name = parse_named("checkpoint delete", CheckpointDeleteSettings, arguments, ACTIONS["delete"].about, "NAME")
    if name == LATEST:
        raise UsageError(f"{LATEST!r} names another checkpoint after each one that is made: delete one by its own name")
    with open_calls(settings, settings.shard_timeout_s) as calls:
        confirm(f"checkpoint {name} is deleted for good", yes=settings.yes)
        request = checkpoint_pb2.DeleteCheckpointRequest(name=name)
        calls.call(HOME, lambda stubs: stubs.checkpoints.DeleteCheckpoint, request, REQUEST_ID)
    if settings.as_json:
        _print_json({"deleted": name})
    else:
        sys.stdout.write(f"deleted checkpoint {name}\n")
    return 0


def _jobs(arguments: list[str]) -> int:
    settings = parse_settings("checkpoint jobs", CheckpointSettings, arguments, ACTIONS["jobs"].about)
    with open_calls(settings, settings.shard_timeout_s) as calls:
        request = checkpoint_pb2.ListJobsRequest()
        jobs = calls.call(HOME, lambda stubs: stubs.checkpoints.ListJobs, request, REQUEST_ID).jobs
    if settings.as_json:
        _print_json({"jobs": [job_to_json(job) for job in jobs]})
    else:
        _print_lines(job_lines(jobs))
    return 0


def _find(calls: ShardCalls, name: str) -> checkpoint_pb2.CheckpointInfo:
    request = checkpoint_pb2.GetCheckpointRequest(name=name)
    return calls.call(HOME, lambda stubs: stubs.checkpoints.GetCheckpoint, request, REQUEST_ID).checkpoint


def _tables(calls: ShardCalls) -> dict[str, common_pb2.TableInfo]:
    """Returns the cluster's tables as home has them; none if it serves none now, as when it is LOST and to be restored."""
    tables: dict[str, common_pb2.TableInfo] = {}
    after = ""
    try:
        while True:
            request = table_pb2.ListTablesRequest(after_name=after)
            answer = calls.call(HOME, lambda stubs: stubs.tables.ListTables, request, REQUEST_ID)
            tables |= {info.spec.name: info for info in answer.tables}
            after = answer.next_after_name
            if not after:
                return tables
    except ShardamError:
        return tables


def _options(settings: CheckpointRestoreSettings) -> checkpoint_pb2.RestoreOptions:
    return checkpoint_pb2.RestoreOptions(
        allow_missing_tables=settings.allow_missing_tables,
        allow_unexpected_tables=settings.allow_unexpected_tables,
        weights_only=settings.weights_only,
        read_only=settings.read_only,
        tables=settings.table_names,
        accept_arithmetic_change=settings.accept_arithmetic_change,
    )


def _loss(
    settings: CheckpointRestoreSettings, info: checkpoint_pb2.CheckpointInfo, present: Mapping[str, common_pb2.TableInfo]
) -> str:
    """Says what a restore replaces."""
    saved = {table.spec.name for table in info.tables}
    loaded = saved & set(settings.table_names) if settings.table_names else saved
    replaced = sorted(loaded & present.keys())
    what = f"the rows of {', '.join(replaced)} on all shards are replaced" if replaced else "no table is replaced"
    return (
        f"{what} by checkpoint {info.name} of {timestamp(info.created_unix_s)}; programs that are connected now raise "
        "ClusterRestored and have to be started again"
    )


def _show_job(settings: CheckpointSettings, job: job_pb2.Job) -> None:
    if settings.as_json:
        _print_json(job_to_json(job))
    elif job.state == job_pb2.JOB_STATE_WAITING:
        sys.stdout.write(f"{job_words(job)}\n")


def _print_json(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")


def _print_lines(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


ACTIONS: dict[str, Action] = {
    "create": Action(
        "Makes a checkpoint: one state of all shards, while training goes on.", "create --name before-tuning", _create
    ),
    "list": Action("Lists the cluster's checkpoints, the newest first.", "list", _list),
    "show": Action("Shows a checkpoint: its tables, files, and what trainers added. NAME may be latest.", "show latest", _show),
    "verify": Action("Reads all files of a checkpoint and compares them with its manifest.", "verify latest", _verify),
    "restore": Action("Replaces the state of all shards by a checkpoint's, on a new timeline.", "restore latest", _restore),
    "delete": Action("Deletes a checkpoint.", "delete before-tuning --yes", _delete),
    "jobs": Action("Lists what home does in the background, and how it ended.", "jobs", _jobs),
}
"""Actions by name, in the order of the help."""
