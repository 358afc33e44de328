"""The admin API under load and at its end: pages are bounded, health answers, a process holds no state, SIGTERM ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import orjson
import pytest
from shardam_testing.admin import AdminProcess, raw_cluster, running_admin
from shardam_testing.processes import Shards, running_shards, running_valkey
from shardam_testing.waiting import wait_for

from shardam_proto.schema import TableSpec

MAX_PAGE_ROWS = 1000
WIDE_DIM = 8192
WIDE_ROWS = 600

MOST_IDS = 100_000
"""In one batchGet: an answer of 20 MB."""

BATCH_DIM = 16

LONGEST_ANSWER_S = 2.0
"""Ten times the 0.2 s within which health should answer; a response that blocks the event loop takes longer."""

HANG_S = 60.0


@pytest.mark.case("C129")
def test_large_answers_are_paged_and_health_answers_meanwhile(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 1) as shards,
        running_admin(shards.valkey.url, tmp_path) as admin,
        admin.client() as client,
    ):
        with raw_cluster(shards.view()) as grpc:
            many = grpc.create(TableSpec("many", 64))
            grpc.push(many, range(5000), np.ones((5000, 64)))
            wide = grpc.create(TableSpec("wide", WIDE_DIM))
            for first in range(0, WIDE_ROWS, 100):
                grpc.push(wide, range(first, first + 100), np.ones((100, WIDE_DIM)))
        response = client.get("/v1/tables/many/rows", params={"limit": 100_000})
        assert response.status_code == 422
        assert str(MAX_PAGE_ROWS) in response.json()["detail"]
        ids = [str(row_id) for row_id in range(WIDE_ROWS)]
        response = client.post("/v1/tables/wide/rows:batchGet", json={"ids": ids})
        assert (response.status_code, response.json()["reason"]) == (413, "MESSAGE_TOO_LARGE")
        assert int(response.json()["limit"]) < WIDE_ROWS

        walks: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda table=table: walks.append(walk(admin, table))) for table in ("many", "wide", "wide")
        ]
        for thread in threads:
            thread.start()
        longest_s, num_answers = 0.0, 0
        while any(thread.is_alive() for thread in threads):
            started = time.perf_counter()
            assert client.get("/healthz").status_code == 200
            longest_s, num_answers = max(longest_s, time.perf_counter() - started), num_answers + 1
        assert sorted(map(sum, walks)) == [WIDE_ROWS, WIDE_ROWS, 5000]
        assert all(len(pages) > 1 and max(pages) <= MAX_PAGE_ROWS for pages in walks)
        assert num_answers > 1
        assert longest_s < LONGEST_ANSWER_S


def walk(admin: AdminProcess, table: str) -> list[int]:
    """Reads all rows by the largest pages; returns the number of rows of each."""
    pages, cursor = [], ""
    with admin.client() as client:
        while True:
            response = client.get(f"/v1/tables/{table}/rows", params={"limit": MAX_PAGE_ROWS, "cursor": cursor}, timeout=HANG_S)
            # Reading 40 MB of JSON would hold up this process, and with it the one who asks for health.
            pages.append(response.content.count(b'"found":true'))
            end = re.search(rb'"next_cursor":(?:null|"([0-9:]+)")}$', response.content[-100:])
            assert end is not None
            if end[1] is None:
                return pages
            cursor = end[1].decode()


def test_health_answers_while_a_hundred_thousand_rows_are_encoded(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 1) as shards,
        running_admin(shards.valkey.url, tmp_path, max_batch_ids=str(MOST_IDS)) as admin,
        admin.client() as client,
    ):
        with raw_cluster(shards.view()) as grpc:
            grpc.create(TableSpec("many", BATCH_DIM))
        body = orjson.dumps({"ids": [str(row_id) for row_id in range(MOST_IDS)]})
        sizes: list[tuple[int, int]] = []

        def get() -> None:
            headers = {"Content-Type": "application/json"}
            with admin.client() as other:
                response = other.post("/v1/tables/many/rows:batchGet", content=body, headers=headers, timeout=HANG_S)
                sizes.append((response.status_code, response.content.count(b'"found":')))

        batch = threading.Thread(target=get)
        batch.start()
        begun = time.perf_counter()
        longest_s, num_answers = 0.0, 0
        while batch.is_alive():
            started = time.perf_counter()
            assert client.get("/healthz").status_code == 200
            longest_s, num_answers = max(longest_s, time.perf_counter() - started), num_answers + 1
        assert sizes == [(200, MOST_IDS)]
        assert num_answers > 10
        assert longest_s < (time.perf_counter() - begun) / 4  # most of the time goes into the encoding


@pytest.mark.case("C130")
def test_two_admin_processes_answer_alike_and_one_goes_on_when_the_other_is_killed(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 2) as shards,
        running_admin(shards.valkey.url, tmp_path) as first,
        running_admin(shards.valkey.url, tmp_path) as second,
        first.client() as one,
        second.client() as other,
    ):
        assert one.post("/v1/tables", json={"name": "t", "dim": 2}).status_code == 200
        lists = [client.get("/v1/tables").json() for _ in range(20) for client in (one, other)]
        assert all(listed == lists[0] for listed in lists)
        assert [table["name"] for table in lists[0]["tables"]] == ["t"]

        written = [
            client.put(
                f"/v1/tables/t/rows/{row_id}", json={"weight": [row_id, 1]}, headers={"Idempotency-Key": f"row-{row_id}"}
            )
            for row_id, client in zip(range(40), [one, other] * 20, strict=True)
        ]
        assert [response.status_code for response in written] == [200] * 40
        page = one.get("/v1/tables/t/rows", params={"limit": 15}).json()
        tag = one.get("/v1/tables/t/rows/0").headers["etag"]
        first.process.kill()
        first.process.wait()

        seen = [row["id"] for row in page["rows"]]
        while page["next_cursor"] is not None:
            page = other.get("/v1/tables/t/rows", params={"limit": 15, "cursor": page["next_cursor"]}).json()
            seen += [row["id"] for row in page["rows"]]
        assert sorted(map(int, seen)) == list(range(40))
        again = put(other, 0)
        assert (again.json()["change_number"], again.headers["idempotency-replayed"]) == (
            written[0].json()["change_number"],
            "true",
        )
        assert other.put("/v1/tables/t/rows/0", json={"weight": [5, 5]}, headers={"If-Match": tag}).status_code == 200


def put(client: httpx2.Client, row_id: int) -> httpx2.Response:
    headers = {"Idempotency-Key": f"row-{row_id}"}
    return client.put(f"/v1/tables/t/rows/{row_id}", json={"weight": [row_id, 1]}, headers=headers)


# -- the end


@contextlib.contextmanager
def connection(admin: AdminProcess) -> Iterator[socket.socket]:
    host, port = admin.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as opened:
        yield opened


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Reads an answer, which may come in pieces, up to its last bytes."""
    answer = b""
    while not answer.endswith(end):
        piece = connection.recv(4096)
        assert piece, f"the connection ended after {answer!r}"
        answer += piece
    return answer


