"""Checkpoints and tables' files through REST and the command line, against real shards: what was saved comes back."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pickle
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from shardam_testing.admin import RawCluster, raw_cluster, running_admin
from shardam_testing.processes import Shards, running_shards
from shardam_testing.waiting import wait_for

from shardam_proto.schema import TableSpec
from shardam_server.__main__ import main

IDS = [-7, 0, 1, 2, 5, 99, 2**53 + 1]


@dataclasses.dataclass
class Fronts:
    """A cluster of two shards with a folder for checkpoints, and its fronts."""

    shards: Shards
    rest: httpx2.Client
    grpc: RawCluster
    root: Path

    def rows(self, table: str) -> object:
        body = {"ids": [str(row_id) for row_id in IDS], "include": "optimizer"}
        answer = self.rest.post(f"/v1/tables/{table}/rows:batchGet", json=body)
        assert answer.status_code == 200, answer.text
        columns = ("id", "found", "weight", "optimizer")
        return [{name: row[name] for name in columns} for row in answer.json()["rows"]]

    def fill(self, table: str, step_mode: str = "table") -> None:
        """Makes a table and pushes three steps to it."""
        created = self.rest.post("/v1/tables", json={"name": table, "dim": 4, "step": step_mode})
        assert created.status_code == 200, created.text
        self.push(table, 3)

    def push(self, table: str, steps: int) -> None:
        """Pushes as a client that connects now, as programs do after a restore."""
        with raw_cluster(self.shards.view()) as grpc:
            info = grpc.create(TableSpec.from_proto(grpc.clients[0].info(table).spec))
            for step in range(steps):
                grpc.push(info, IDS, [[0.25 + step] * 4] * len(IDS))

    def follow(self, response: httpx2.Response) -> dict[str, object]:
        """Waits until the job of an answer has ended."""
        assert response.status_code == 202, response.text

        def ended() -> dict[str, object] | None:
            job = self.rest.get(response.headers["Location"])
            return job.json() if job.status_code == 200 and job.json()["state"] in ("done", "failed") else None

        return wait_for("the job to end", ended, 120)

    def shardam(self, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
        assert main([*arguments, "--redis", self.shards.valkey.url, "--cluster", "test"]) == status
        out, err = capsys.readouterr()
        return out if status == 0 else err


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("fronts")
    root = folder / "checkpoints"
    with (
        running_shards(folder, 2, data_dir=str(folder / "data"), checkpoint_dir=str(root)) as shards,
        running_admin(shards.valkey.url, folder, shard_timeout_s="30") as admin,
        raw_cluster(shards.view()) as grpc,
        admin.client() as rest,
    ):
        yield Fronts(shards, rest, grpc, root)


def name() -> str:
    return f"c-{secrets.token_hex(4)}"


@pytest.fixture
def table(fronts: Fronts) -> str:
    """A table that was pushed to, of this test alone."""
    made = f"t-{secrets.token_hex(4)}"
    fronts.fill(made)
    return made


def test_a_checkpoint_made_over_rest_is_restored_from_the_command_line(
    fronts: Fronts, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = name()
    job = fronts.follow(fronts.rest.post("/v1/checkpoints", json={"name": made}))
    assert (job["state"], job["checkpoint"]) == ("done", made)
    before = fronts.rows(table)
    fronts.push(table, 2)
    assert fronts.rows(table) != before
    assert "all files are as written" in fronts.shardam(capsys, "checkpoint", "verify", made)
    text = fronts.shardam(capsys, "checkpoint", "restore", made, "--yes")
    assert f"{table}: loaded, {len(IDS)} rows, step 3" in text
    assert f"{table}: lr 0.5 in the checkpoint" in text or "active: the next push's own" in text
    wait_for("rows to be read again", lambda: fronts.rest.get("/readyz").status_code == 200, 60)
    assert fronts.rows(table) == before
    shown = fronts.rest.get(f"/v1/checkpoints/{made}").json()
    assert [entry["table_step"] for entry in shown["tables"] if entry["name"] == table] == [3]
    assert made in fronts.shardam(capsys, "checkpoint", "list")
    assert fronts.rest.get("/v1/cluster").json()["last_checkpoint"]["checkpoint"] == made
    assert f"last checkpoint {made}" in fronts.shardam(capsys, "status")


def test_a_table_that_the_checkpoint_lacks_is_a_reason_to_refuse_and_named(fronts: Fronts, table: str) -> None:
    made = name()
    fronts.follow(fronts.rest.post("/v1/checkpoints", json={"name": made}))
    other = f"t-{secrets.token_hex(4)}"
    fronts.fill(other)
    before = fronts.rows(other)
    job = fronts.follow(fronts.rest.post(f"/v1/checkpoints/{made}:restore"))
    assert (job["state"], job["reason"]) == ("failed", "CHECKPOINT_MISMATCH")
    assert other in str(job["problem"])
    assert fronts.rows(other) == before, "what fails before the decision changes nothing"


@pytest.mark.case("C082")
def test_a_checkpoint_that_lacks_a_file_is_listed_as_not_complete_with_the_file(
    fronts: Fronts, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fronts.shardam(capsys, "checkpoint", "create", "--name", "short")
    file = fronts.root / "test" / "short" / "shard-1-of-2-000.rows"
    file.unlink()
    assert f"not complete: {file} is damaged: it is missing" in fronts.shardam(capsys, "checkpoint", "list")
    assert f"not complete: {file} is damaged: it is missing" in fronts.shardam(capsys, "checkpoint", "show", "short")
    fronts.shardam(capsys, "checkpoint", "delete", "short", "--yes")


def test_two_requests_at_once_both_lead_to_a_full_set(fronts: Fronts, table: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: fronts.rest.post("/v1/checkpoints"), range(2)))
    reasons = [answer.json()["reason"] for answer in answers if answer.status_code != 202]
    assert reasons in ([], ["CHECKPOINT_RUNNING"])
    for answer in answers:
        if answer.status_code == 202:
            job = fronts.follow(answer)
            shown = fronts.rest.get(f"/v1/checkpoints/{job['checkpoint']}").json()
            assert (shown["complete"], [shard["shard"] for shard in shown["shards"]]) == (True, [0, 1])


class _Payload:
    """What a pickle would run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, (str(self.trace), "w"))  # type: ignore[return-value]


