"""Checkpoints and jobs over REST: what home says comes through, with home's reasons."""

from __future__ import annotations

import httpx2
import pytest
from fastapi.testclient import TestClient
from shardam_testing.fake_shards import FakeCluster
from shardam_testing.scripted_checkpoints import ROOT, ScriptedCheckpoints, broken_checkpoint, checkpoint, fail, finish

from shardam_proto.errors import BadOption, CheckpointRunning
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, job_pb2
from shardam_server.admin.checkpoint_models import (
    CheckpointDetailsModel,
    CheckpointListModel,
    ClusterModel,
    JobListModel,
    JobModel,
)

OPTIONS = common_pb2.AdamOptions(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, grad_scale=1)


def table() -> common_pb2.TableInfo:
    return common_pb2.TableInfo(spec=TableSpec("items", 4).to_proto(), table_step=9, num_rows=12, last_options=OPTIONS)


@pytest.fixture
def home(shards: FakeCluster) -> ScriptedCheckpoints:
    """What home of the fake shards knows: a newer and an older checkpoint, and one that is not complete."""
    script = shards.shards[0].checkpoints
    script.infos += [broken_checkpoint("torn"), checkpoint("new", table()), checkpoint("old")]
    return script


def is_problem(response: httpx2.Response, status: int, reason: str) -> bool:
    return bool(response.status_code == status and response.json()["reason"] == reason)


def test_checkpoints_are_listed_and_a_broken_one_says_why(client: TestClient, home: ScriptedCheckpoints) -> None:
    listed = CheckpointListModel.model_validate_json(client.get("/v1/checkpoints").content, extra="forbid")
    assert listed.root == ROOT
    assert [(found.name, found.complete) for found in listed.checkpoints] == [("torn", False), ("new", True), ("old", True)]
    assert listed.checkpoints[0].problem == "manifest.json is missing"
    assert listed.checkpoints[1].created == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize("name", ["new", "latest"])
def test_one_checkpoint_shows_tables_files_and_additions(client: TestClient, home: ScriptedCheckpoints, name: str) -> None:
    found = CheckpointDetailsModel.model_validate_json(client.get(f"/v1/checkpoints/{name}").content, extra="forbid")
    assert (found.name, found.tables[0].name, found.tables[0].table_step) == ("new", "items", 9)
    assert found.tables[0].last_options is not None
    assert found.tables[0].last_options.lr == 0.1
    assert found.shards[0].files[0].name == "shard-0-of-2-000.rows"
    assert found.ranks_with_extra == [0]


def test_making_one_answers_with_a_job_that_can_be_followed(client: TestClient, home: ScriptedCheckpoints) -> None:
    response = client.post("/v1/checkpoints", json={"name": "mine"})
    job = JobModel.model_validate_json(response.content, extra="forbid")
    assert response.status_code == 202
    assert response.headers["Location"] == f"/v1/jobs/{job.id}"
    assert (job.kind, job.state, job.checkpoint, job.seconds) == ("create", "running", "mine", None)
    home.on_get_job = finish
    assert client.get(response.headers["Location"]).json()["state"] == "done"
    assert len(JobListModel.model_validate_json(client.get("/v1/jobs").content, extra="forbid").jobs) == 1


def test_a_body_may_be_left_out_and_home_makes_the_name(client: TestClient, home: ScriptedCheckpoints) -> None:
    assert client.post("/v1/checkpoints").status_code == 202
    assert home.created[0].name == ""
    assert len(home.created[0].request_key) == 16


def test_a_repeat_with_the_same_key_is_the_same_request_to_home(client: TestClient, home: ScriptedCheckpoints) -> None:
    for key in ("a", "a", "b"):
        client.post("/v1/checkpoints", headers={"Idempotency-Key": key})
    client.post("/v1/checkpoints")
    keys = [request.request_key for request in home.created]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_options_of_a_restore_reach_home_and_its_report_comes_back(client: TestClient, home: ScriptedCheckpoints) -> None:
    body = {"weights_only": True, "tables": ["items"], "allow_missing_tables": True}
    response = client.post("/v1/checkpoints/new:restore", json=body)
    assert response.status_code == 202
    options = home.restored[0].options
    assert (options.weights_only, list(options.tables), options.allow_missing_tables) == (True, ["items"], True)
    assert (options.read_only, options.allow_unexpected_tables, home.restored[0].name) == (False, False, "new")

    def report(job: job_pb2.Job) -> None:
        finish(job)
        loaded = job_pb2.TableReport(
            table="items", outcome=job_pb2.TABLE_OUTCOME_LOADED, num_rows=12, moments_reset=True, last_options=OPTIONS
        )
        job.report.CopyFrom(job_pb2.RestoreReport(name="new", timeline=2, num_shards=2, tables=[loaded]))

    home.on_get_job = report
    job = JobModel.model_validate_json(client.get(response.headers["Location"]).content, extra="forbid")
    assert job.report is not None
    assert (job.report.timeline, job.report.tables[0].outcome, job.report.tables[0].moments_reset) == (2, "loaded", True)
    assert "active" in job.report.options_rule