def send(opened: socket.socket, head: str) -> None:
    opened.sendall(head.replace("\n", "\r\n").encode())


@pytest.mark.case("C131")
def test_connections_that_hold_on_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """Idle ones, half a request, and an answer that nobody reads: the process ends within its drain, in order."""
    with (
        running_shards(tmp_path, 1) as shards,
        running_admin(shards.valkey.url, tmp_path, drain_s="1") as admin,
        contextlib.ExitStack() as stack,
    ):
        with raw_cluster(shards.view()) as grpc:
            wide = grpc.create(TableSpec("wide", WIDE_DIM))
            grpc.push(wide, range(100), np.ones((100, WIDE_DIM)))
        silent, idle, half, unread = (stack.enter_context(connection(admin)) for _ in range(4))
        assert silent.fileno() > 0
        send(idle, "GET /healthz HTTP/1.1\nHost: 127.0.0.1\n\n")
        assert read_until(idle, b"}").startswith(b"HTTP/1.1 200 OK")
        send(
            half,
            'PUT /v1/tables/wide/rows/1 HTTP/1.1\nHost: 127.0.0.1\nContent-Type: application/json\nContent-Length: 99\n\n{"w',
        )
        send(unread, "GET /v1/tables/wide/rows?limit=100 HTTP/1.1\nHost: 127.0.0.1\n\n")
        assert unread.recv(1)  # the answer, megabytes of it, has begun
        assert admin.terminate(timeout_s=HANG_S) == 0
        assert half.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert (silent.recv(1), idle.recv(1)) == (b"", b"")
        log = admin.log.read_text()
    assert "PUT /v1/tables/wide/rows/1 was cut off: the admin API ends" in log
    assert "INFO shardam_server.admin.process: admin API ends" in log
    assert "Traceback" not in log


@pytest.mark.case("C131")
def test_a_request_that_a_shard_holds_up_is_answered_when_the_drain_is_over(tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 1, lease_s="60") as shards,
        running_admin(shards.valkey.url, tmp_path, drain_s="1", shard_timeout_s="600") as admin,
        admin.client() as client,
    ):
        client.post("/v1/tables", json={"name": "t", "dim": 2})
        pid = shards.processes[0].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with connection(admin) as waiting:
                send(waiting, "GET /healthz HTTP/1.1\nHost: 127.0.0.1\n\n")
                assert read_until(waiting, b"}")  # so the connection has been taken in
                send(waiting, "GET /v1/tables/t/rows/1 HTTP/1.1\nHost: 127.0.0.1\n\n")
                assert client.get("/healthz").status_code == 200  # so the request before it has been taken in, too
                assert admin.terminate(timeout_s=HANG_S) == 0  # not after shard_timeout_s
                answer = b"".join(iter(lambda: waiting.recv(4096), b""))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"SHARD_UNREACHABLE" in answer
        assert "admin API ends" in admin.log.read_text()


@pytest.mark.case("C139")
def test_live_comes_at_once_and_ready_when_every_shard_serves(tmp_path: Path) -> None:
    with running_valkey() as valkey, running_admin(valkey.url, tmp_path) as admin, admin.client() as client:
        assert client.get("/healthz").status_code == 200
        shards = Shards(valkey, tmp_path, 2)
        try:
            shards.start(0)
            wait_for("shard 0 to register", lambda: "shard 1 is not registered" in str(client.get("/readyz").json()))
            body = {"weight": [1, 2]}
            response = client.put("/v1/tables/t/rows/1", json=body)
            assert (response.status_code, response.json()["reason"]) == (503, "NOT_READY")
            assert response.headers["retry-after"]
            assert client.get("/healthz").status_code == 200
            shards.start(1)
            wait_for("the cluster to be ready", lambda: client.get("/readyz").status_code == 200)
            assert client.post("/v1/tables", json={"name": "t", "dim": 2}).status_code == 200
            assert client.put("/v1/tables/t/rows/1", json=body).status_code == 200
        finally:
            shards.stop()
