"""The compose file's stack, run without a container engine: programs, arguments, environment, order and health checks as the
files give them, names and ports mapped to loopback (shardam_testing.compose_stack)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
import pytest
from shardam_testing.compose_file import Service, read_service, read_services
from shardam_testing.compose_stack import ComposeStack
from shardam_testing.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]

TOKEN = secrets.token_urlsafe(24)

TABLE = "cat_25"
STEPS = 50
WORKERS = 2

HANG_S = 180.0


def services(**variables: str) -> dict[str, Service]:
    given = {"SHARDAM_TOKEN": TOKEN, "EPOCHS": "1000", **variables}
    return {
        name: read_service(name, value, ROOT) for name, value in read_services([ROOT / "docker-compose.yml"], given).items()
    }


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ComposeStack]:
    with ComposeStack(services(), tmp_path) as made:
        yield made


def admin_client(stack: ComposeStack, token: str | None = TOKEN) -> httpx2.Client:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx2.Client(
        base_url=f"http://{stack.network.address('admin', 8080)}", headers=headers, timeout=30, trust_env=False
    )


def table_step(client: httpx2.Client) -> int:
    answer = client.get(f"/v1/tables/{TABLE}")
    return int(answer.json()["table_step"]) if answer.status_code == 200 else 0


def wait_for_steps(stack: ComposeStack, client: httpx2.Client, steps: int) -> None:
    def trained() -> bool:
        for worker in ("worker-0", "worker-1"):
            assert stack.is_running(worker), stack.log(worker)
        return table_step(client) >= steps

    wait_for(f"table step {steps}", trained, HANG_S)


def ended_well(stack: ComposeStack, statuses: Mapping[str, int]) -> None:
    assert statuses == dict.fromkeys(stack.services, 0), {name: stack.log(name)[-2000:] for name in statuses if statuses[name]}


@pytest.mark.case("C136")
@pytest.mark.case("C141")
@pytest.mark.timeout(600)
def test_the_stack_starts_in_order_trains_shows_a_row_and_every_service_stops_with_status_0(stack: ComposeStack) -> None:
    order = stack.up()
    assert order.index("redis") < order.index("shard-0") < order.index("admin")
    assert order.index("shard-1") < order.index("worker-0")
    with admin_client(stack) as client:
        wait_for_steps(stack, client, STEPS * WORKERS)  # each worker's push is a step
        page = client.get(f"/v1/tables/{TABLE}/rows", params={"limit": 1}).json()
        row = client.get(f"/v1/tables/{TABLE}/rows/{page['rows'][0]['id']}").json()
        assert row["found"]
        assert row["last_touched_step"] >= 1
        assert row["table_step"] >= STEPS * WORKERS
        assert max(row["optimizer"]["exp_avg_sq"]) > 0
        shards = client.get("/v1/shards").json()["shards"]
        assert [shard["num_rows"] > 0 for shard in shards] == [True, True]
    with admin_client(stack, token=None) as stranger:
        assert stranger.get(f"/v1/tables/{TABLE}/rows").status_code == 401
        assert stranger.get("/readyz").status_code == 200
    ended_well(stack, stack.down())
    for shard in ("shard-0", "shard-1"):
        assert "on device cpu" in stack.log(shard), "the device in use is said"
    assert [name for name in stack.services if TOKEN in stack.log(name)] == []


@pytest.mark.timeout(300)
def test_a_killed_shard_of_the_stack_comes_back_from_its_volume_with_its_rows(stack: ComposeStack) -> None:
    serving = ("redis", "shard-0", "shard-1", "admin")
    for name in serving:
        stack.start(name)
    for name in serving:
        stack.wait_healthy(name)
    row_ids = [str(row_id) for row_id in range(50)]

    def rows(client: httpx2.Client) -> object:
        answer = client.post("/v1/tables/kept/rows:batchGet", json={"ids": row_ids, "include": "optimizer"})
        return answer.json()["rows"] if answer.status_code == 200 else None

    with admin_client(stack) as client:
        assert client.post("/v1/tables", json={"name": "kept", "dim": 4}).status_code in (200, 201)
        for row_id in row_ids:
            body = {
                "weight": [float(row_id), 0.5, -0.5, 1e-30],
                "optimizer": {"exp_avg": [0.25] * 4, "exp_avg_sq": [0.125] * 4},
            }
            assert client.put(f"/v1/tables/kept/rows/{row_id}", json=body).status_code in (200, 201)
        before = rows(client)
        assert before is not None
        assert [shard["num_rows"] > 0 for shard in client.get("/v1/shards").json()["shards"]] == [True, True]
        stack.kill("shard-1")
        assert rows(client) is None, "half of the rows are gone for now, and the answer says so"
        stack.start("shard-1")
        stack.wait_healthy("shard-1")
        stack.wait_healthy("admin")
        assert wait_for("the rows to be read again", lambda: rows(client), HANG_S) == before
    assert [stack.stop(name) for name in reversed(serving)] == [0, 0, 0, 0]


def wait_for_log(stack: ComposeStack, service: str, text: str) -> None:
    def said() -> bool:
        assert stack.is_running(service), stack.log(service)
        return text in stack.log(service)

    wait_for(f"{service} to log {text!r}", said, HANG_S)


@pytest.mark.case("C138")
@pytest.mark.timeout(600)
def test_started_all_at_once_without_redis_everything_waits_and_a_restart_of_redis_alone_stops_nobody(
    stack: ComposeStack,
) -> None:
    waiting = [name for name in stack.services if name != "redis"]
    for name in reversed(waiting):
        stack.start(name)
    for shard in ("shard-0", "shard-1"):
        wait_for_log(stack, shard, "waits for Redis")
    wait_for_log(stack, "worker-0", "waits for cluster default")
    assert not stack.is_healthy("shard-0")
    assert not stack.is_healthy("admin")
    stack.start("redis")
    for name in stack.services:
        stack.wait_healthy(name)
    with admin_client(stack) as client:
        wait_for_steps(stack, client, 1)
        assert stack.stop("redis") == 0
        stack.start("redis")
        for name in stack.services:
            stack.wait_healthy(name)
        wait_for_steps(stack, client, table_step(client) + STEPS)
    ended_well(stack, stack.down())


@pytest.mark.case("C142")
@pytest.mark.timeout(300)
def test_a_second_replica_of_a_shard_is_refused_by_its_volume_or_its_name_and_the_first_serves_on(stack: ComposeStack) -> None:
    for name in ("redis", "shard-0", "shard-1"):
        stack.start(name)
    for name in ("redis", "shard-0", "shard-1"):
        stack.wait_healthy(name)
    ports = {"--port": "0", "--http-port": "0"}
    on_another_machine = stack.run_again("shard-0", ports, SHARDAM_LEASE_S="1", SHARDAM_DATA_DIR="none")
    assert on_another_machine.returncode == 1
    assert "shard 0 of cluster 'default' is already running" in on_another_machine.stderr
    assert "use another --index or --cluster" in on_another_machine.stderr
    scaled = stack.run_again("shard-0", ports, SHARDAM_LEASE_S="1")
    assert scaled.returncode == 1
    assert "shard-0 is held by process" in scaled.stderr
    assert stack.is_healthy("shard-0")
    assert [stack.stop(name) for name in ("shard-1", "shard-0", "redis")] == [0, 0, 0]


@pytest.mark.parametrize("service", ["shard-0", "admin"])
@pytest.mark.parametrize("token", ["", None], ids=["empty token", "no token"])
def test_without_a_token_a_service_refuses_its_wide_bind_and_names_the_remedy(
    tmp_path: Path, service: str, token: str | None
) -> None:
    given = services()
    environment = {key: value for key, value in given[service].environment.items() if key != "SHARDAM_TOKEN"}
    if token is not None:
        environment["SHARDAM_TOKEN"] = token
    given[service] = Service(**{**vars(given[service]), "environment": environment})
    with ComposeStack(given, tmp_path) as stack:
        # The host that the file gives, which the mapping of names and ports has made loopback.
        result = stack.run_again(service, {"--host": "0.0.0.0"})
    assert result.returncode == 2
    assert "--host 0.0.0.0 can be reached from other machines and there is no token" in result.stderr
    assert "SHARDAM_TOKEN" in result.stderr


def test_told_to_stop_while_it_waits_a_worker_ends_at_once_with_status_0(stack: ComposeStack) -> None:
    stack.start("worker-1")  # waits inside torch for worker-0, where no Python code runs
    wait_for_log(stack, "worker-1", "waits for the other workers")
    assert stack.stop("worker-1") == 0
