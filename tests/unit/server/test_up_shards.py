"""Which shards `up` starts, on which ports, once the cluster has moved to another number of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import pytest

from shardam_proto.registry import ShardEntry
from shardam_server.child_commands import ChildCommands
from shardam_server.children import Console
from shardam_server.settings import UpSettings
from shardam_server.supervisor import Kept, RestartPolicy
from shardam_server.up_shards import ShardTerms, UpShards

T = TypeVar("T")

REDIS = "redis://127.0.0.1:1/0"


class Probe:
    """Says what a test says of the cluster."""

    def __init__(self) -> None:
        self.count: int | None = 2

    async def num_shards(self) -> int | None:
        return self.count

    async def shard_ready(self, index: int, pid: int, when_lost: object) -> ShardEntry:
        return ShardEntry(index, f"127.0.0.1:{9000 + index}", "", 5, 7, "cpu", pid, ready=True)


class Stage:
    """The shards of one `up`."""

    def __init__(self, **settings: object) -> None:
        self.probe = Probe()
        values = {"redis": REDIS, "shards": 2, "admin_port": 0, "data_dir": "none", "truncate_journal": False, **settings}
        self.settings = UpSettings.model_validate(values)
        commands, console = ChildCommands(self.settings, REDIS), Console(io.StringIO(), "text")
        terms = ShardTerms(self.settings, commands, console, self.probe, RestartPolicy(), ())  # type: ignore[arg-type]
        self.shards = UpShards(terms, lambda entry: None, lambda: self.settings.admin_port)

    def replace(self, count: int | None) -> list[Kept]:
        self.probe.count = count
        return asyncio.run(self.shards.replace())


def flags(children: list[Kept], name: str) -> list[str]:
    found = []
    for kept in children:
        (value,) = [flag.partition("=")[2] for flag in kept.child.spec.command() if flag.startswith(f"--{name}=")]
        found.append(value)
    return found


async def outcome(work: Awaitable[T]) -> T:
    return await work


def free_ports(count: int) -> int:
    """Returns the first of so many neighbouring ports that are free."""
    for first in range(20_000, 30_000, count):
        with contextlib.ExitStack() as listeners:
            try:
                for port in range(first, first + count):
                    listeners.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_as_many_start_as_the_cluster_has_moved_to_on_the_ports_that_follow() -> None:
    first = free_ports(4)
    stage = Stage(port=first)
    assert flags(stage.shards.make(), "shards") == ["2", "2"]
    for count in (4, 1):
        children = stage.replace(count)
        assert flags(children, "shards") == [str(count)] * count
        assert flags(children, "index") == [str(index) for index in range(count)]
        assert flags(children, "port") == [str(first + index) for index in range(count)]


def test_a_port_that_another_process_has_is_replaced_by_a_free_one_and_that_is_said(
    taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(port=taken - 1, shards=1)
    with caplog.at_level(logging.WARNING):
        assert flags(stage.replace(2), "port") == [str(taken - 1), "0"]
    assert f"shard 1 cannot listen on port {taken} (it is taken): it takes a free port" in caplog.text


def test_the_admin_apis_port_and_one_beyond_the_last_are_not_a_shards(caplog: pytest.LogCaptureFixture) -> None:
    first = free_ports(4)
    with caplog.at_level(logging.WARNING):
        assert flags(Stage(port=first, admin_port=first + 2).replace(3), "port")[2] == "0"
        assert flags(Stage(port=65_534).replace(3), "port")[2] == "0"
    assert "(it is the admin API's)" in caplog.text
    assert "(the last port is 65535)" in caplog.text


def test_a_redis_that_has_lost_the_move_starts_the_former_number() -> None:
    assert flags(Stage().replace(None), "shards") == ["2", "2"]


def test_a_shard_on_a_free_port_keeps_it_through_the_move_and_no_journal_is_truncated_any_more() -> None:
    stage = Stage(port=0, data_dir="/tmp/x", truncate_journal=True)
    before = stage.shards.make()
    assert "--truncate-journal" in before[0].child.spec.command()
    asyncio.run(outcome(before[0]._wait_ready(1)))
    asyncio.run(outcome(before[1]._wait_ready(1)))
    after = stage.replace(3)
    assert flags(after, "port") == ["9000", "9001", "0"]
    assert not any("--truncate-journal" in kept.child.spec.command() for kept in after)


def test_a_refusal_is_a_move_only_for_a_shard_that_served_and_where_the_number_has_changed() -> None:
    stage = Stage()
    child = stage.shards.make()[1]
    assert child._has_left is not None
    stage.probe.count = 4
    assert not asyncio.run(outcome(child._has_left()))
    asyncio.run(outcome(child._wait_ready(1)))
    assert asyncio.run(outcome(child._has_left()))
    for count in (2, None):
        stage.probe.count = count
        assert not asyncio.run(outcome(child._has_left()))
