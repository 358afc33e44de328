"""`shardam checkpoint` says what home says, asks before it replaces or deletes, and ends with 1 and the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator

import pytest
from shardam_testing.fake_shards import FakeCluster, running_fake_shards
from shardam_testing.processes import running_valkey
from shardam_testing.scripted_checkpoints import ROOT, ScriptedCheckpoints, broken_checkpoint, checkpoint, fail, finish

from shardam_proto.errors import BadOption, CheckpointRunning
from shardam_proto.registry import connect_redis
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, job_pb2
from shardam_server.__main__ import main
from shardam_server.flags import parse_settings
from shardam_server.settings import StatusSettings
from shardam_server.status import read_report, report_as_json, report_as_text


@dataclasses.dataclass
class Shell:
    """Runs commands against a cluster whose home a test scripts."""

    shards: FakeCluster
    url: str
    capture: pytest.CaptureFixture[str]
    home: ScriptedCheckpoints

    def run(self, *arguments: str, status: int = 0) -> str:
        """Returns what a command prints: its output, or the reason why it failed."""
        assert main(["checkpoint", *arguments]) == status
        out, err = self.capture.readouterr()
        assert (err == "") == (status == 0), err
        return out if status == 0 else err

    def report(self) -> StatusSettings:
        return parse_settings("status", StatusSettings, ["--redis", self.url, "--cluster", "test"], "")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_valkey() as valkey:
        yield valkey.url


@pytest.fixture
def shell(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    with running_fake_shards(2) as shards, contextlib.closing(connect_redis(redis_url)) as connection:
        shards.register(connection)
        monkeypatch.setenv("SHARDAM_REDIS_URL", redis_url)
        monkeypatch.setenv("SHARDAM_CLUSTER", "test")
        home = shards.shards[0].checkpoints
        home.on_get_job = finish
        home.infos += [broken_checkpoint("torn"), checkpoint("new", table("items")), checkpoint("old")]
        yield Shell(shards, redis_url, capsys, home)


def table(name: str, lr: float = 0.1) -> common_pb2.TableInfo:
    options = common_pb2.AdamOptions(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, grad_scale=1)
    return common_pb2.TableInfo(spec=TableSpec(name, 4).to_proto(), table_step=9, num_rows=12, last_options=options)


def test_create_waits_until_all_is_written_and_names_it(shell: Shell) -> None:
    assert shell.run("create", "--name", "mine") == "checkpoint mine: 4.0 MiB in 2.5s\n"
    assert len(shell.home.created[0].request_key) == 16
    assert shell.home.created[0].header.budget_s == 60
    assert shell.run("create", "--no-wait") == "checkpoint 20300101T000000-0001: being written\n"


def test_create_that_fails_ends_with_1_and_the_reason(shell: Shell) -> None:
    shell.home.on_get_job = lambda job: fail(job, "CHECKPOINT_FAILED", "no space left in /srv; make room")
    text = shell.run("create", "--name", "mine", status=1)
    assert text == "shardam: create of checkpoint 'mine' failed (CHECKPOINT_FAILED): no space left in /srv; make room\n"
    assert main(["checkpoint", "create", "--json"]) == 1
    assert json.loads(shell.capture.readouterr().out)["reason"] == "CHECKPOINT_FAILED"


def test_list_shows_the_newest_first_and_why_one_is_not_complete(shell: Shell) -> None:
    lines = shell.run("list").splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["torn", "new", "old"]
    assert "not complete: manifest.json is missing" in lines[1]
    assert lines[-1] == f"in {ROOT}"
    assert [info["name"] for info in json.loads(shell.run("list", "--json"))["checkpoints"]] == ["torn", "new", "old"]
    shell.home.infos.clear()
    assert shell.run("list") == f"no checkpoints in {ROOT}: `shardam checkpoint create` makes one\n"


def test_show_names_tables_files_hosts_and_additions(shell: Shell) -> None:
    text = shell.run("show", "latest")
    for part in ("checkpoint new", "items", "0.1", "shard-0-of-2-000.rows", "on host host-0", "rank 0 added"):
        assert part in text
    assert json.loads(shell.run("show", "--json", "new"))["tables"][0]["table_step"] == 9


def test_verify_says_that_all_is_as_written_or_which_file_is_not(shell: Shell) -> None:
    assert shell.run("verify", "new") == "checkpoint new: all files are as written (4.0 MiB read)\n"
    shell.home.on_get_job = lambda job: fail(job, "CHECKPOINT_DAMAGED", "shard-0-of-2-000.rows has 3 of 4096 bytes")
    assert "(CHECKPOINT_DAMAGED): shard-0-of-2-000.rows has 3 of 4096 bytes" in shell.run("verify", "new", status=1)


@pytest.mark.case("C017")
def test_restore_says_what_it_did_and_which_lr_is_active(shell: Shell) -> None:
    for shard in shell.shards.shards:
        shard.tables["items"] = table("items", lr=0.01)

    def report(job: job_pb2.Job) -> None:
        finish(job)
        loaded = job_pb2.TableReport(
            table="items",
            outcome=job_pb2.TABLE_OUTCOME_LOADED,
            num_rows=12,
            table_step=9,
            last_options=table("items").last_options,
        )
        kept = job_pb2.TableReport(table="other", outcome=job_pb2.TABLE_OUTCOME_KEPT)
        skipped = job_pb2.TableReport(table="third", outcome=job_pb2.TABLE_OUTCOME_SKIPPED)
        reset = job_pb2.TableReport(table="w", outcome=job_pb2.TABLE_OUTCOME_LOADED, moments_reset=True, created=True)
        job.report.CopyFrom(job_pb2.RestoreReport(name="new", timeline=2, num_shards=2, tables=[loaded, kept, skipped, reset]))

    shell.home.on_get_job = report
    text = shell.run("restore", "latest", "--yes", "--tables", "items", "--allow-missing-tables")
    assert (shell.home.restored[0].name, list(shell.home.restored[0].options.tables)) == ("new", ["items"])
    assert "items: loaded, 12 rows, step 9" in text
    assert "other: kept as it was" in text
    assert "third: skipped" in text
    assert "w: loaded, 0 rows, moments and steps begin anew, new in this cluster" in text
    assert "items: lr 0.1 in the checkpoint, 0.01 in the last push before this restore; active: the next push's own" in text
    assert "hyper-parameters are not restored" in text


def test_restore_without_a_terminal_needs_yes_and_says_what_is_replaced(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in shell.shards.shards:
        shard.tables["items"] = table("items")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    text = shell.run("restore", "new", status=1)
    assert "the rows of items on all shards are replaced by checkpoint new of 2027-01-15T08:00:00Z" in text
    assert "give --yes" in text
    assert shell.home.restored == []


def test_a_restore_that_home_refuses_leaves_the_reason(shell: Shell) -> None:
    shell.home.on_get_job = lambda job: fail(job, "CHECKPOINT_MISMATCH", "missing: a; unexpected: b")
    assert "restore of checkpoint 'new' failed (CHECKPOINT_MISMATCH): missing: a" in shell.run(
        "restore", "new", "--yes", status=1
    )


def test_delete_asks_and_takes_no_latest(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "checkpoint old is deleted for good: give --yes" in shell.run("delete", "old", status=1)
    assert "latest" in shell.run("delete", "latest", "--yes", status=2)
    assert shell.home.deleted == []
    assert shell.run("delete", "--yes", "old") == "deleted checkpoint old\n"
    assert "there is no checkpoint 'old'" in shell.run("delete", "old", "--yes", status=1)


def test_jobs_shows_how_far_each_is(shell: Shell) -> None:
    assert shell.run("jobs") == "no jobs since home was started\n"
    shell.home.begin(job_pb2.JOB_KIND_CREATE, "mine")
    assert "1.0 MiB of 4.0 MiB (25 %)" in shell.run("jobs")
    assert json.loads(shell.run("jobs", "--json"))["jobs"][0]["state"] == "running"


@pytest.mark.parametrize("error", [CheckpointRunning("a checkpoint runs"), BadOption("no folder: --checkpoint-dir")])
def test_what_home_refuses_ends_with_1(shell: Shell, error: CheckpointRunning | BadOption) -> None:
    shell.home.fail_with = error
    for arguments in (("create",), ("list",), ("verify", "x"), ("jobs",)):
        assert shell.run(*arguments, status=1) == f"shardam: {error.message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "the following arguments are required: NAME; see shardam checkpoint show --help"),
        (["show", "a", "b"], "unexpected argument 'b'; `shardam checkpoint show` takes one NAME and flags"),
        (["creat"], "unknown action 'creat' of `shardam checkpoint` (did you mean create?)"),
        (["create", "--name", "../x"], "--name '../x': checkpoint name '../x' is not allowed"),
        (["restore", "x", "--tables", "a,,b"], "--tables 'a,,b': table name '' is not allowed"),
        (["verify", "x", "--jason"], "unknown flag --jason (did you mean --json?)"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_remedy(shell: Shell, arguments: list[str], message: str) -> None:
    assert message in shell.run(*arguments, status=2)


def test_a_cluster_that_does_not_exist_is_named(shell: Shell) -> None:
    assert "cluster 'nobody' does not exist in this Redis" in shell.run("list", "--cluster", "nobody", status=1)


def test_status_shows_the_last_checkpoint_and_running_jobs(shell: Shell) -> None:
    status = shell.shards.shards[0].status
    text = report_as_text(read_report(shell.report()))
    assert "no checkpoints: the shards have neither --data-dir nor --checkpoint-dir" in text
    status.checkpoint_root = ROOT
    assert "last checkpoint of before: new, made 2027-01-15T08:00:00Z" in report_as_text(read_report(shell.report()))
    status.last_checkpoint.CopyFrom(job_pb2.Job(checkpoint="mine", age_s=62.5, total_bytes=2**20))
    finish(status.last_checkpoint)
    shell.home.begin(job_pb2.JOB_KIND_VERIFY, "old")
    text = report_as_text(read_report(shell.report()))
    assert "last checkpoint mine, 1.0 MiB, complete for 1m 0s" in text
    assert "job j1: verify old: running, 1.0 MiB of 4.0 MiB (25 %), writes files" in text


def test_status_says_that_the_last_checkpoint_failed_and_is_ready_all_the_same(shell: Shell) -> None:
    status = shell.shards.shards[0].status
    status.checkpoint_root = ROOT
    status.last_checkpoint.age_s = 10
    fail(status.last_checkpoint, "CHECKPOINT_FAILED", "no space left")
    report = read_report(shell.report())
    assert report.problems == []
    text = report_as_text(report)
    assert "last checkpoint FAILED 7s ago (CHECKPOINT_FAILED): no space left; of before: new" in text
    assert "note: shard 0 could not make the last checkpoint (CHECKPOINT_FAILED): no space left" in text
    shown = json.loads(report_as_json(report))["checkpoints"]
    assert (shown["last"]["state"], shown["newest"]["name"], shown["jobs"]) == ("failed", "new", [])
