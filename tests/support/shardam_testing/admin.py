"""A running admin API, and a client that pushes to all shards of a cluster, for tests that look at rows through REST."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import numpy as np
import numpy.typing as npt

from shardam_proto.registry import ClusterView
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_testing.processes import Shards, clean_environment, free_port
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.waiting import wait_for


@dataclasses.dataclass
class AdminProcess:
    """A running admin API."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, token: str | None = None) -> httpx2.Client:
        """Returns an HTTP client of it that knows no proxy."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=30.0, trust_env=False)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def is_live(self) -> bool:
        assert self.process.poll() is None, f"the admin API ended:\n{self.log.read_text()}"
        with self.client() as client, contextlib.suppress(httpx2.TransportError):
            return client.get("/healthz").status_code == 200
        return False


@contextlib.contextmanager
def running_admin(redis_url: str, folder: Path, *, token: str | None = None, **flags: str) -> Iterator[AdminProcess]:
    """Starts an admin API on a free port and waits until it is live, not until the cluster is ready."""
    port = free_port()
    given = {"cluster": "test", "port": str(port), **{name.replace("_", "-"): value for name, value in flags.items()}}
    arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
    environment = clean_environment(SHARDAM_REDIS=redis_url, **({} if token is None else {"SHARDAM_TOKEN": token}))
    log = folder / f"admin-{port}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardam_server", "admin", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    admin = AdminProcess(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_for("the admin API to be live", admin.is_live)
        yield admin
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@dataclasses.dataclass
class RawCluster:
    """One client of all shards made of generated stubs alone."""

    clients: list[RawClient]
    view: ClusterView
    number: int = 0

    def create(self, spec: TableSpec) -> common_pb2.TableInfo:
        return self.clients[0].create(spec)[0]

    def owners(self, row_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        assert self.view.route_map is not None
        return self.view.route_map.shards_of(np.array(row_ids, np.int64))

    def push(self, table: common_pb2.TableInfo, row_ids: Sequence[int], gradients: npt.ArrayLike) -> None:
        """Pushes one optimizer step to all shards, each its part."""
        ids, values = np.array(row_ids, np.int64), np.asarray(gradients, np.float32).reshape(len(row_ids), table.spec.dim)
        owners = self.owners(row_ids)
        self.number += 1
        for shard, client in enumerate(self.clients):
            mine = owners == shard
            client.push(self.number, table, ids[mine].tolist(), values[mine])


@contextlib.contextmanager
def raw_cluster(view: ClusterView, token: str | None = None) -> Iterator[RawCluster]:
    """Opens one client on every shard."""
    client_id = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw_client(view, index, token)) for index in sorted(view.shards)]
        for client in clients:
            client.client_id = client_id
            client.open()
        yield RawCluster(clients, view)


@dataclasses.dataclass
class Console:
    """A cluster, the admin API over it, and a client that pushes to it."""

    shards: Shards
    admin: AdminProcess
    grpc: RawCluster
