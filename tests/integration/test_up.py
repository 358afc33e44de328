"""`shardam up` whole: a private Redis, real shards and the admin API under supervision."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import uuid
from pathlib import Path

import psutil
import pytest
from shardam_testing.process_table import is_running
from shardam_testing.processes import running_valkey
from shardam_testing.up_process import READY_S, Ready, ready_of, up
from shardam_testing.waiting import wait_for

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import Keys


def get(url: str, path: str, token: str | None = None) -> int:
    host = url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        return connection.getresponse().status


def all_ready(ready: Ready) -> bool:
    """Returns whether Redis answers and knows both shards as ready."""
    try:
        view = ready.view()
    except RedisUnreachable:
        return False
    return len(view.shards) == 2 and view.route_map is not None and all(shard.ready for shard in view.shards.values())


def test_the_json_line_is_all_of_stdout_and_names_what_runs(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--cluster", "prod", "--seed", "7", "--max-rows", "99") as running:
        ready = ready_of(running)
        assert ready.cluster == "prod"
        view = ready.view()
        assert view.entry is not None
        assert (view.entry.num_shards, view.entry.seed) == (2, 7)
        assert ready.shards == [
            {"index": shard.index, "address": shard.address, "http_address": shard.http_address, "pid": shard.pid}
            for shard in view.shards.values()
        ]
        assert all(shard.ready for shard in view.shards.values())
        assert get(ready.admin_url, "/healthz") == 200
        assert get(ready.admin_url, "/v1/cluster") == 200
        assert {pid for shard in ready.shards if isinstance(pid := shard["pid"], int)} < set(running.processes())
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        assert running.process.stdout is not None
        assert running.process.stdout.read() == ""
        assert running.processes() == []


def test_ctrl_c_drains_admin_then_shards_then_redis_and_exits_0(tmp_path: Path) -> None:
    with up(tmp_path, "--log-format", "text", XDG_STATE_HOME=f"{tmp_path}/state") as running:
        assert running.banner() == "shardam: cluster 'default' is ready\n"
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0
        assert running.processes() == []
        assert running.process.stdout is not None
        rest = running.process.stdout.read()
        for text in (
            "shard 1   127.0.0.1:",
            "export SHARDAM_REDIS_URL=redis://:",
            "shardam.connect()",
            f"kept in {tmp_path}/state/shardam (journal: write)",
            "Ctrl-C",
        ):
            assert text in rest
        log = running.log.read_text()
        ends = [
            log.index(text)
            for text in ("SIGINT: draining", "admin API ends", "stopped [cluster", "Valkey is now ready to exit")
        ]
        assert ends == sorted(ends)
        assert "Traceback" not in log


def test_sigkill_of_up_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with up(tmp_path, "--json", TMPDIR=str(tmp_path)) as running:
        ready_of(running)
        assert len(running.processes()) == 5  # up, Redis, two shards, admin
        running.process.kill()
        wait_for("every process to end", lambda: not running.processes(), READY_S)
        assert list(tmp_path.glob("shardam-redis-*")) == []


def test_no_process_loads_torch_or_takes_200_mb(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--shards", "1", "--device", "cpu") as running:
        ready_of(running)
        for pid in running.processes():
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
            assert psutil.Process(pid).memory_info().rss < 200 * 2**20


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    with up(tmp_path, "--json") as running:
        ready = ready_of(running)
        pid = ready.shard_pid(0)
        os.kill(pid, signal.SIGSTOP)  # it cannot drain
        running.process.send_signal(signal.SIGINT)
        wait_for("the drain to begin", lambda: "SIGINT: draining" in running.log.read_text())
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 1
        assert not is_running(pid)
        assert running.processes() == []


@pytest.mark.parametrize("victim", ["shard", "admin", "redis"])
def test_a_killed_child_comes_back_on_its_port(tmp_path: Path, victim: str) -> None:
    with up(tmp_path, "--json") as running:
        ready = ready_of(running)
        before = ready.view()
        if victim == "shard":
            pid = before.shards[1].pid
        else:
            text = "--port=" + ready.admin_url.rpartition(":")[2] if victim == "admin" else "valkey-server"
            (pid,) = [pid for pid in running.processes() if text in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(pid, signal.SIGKILL)
        name = {"shard": "shard 1"}.get(victim, victim)

        def ready_again() -> bool:
            _, killed, later = running.log.read_text().partition(f"{name} was killed by SIGKILL")
            return bool(killed) and f"{name} is ready (pid" in later

        wait_for("the child to be ready again", ready_again, READY_S)
        wait_for("all shards to be registered", lambda: all_ready(ready), READY_S)
        after = ready.view()
        assert [shard.address for shard in after.shards.values()] == [shard.address for shard in before.shards.values()]
        assert (after.shards[1].pid != before.shards[1].pid) == (victim == "shard")
        assert after.entry == before.entry
        wait_for("the admin API to be ready", lambda: get(ready.admin_url, "/readyz") == 200, READY_S)
        assert ("restarts from its data folder" in running.log.read_text()) == (victim == "shard")


def test_the_end_of_stdin_drains_if_asked_for(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--exit-with-stdin") as running:
        ready_of(running)
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.wait() == 0
        assert running.processes() == []


def test_with_a_redis_of_ones_own_none_is_started_and_names_are_given_back(tmp_path: Path) -> None:
    with running_valkey() as valkey, up(tmp_path, "--json", "--redis", valkey.url) as running:
        ready = ready_of(running)
        assert ready.redis_url == valkey.url
        assert len(running.processes()) == 4
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        assert ready.view().shards == {}


def test_settings_of_up_in_the_environment_do_not_reach_its_children_as_theirs(tmp_path: Path) -> None:
    environment = {"SHARDAM_SHARDS": "1", "SHARDAM_INDEX": "9", "SHARDAM_ADVERTISE": "nowhere:1", "SHARDAM_JSON": "1"}
    with up(tmp_path, **environment) as running:
        ready = ready_of(running)
        assert [shard["index"] for shard in ready.shards] == [0]
        assert str(ready.shards[0]["address"]).startswith("127.0.0.1:")


def test_the_token_reaches_the_children_and_shows_in_no_command_line_and_no_log(tmp_path: Path) -> None:
    token = f"secret-{uuid.uuid4()}"
    with up(tmp_path, "--json", "--shards", "1", SHARDAM_TOKEN=token) as running:
        ready = ready_of(running)
        assert get(ready.admin_url, "/v1/cluster") == 401
        assert get(ready.admin_url, "/v1/cluster", token) == 200
        secrets = (token, ready.redis_url.partition("://:")[2].partition("@")[0])
        for pid in running.processes():
            for secret in secrets:
                assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        for secret in secrets:
            assert secret not in running.log.read_text()


def test_json_logs_are_json_in_every_line(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--log-format", "json") as running:
        ready_of(running)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        events = [json.loads(line) for line in running.log.read_text().splitlines()]
    assert {event.get("shard") for event in events} >= {0, 1, None}
    assert {event.get("role") for event in events} >= {"up", "admin"}
    assert all("incarnation" in event for event in events if "shard" in event)


def test_a_shard_that_cannot_run_with_its_settings_stops_everything_at_once_and_says_why(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        with contextlib.closing(valkey.client()) as connection:
            entry = {"cluster_id": "abc", "num_shards": 3, "seed": 0}
            connection.set(Keys("default").cluster_entry, json.dumps(entry))
        with up(tmp_path, "--redis", valkey.url) as running:
            assert running.wait() == 2
            log = running.log.read_text()
            last = log.splitlines()[-1]
            assert last.startswith("shardam: shard ")
            assert "cannot start: cluster 'default' was created with 3 shards" in last
            assert "use --shards 3 or another --cluster name" in last
            assert "starting it again" not in log
            assert "Traceback" not in log
            assert running.processes() == []


def test_with_data_dir_none_rows_are_in_memory_only_and_no_file_is_made(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with up(tmp_path, "--data-dir", "none", XDG_STATE_HOME=str(state)) as running:
        assert running.banner() == "shardam: cluster 'default' is ready\n"
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0
        assert running.process.stdout is not None
        assert "live in memory only: a killed shard loses them" in running.process.stdout.read()
        assert not state.exists()


@pytest.mark.parametrize("as_flag", [True, False])
def test_what_would_do_nothing_with_data_dir_none_is_refused_in_one_line(tmp_path: Path, as_flag: bool) -> None:
    flags, variables = (["--on-journal-full", "refuse"], {}) if as_flag else ([], {"SHARDAM_ON_JOURNAL_FULL": "refuse"})
    with up(tmp_path, "--data-dir", "none", *flags, **variables) as running:
        assert running.wait() == 2
        (line,) = running.log.read_text().splitlines()
        assert "--on-journal-full (SHARDAM_ON_JOURNAL_FULL) would do nothing: name a folder, or leave it out" in line


def test_the_json_line_says_where_state_lies_and_how_it_is_kept(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--shards", "1", "--data-dir", str(tmp_path / "rows"), "--journal", "fsync") as running:
        ready = ready_of(running)
        assert (ready.data_dir, ready.journal) == (str(tmp_path / "rows"), "fsync")
        assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o700
    with up(tmp_path, "--json", "--shards", "1", SHARDAM_DATA_DIR="none") as running:
        ready = ready_of(running)
        assert (ready.data_dir, ready.journal) == (None, "off")