def test_a_failed_job_keeps_home_s_reason(client: TestClient, home: ScriptedCheckpoints) -> None:
    response = client.post("/v1/checkpoints/new:verify")
    home.on_get_job = lambda job: fail(job, "CHECKPOINT_DAMAGED", "shard-0-of-2-000.rows has 3 of 4096 bytes")
    job = client.get(response.headers["Location"]).json()
    assert (job["state"], job["reason"]) == ("failed", "CHECKPOINT_DAMAGED")
    assert "3 of 4096 bytes" in job["problem"]


def test_deleting_one_names_it_and_a_second_time_it_is_unknown(client: TestClient, home: ScriptedCheckpoints) -> None:
    assert client.delete("/v1/checkpoints/old").json() == {"deleted": "old"}
    assert is_problem(client.delete("/v1/checkpoints/old"), 404, "UNKNOWN_CHECKPOINT")
    assert home.deleted == ["old"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointRunning("a checkpoint (x, 3 % done) runs; try again once it has ended"), 409),
        (BadOption("'x' leads outside the root folder /srv (--checkpoint-dir)"), 400),
    ],
)
def test_what_home_refuses_is_a_problem_with_its_reason(
    client: TestClient, home: ScriptedCheckpoints, error: CheckpointRunning | BadOption, status: int
) -> None:
    home.fail_with = error
    for response in (
        client.post("/v1/checkpoints"),
        client.get("/v1/checkpoints/x"),
        client.post("/v1/checkpoints/x:restore"),
        client.get("/v1/jobs/x"),
    ):
        assert is_problem(response, status, error.reason)
        assert response.json()["detail"] == error.message


@pytest.mark.case("C081")
def test_a_path_in_a_name_is_refused_before_home_is_asked(client: TestClient, home: ScriptedCheckpoints) -> None:
    for path in ("..%2F..%2Fetc", "%2Fetc"):
        assert is_problem(client.post(f"/v1/checkpoints/{path}:restore"), 400, "BAD_OPTION")
        assert is_problem(client.get(f"/v1/checkpoints/{path}"), 400, "BAD_OPTION")
    assert home.restored == []


def test_an_unknown_option_is_refused_with_the_known_ones(client: TestClient, home: ScriptedCheckpoints) -> None:
    response = client.post("/v1/checkpoints/new:restore", json={"moments": False})
    assert is_problem(response, 422, "BAD_OPTION")
    assert "weights_only" in response.json()["detail"]
    assert home.restored == []


def test_the_cluster_shows_the_last_checkpoint_and_what_home_does(
    client: TestClient, shards: FakeCluster, home: ScriptedCheckpoints
) -> None:
    status = shards.shards[0].status
    status.checkpoint_root = ROOT
    fail(status.last_checkpoint, "CHECKPOINT_FAILED", "no space left in /srv/checkpoints")
    running = home.begin(job_pb2.JOB_KIND_CREATE, "next")
    cluster = ClusterModel.model_validate_json(client.get("/v1/cluster").content, extra="forbid")
    assert cluster.ready, "a checkpoint that failed stops nobody"
    assert cluster.last_checkpoint is not None
    assert (cluster.last_checkpoint.state, cluster.last_checkpoint.reason) == ("failed", "CHECKPOINT_FAILED")
    assert cluster.jobs is not None
    assert [(job.id, job.done_bytes) for job in cluster.jobs] == [(running.id, 2**20)]
    assert cluster.warnings == [
        "shard 0 could not make the last checkpoint (CHECKPOINT_FAILED): no space left in /srv/checkpoints"
    ]


def test_a_folder_that_cannot_be_written_is_a_warning_of_its_shard(client: TestClient, shards: FakeCluster) -> None:
    shards.shards[2].status.checkpoint_problem = "/srv/checkpoints is read-only: mount it for writing"
    shard = client.get("/v1/shards/2").json()
    assert shard["warning"] == "shard 2 cannot write checkpoints: /srv/checkpoints is read-only: mount it for writing"
    assert shard["checkpoint_problem"] == "/srv/checkpoints is read-only: mount it for writing"
