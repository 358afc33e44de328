"""The admin API as a process: it starts before everything else, says what is missing, serves on, and ends cleanly."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from shardam_testing.admin import raw_cluster, running_admin
from shardam_testing.processes import clean_environment, running_shards, running_valkey
from shardam_testing.waiting import wait_for

from shardam_proto.schema import TableSpec

TOKEN = "correct-horse"


def test_it_is_live_before_redis_and_becomes_ready_with_the_cluster(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        valkey.stop()
        with running_admin(valkey.url, tmp_path) as admin, admin.client() as client:
            response = client.get("/readyz")
            assert (response.status_code, response.json()["reason"]) == (503, "NOT_READY")
            assert "Redis did not answer" in response.json()["waiting_for"][0]
            response = client.get("/v1/tables")
            assert (response.status_code, response.json()["reason"]) == (503, "REDIS_UNREACHABLE")
            assert response.headers["retry-after"]
            valkey.start()
            wait_for(
                "the missing shards to be named",
                lambda: "no shard of cluster 'test'" in client.get("/readyz").json()["waiting_for"][0],
            )


def test_a_shard_that_is_away_is_shown_and_its_rows_are_never_answered_in_part(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 2) as shards,
        running_admin(shards.valkey.url, tmp_path) as admin,
        admin.client() as client,
    ):
        with raw_cluster(shards.view()) as grpc:
            table = grpc.create(TableSpec("t", 2))
            grpc.push(table, range(20), [[1.0, 2.0]] * 20)
            owners = grpc.owners(range(20))
        assert client.get("/readyz").status_code == 200
        of_shard = [[str(row_id) for row_id in range(20) if owners[row_id] == shard] for shard in (0, 1)]
        shards.processes[1].kill()

        response = client.post("/v1/tables/t/rows:batchGet", json={"ids": [of_shard[0][0], of_shard[1][0]]})
        assert response.status_code == 503
        assert response.json()["reason"] in ("SHARD_UNREACHABLE", "NOT_READY")
        assert response.headers["retry-after"]
        assert "rows" not in response.json()
        assert client.post("/v1/tables/t/rows:batchGet", json={"ids": of_shard[0]}).status_code == 200

        path = f"/v1/tables/t/rows/{of_shard[0][0]}"
        before = client.get(path)
        response = client.put(path, json={"weight": [7, 7]})  # a change needs every shard, as a push does
        assert response.status_code == 503
        assert "the row was not changed" in response.json()["detail"]
        assert client.get(path).text == before.text

        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert any("shard 1" in text for text in ready.json()["waiting_for"])
        assert client.get("/healthz").status_code == 200
        shown = client.get("/v1/tables/t").json()
        assert (shown["num_rows"], shown["missing_shards"]) == (None, [1])
        wait_for("the lease to run out", lambda: client.get("/v1/shards/1").json()["state"] == "missing")

        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
        up = {sample.labels["shard"]: sample.value for sample in families["shardam_shard_up"].samples}
        assert up == {"0": 1.0, "1": 0.0}
        assert {sample.labels["shard"] for sample in families["shardam_pushes"].samples} == {"0"}


def test_rows_are_served_on_while_redis_is_gone(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 2) as shards,
        running_admin(shards.valkey.url, tmp_path) as admin,
        admin.client() as client,
    ):
        with raw_cluster(shards.view()) as grpc:
            table = grpc.create(TableSpec("t", 2))
            grpc.push(table, [1, 2, 3], [[1.0, 2.0]] * 3)
        assert client.get("/v1/tables/t/rows/1").status_code == 200
        shards.valkey.stop()
        wait_for("Redis' absence to be noticed", lambda: client.get("/v1/cluster").json()["redis_error"])
        assert client.get("/v1/tables/t/rows/1").status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/tables/t").json()["num_rows"] == 3
        shards.valkey.start()
        wait_for("Redis' return to be noticed", lambda: client.get("/v1/cluster").json()["redis_error"] is None)


@pytest.mark.case("C132")
def test_with_a_token_every_call_but_health_needs_it(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 1, token=TOKEN) as shards,
        running_admin(shards.valkey.url, tmp_path, token=TOKEN) as admin,
        admin.client() as stranger,
        admin.client(TOKEN) as friend,
    ):
        assert stranger.get("/healthz").status_code == 200
        assert stranger.get("/readyz").status_code == 200
        for path in ("/", "/v1/shards", "/metrics", "/docs"):
            assert stranger.get(path).status_code == 401
            assert friend.get(path).status_code == 200
        body = {"name": "t", "dim": 2}
        assert stranger.post("/v1/tables", json=body).json()["reason"] == "BAD_TOKEN"
        assert friend.get("/v1/tables").json()["tables"] == []
        assert friend.post("/v1/tables", json=body).status_code == 200
        assert stranger.get("/v1/tables", auth=("anyone", TOKEN)).status_code == 200
        assert TOKEN not in admin.log.read_text()


def test_it_ends_on_sigterm_with_exit_code_0(tmp_path: Path) -> None:
    with running_valkey() as valkey, running_admin(valkey.url, tmp_path) as admin:
        assert admin.terminate() == 0
        log = admin.log.read_text()
    assert "admin API serves on" in log
    assert "admin API ends" in log
    assert "Traceback" not in log


def run_admin(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardam_server", "admin", "--redis", "redis://127.0.0.1:1/0", *flags],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_taken_port_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_admin("--port", str(port))
    assert result.returncode != 0
    assert f"port {port} is in use" in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.case("C132")
def test_a_wide_bind_without_a_token_is_refused() -> None:
    result = run_admin("--host", "0.0.0.0", "--port", "0")
    assert result.returncode != 0
    assert "--insecure" in result.stderr
    assert "Traceback" not in result.stderr
