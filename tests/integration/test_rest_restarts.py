"""REST over shards that are killed and started again: with a journal every answer holds, without one the shard is LOST."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest
from shardam_testing.admin import raw_cluster, running_admin
from shardam_testing.processes import Shards, clean_environment, running_shards
from shardam_testing.waiting import wait_for

from shardam_proto.schema import TableSpec

HANG_S = 60.0
PUT = {"weight": [0.5, -1.5]}


def row_of(shards: Shards, shard: int) -> int:
    """Returns a row that a shard owns."""
    route_map = shards.view().route_map
    assert route_map is not None
    return int(np.flatnonzero(route_map.shards_of(np.arange(100, dtype=np.int64)) == shard)[0])


def command(shards: Shards, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardam_server", *arguments, "--cluster", shards.cluster],
        env=clean_environment(SHARDAM_REDIS_URL=shards.valkey.url),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def wait_ready(client: httpx2.Client) -> None:
    wait_for("the cluster to be ready", lambda: client.get("/readyz").status_code == 200, HANG_S)


@pytest.mark.case("C130")
def test_keys_and_etags_outlive_a_kill_of_every_shard_that_keeps_a_journal(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 2, data_dir=str(tmp_path / "data")) as shards,
        running_admin(shards.valkey.url, tmp_path) as admin,
        admin.client() as client,
    ):
        assert client.post("/v1/tables", json={"name": "t", "dim": 2}).status_code == 200
        path, headers = f"/v1/tables/t/rows/{row_of(shards, 1)}", {"Idempotency-Key": "k"}
        first = client.put(path, json=PUT, headers=headers)
        gone = client.delete(f"/v1/tables/t/rows/{row_of(shards, 0)}", headers={"Idempotency-Key": "gone"})
        assert (first.status_code, gone.status_code) == (200, 404)
        shown = client.get("/v1/shards/1").json()
        assert (shown["journal_mode"], shown["journal_state"]) == ("write", "ok")
        assert shown["data_folder"].startswith(str(tmp_path))
        for shard in (0, 1):
            shards.processes[shard].kill()
        for shard in (0, 1):
            shards.start(shard, data_dir=str(tmp_path / "data"))
        wait_ready(client)
        again = client.put(path, json=PUT, headers=headers)
        assert (again.status_code, again.json(), again.headers["etag"]) == (200, first.json(), first.headers["etag"])
        assert again.headers["idempotency-replayed"] == "true"
        assert client.get(path).headers["etag"] == first.headers["etag"]
        repeat = client.delete(f"/v1/tables/t/rows/{row_of(shards, 0)}", headers={"Idempotency-Key": "gone"})
        assert (repeat.status_code, repeat.headers["idempotency-replayed"]) == (404, "true")
        refused = client.put(path, json={"weight": [9, 9]}, headers=headers)
        assert (refused.status_code, refused.json()["reason"]) == (400, "SEQUENCE_REUSED")
        assert client.put(path, json=PUT, headers={"If-Match": first.headers["etag"]}).status_code == 200


def test_a_shard_that_comes_back_empty_is_lost_until_it_is_told_to_forget(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 2) as shards,
        running_admin(shards.valkey.url, tmp_path) as admin,
        admin.client() as client,
    ):
        with raw_cluster(shards.view()) as grpc:
            grpc.push(grpc.create(TableSpec("t", 2)), range(20), [[1.0, 2.0]] * 20)
        path, headers = f"/v1/tables/t/rows/{row_of(shards, 1)}", {"Idempotency-Key": "k"}
        former = client.put(path, json=PUT, headers=headers).headers["etag"]
        shards.processes[1].kill()
        shards.start(1)
        wait_for("shard 1 to be LOST", lambda: client.get("/v1/shards/1").json()["state"] == "lost", HANG_S)

        forget = "`shardam forget-shard --index 1`"
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert any("shard 1 is LOST" in text and forget in text for text in ready.json()["waiting_for"])
        assert client.get("/healthz").status_code == 200
        for response in (
            client.get(path),
            client.put(path, json=PUT, headers=headers),
            client.post("/v1/tables/t/rows:batchGet", json={"ids": [str(row_of(shards, 0)), str(row_of(shards, 1))]}),
        ):
            assert (response.status_code, response.json()["reason"]) == (400, "SHARD_LOST")
            assert forget in response.json()["detail"]
        done = command(shards, "status")
        assert done.returncode == 1
        assert "missing: shard 1 is LOST" in done.stdout

        assert command(shards, "forget-shard", "--index", "1").returncode == 0
        wait_ready(client)
        assert client.get(path).status_code == 404
        refused = client.put(path, json=PUT, headers=headers)  # what the key had made is gone with the rows
        assert (refused.status_code, refused.json()["reason"]) == (400, "CLIENT_CLOSED")
        again = client.put(path, json=PUT, headers={"Idempotency-Key": "new"})
        assert (again.status_code, "idempotency-replayed" in again.headers) == (200, False)
        number = again.headers["etag"].rpartition(":")[2]
        of_former_rows = f"{former.rpartition(':')[0]}:{number}"
        refused = client.put(path, json={"weight": [8, 8]}, headers={"If-Match": of_former_rows})
        assert (refused.status_code, refused.json()["reason"]) == (412, "ETAG_MISMATCH")
        assert client.get(path).json()["weight"] == PUT["weight"]
