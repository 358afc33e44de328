"""A client that pushes while shards and Redis are stopped, killed and started again, and what it is refused with."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shardam_proto.errors import ShardamError
from shardam_proto.registry import ShardEntry
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_testing.processes import ShardProcess, Shards
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.waiting import wait_for

HANG_S = 40.0
"""Far beyond any wait of a test that works."""


class PushingClient:
    """A client of one shard, with a table of its own."""

    def __init__(self, raw: RawClient, table: common_pb2.TableInfo) -> None:
        self.raw = raw
        self.table = table
        self.step = 0

    def push(self, number: int) -> None:
        """Pushes row 1 and notes the table's step."""
        self.step = self.raw.push(number, self.table, [1], np.ones((1, 2))).steps[0].table_step

    @property
    def state(self) -> int:
        return self.raw.status().state


@contextlib.contextmanager
def pushing_client(shards: Shards) -> Iterator[PushingClient]:
    """Opens a client of shard 0 of a cluster of one shard, with table "t"."""
    with raw_client(shards.view()) as raw:
        raw.open()
        yield PushingClient(raw, raw.create(TableSpec("t", 2))[0])


class InBackground:
    """A call on a thread that is to be refused."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._reason = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._reason = reason_of(self._action)

    def reason(self) -> str:
        """Waits for the end and returns the reason; empty: it was not refused."""
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        return self._reason


def reason_of(action: Callable[[], object]) -> str:
    """Returns the reason with which a call is refused."""
    with pytest.raises(ShardamError) as error:
        action()
    return error.value.reason


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process and lets it go on at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def flush(shards: Shards) -> None:
    """Empties Redis."""
    with contextlib.closing(shards.valkey.client()) as connection:
        connection.flushall()


def is_lost(shards: Shards, index: int) -> bool:
    """True once a shard is registered as LOST."""
    entry = shards.view().shards.get(index)
    return entry is not None and entry.lost


def wait_serving(shards: Shards, shard: ShardProcess) -> ShardEntry:
    """Waits until this very process is registered as ready."""

    def serving() -> ShardEntry | None:
        assert shard.process.poll() is None, shard.log_text()
        found = [entry for entry in shards.view().shards.values() if entry.pid == shard.process.pid and entry.ready]
        return found[0] if found else None

    return wait_for("the shard to serve", serving, HANG_S)