@pytest.mark.case("C081")
def test_a_pickle_in_the_folder_is_never_run_and_a_path_outside_is_400(fronts: Fronts, tmp_path: Path) -> None:
    planted = fronts.root / "test" / "planted"
    planted.mkdir(parents=True)
    trace = tmp_path / "ran"
    (planted / "manifest.json").write_bytes(pickle.dumps(_Payload(trace)))
    (planted / "shard-0-of-1-000.rows").write_bytes(pickle.dumps(_Payload(trace)))
    for answer in (fronts.rest.get("/v1/checkpoints/planted"), fronts.rest.post("/v1/checkpoints/planted:verify")):
        if answer.status_code == 202:
            job = fronts.follow(answer)
            assert job["state"] == "failed"
        else:
            assert 400 <= answer.status_code < 500
    job = fronts.follow(fronts.rest.post("/v1/checkpoints/planted:restore"))
    assert job["state"] == "failed"
    assert not trace.exists()
    for path in ("..%2F..%2Fetc", "%2e%2e", ".."):
        answer = fronts.rest.post(f"/v1/checkpoints/{path}:restore")
        if answer.status_code == 202:
            job = fronts.follow(answer)
            assert (job["state"], job["reason"]) == ("failed", "BAD_OPTION")
        else:
            assert answer.status_code in (400, 404, 405)
    assert fronts.rest.get("/v1/checkpoints/..%2F..%2Fetc").status_code == 400
    listed = {info["name"]: info for info in fronts.rest.get("/v1/checkpoints").json()["checkpoints"]}
    assert not listed["planted"]["complete"]


@pytest.mark.parametrize("form", ["safetensors", "npz"])
@pytest.mark.parametrize("step_mode", ["table", "row"])
def test_a_table_sent_as_a_file_comes_back_bit_for_bit_under_another_name(fronts: Fronts, form: str, step_mode: str) -> None:
    source, copy = f"t-{secrets.token_hex(4)}", f"t-{secrets.token_hex(4)}"
    fronts.fill(source, step_mode)
    exported = fronts.rest.get(f"/v1/tables/{source}:export", params={"format": form})
    assert exported.status_code == 200
    assert exported.headers["X-One-Moment"] == "true"
    imported = fronts.rest.post(f"/v1/tables/{copy}:import", params={"format": form}, content=exported.content)
    assert imported.status_code == 200, imported.text
    assert (imported.json()["created"], imported.json()["num_rows"], imported.json()["table_step"]) == (True, len(IDS), 3)
    assert fronts.rows(copy) == fronts.rows(source)
    for each in (source, copy):
        fronts.push(each, 1)
    assert fronts.rows(copy) == fronts.rows(source), "the next step has the same t and the same moments"


def test_an_import_over_a_table_needs_overwrite_and_then_leaves_the_files_rows_alone(
    fronts: Fronts, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.safetensors"
    said = json.loads(fronts.shardam(capsys, "table", "export", table, "--out", str(path), "--json"))
    assert (said["num_rows"], said["table_step"], said["one_moment"]) == (len(IDS), 3, True)
    before = fronts.rows(table)
    assert fronts.rest.put(f"/v1/tables/{table}/rows/12345", json={"weight": [1, 2, 3, 4]}).status_code == 200
    assert "import with overwrite" in fronts.shardam(capsys, "table", "import", str(path), status=1)
    text = fronts.shardam(capsys, "table", "import", str(path), "--overwrite")
    assert f"table {table}: {len(IDS)} rows written, 1 others deleted, step 3" in text
    assert fronts.rows(table) == before
    assert fronts.rest.get(f"/v1/tables/{table}/rows/12345").status_code == 404
    fronts.push(table, 1)
    assert "has taken 4 steps and the file has step 3" in fronts.shardam(
        capsys, "table", "import", str(path), "--overwrite", status=1
    )
    assert "moments begin anew" in fronts.shardam(capsys, "table", "import", str(path), "--overwrite", "--weights-only")
    assert table in fronts.shardam(capsys, "table", "list")
