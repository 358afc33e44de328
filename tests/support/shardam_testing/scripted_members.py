"""Cluster objects on scripted shards: what a program sees of a group, without a Redis."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest

from shardam import Cluster, Table
from shardam._backoff import Deadline
from shardam._group import GroupOptions
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam.errors import ShardamError
from shardam_proto.registry import Keys, connect_redis
from shardam_testing.scripted_client import ScriptedClient
from shardam_testing.scripted_groups import ScriptedGroup
from shardam_testing.scripted_shards import INFO, Ending, Fault, ScriptedShard, scripted_cluster, view_of

NOWHERE = "redis://127.0.0.1:1/0"

PLACE = GroupOptions("workers", None, rank=1, world_size=3)
"""The client's in a sync group."""


@dataclasses.dataclass
class ScriptedMember:
    """A member of a group.

    Attributes:
        opened: all clients that were opened for it.
        open: opens another client on the same shards.
    """

    cluster: Cluster
    group: ScriptedGroup
    shards: list[ScriptedShard]
    opened: list[Session]
    open: Callable[[SessionOptions], Session]

    @property
    def table(self) -> Table:
        return Table(self.cluster, INFO)

    def drop(self) -> None:
        """Has every shard close the client."""
        for shard in self.shards:
            shard.is_closed = True


@contextlib.contextmanager
def scripted_member(
    count: int,
    place: GroupOptions | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shard_timeout_s: float = 20.0,
    client_lease_s: float = 30.0,
) -> Iterator[ScriptedMember]:
    """Starts scripted shards and opens a cluster object on them; ends both. What the object opens later is on them, too."""
    with scripted_cluster(count) as (_, shards):
        group, opened = ScriptedGroup(shards), []
        for shard in shards:
            shard.group, shard.client_lease_s = group, client_lease_s

        def open_session(options: SessionOptions) -> Session:
            session = Session(options, connect_redis(NOWHERE), Keys("scripted"))
            try:
                session.start(view_of(shards), Deadline(shard_timeout_s))
                session.join(Deadline(shard_timeout_s))
            except BaseException:
                session.close()
                raise
            opened.append(session)
            return session

        monkeypatch.setattr("shardam.cluster.open_session", open_session)
        monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: view_of(shards))
        cluster = Cluster(open_session(SessionOptions(NOWHERE, "scripted", None, shard_timeout_s, place)))
        try:
            yield ScriptedMember(cluster, group, shards, opened, open_session)
        finally:
            for shard in shards:
                shard.faults.clear()
                shard.faults_of.clear()
            group.release()
            cluster.close()


def group_of(client: ScriptedClient) -> ScriptedGroup:
    """Returns the group of a client's shards."""
    return client.shards[0].require_group()


def fail(shard: ScriptedShard, number: int, *faults: Fault) -> None:
    """Has the next calls under a number fail, one after the other."""
    shard.faults_of[number] = collections.deque(faults)


def contributed(*numbers: int, kind: str = "gradient") -> list[Ending]:
    """Returns these numbers, ended as counted contributions."""
    return [(number, kind, [INFO.table_id] if kind == "gradient" else []) for number in numbers]


def hows(client: ScriptedClient) -> list[list[str]]:
    """Returns how the numbers ended, by shard."""
    return [[how for _, how, _ in endings] for endings in client.endings()]


def calls(shard: ScriptedShard) -> list[tuple[str, int]]:
    """Returns what came to a shard, and under which numbers."""
    return [(method, number) for method, number, _ in shard.seen]


class Running:
    """An action in a thread of its own."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._error: ShardamError | None = None

        def run() -> None:
            try:
                action()
            except ShardamError as error:
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> ShardamError | None:
        """Waits for its end and returns its error, or None."""
        self._thread.join(60)
        assert self.is_over
        return self._error
