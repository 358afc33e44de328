"""A cluster without shards for tests of prefetch: what is read of it, ahead or not, is counted up from a clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from shardam import Table, TableInfo, TableSpec
from shardam._arrays import Float32s, Int64s
from shardam._pusher import Pusher
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam.cluster import Cluster
from shardam.errors import ShardUnreachable
from shardam_proto.routing import RouteMap
from shardam_testing.waiting import wait_for


class QuietPusher:
    """A queue that nothing ever fails in."""

    def raise_error(self) -> None: ...

    def wait_for_queued(self) -> None: ...

    def last_on_its_way(self) -> int:
        return 0


class StandInSession:
    """A client that nothing has ended."""

    ended = False
    route_map = RouteMap(1, 2)


class StandInCluster(Cluster):
    """A cluster without shards: row i of its tables is full of i + clock; notes what is asked for, and when ahead."""

    def __init__(self, mode: str = "async") -> None:
        super().__init__(SessionOptions("redis://127.0.0.1:1/0", "stand-in", None, 1.0))
        self.become_another_client()
        self._text_of_mode = mode
        self._infos: dict[str, TableInfo] = {}
        self.clock = 0.0
        self.pulled: list[list[int]] = []
        self.ahead: list[list[int]] = []
        self.refreshed: list[list[int]] = []
        self.training: list[bool] = []
        self.fails_ahead = False
        self.gate = threading.Event()
        self.gate.set()

    @property
    def mode(self) -> str:
        return self._text_of_mode

    def create_table(self, spec: TableSpec) -> Table:
        return Table(self, self._infos.setdefault(spec.name, TableInfo(spec, len(self._infos) + 1, 0)))

    def _ready_to_read(self, *, training: bool = False) -> Session:
        return self._session

    def become_another_client(self) -> None:
        """Has a new session, as after a restore."""
        self._client = cast(Session, StandInSession()), cast(Pusher, QuietPusher())

    def wait_for_pulls_ahead(self, num_pulls: int) -> None:
        """Waits until so many pulls ahead have read their rows."""
        wait_for(f"{num_pulls} pulls ahead", lambda: len(self.ahead) == num_pulls)

    def rows(self, wanted: Sequence[tuple[TableInfo, Int64s]]) -> list[Float32s]:
        """Returns rows as they are now."""
        return [
            np.repeat(row_ids.astype(np.float32) + np.float32(self.clock), info.spec.dim).reshape(-1, info.spec.dim)
            for info, row_ids in wanted
        ]


def stand_in(monkeypatch: pytest.MonkeyPatch, mode: str = "async") -> StandInCluster:
    """Makes one from which forwards and prefetches read instead of from shards."""
    made = StandInCluster(mode)

    def listed(wanted: Sequence[tuple[TableInfo, Int64s]]) -> list[int]:
        return sorted(int(row_id) for _, row_ids in wanted for row_id in row_ids)

    class Pending:
        versions = ("version",)

        def __init__(self, wanted: Sequence[tuple[TableInfo, Int64s]]) -> None:
            self._rows = made.rows(wanted)
            made.ahead.append(listed(wanted))

        def result(self) -> list[Float32s]:
            assert made.gate.wait(60)
            if made.fails_ahead:
                raise ShardUnreachable("no shard")
            return self._rows

    def read(
        session: Session, wanted: Sequence[tuple[TableInfo, Int64s]], *, training: bool = False, behind: int = 0
    ) -> list[Float32s]:
        assert not behind, "nothing is under way"
        made.pulled.append(listed(wanted))
        made.training.append(training)
        return made.rows(wanted)

    def later(session: Session, wanted: Sequence[tuple[TableInfo, Int64s]], *, training: bool = False) -> Pending:
        assert not training, "a pull ahead waits for no step"
        return Pending(wanted)

    def changed(
        session: Session,
        wanted: Sequence[tuple[TableInfo, Int64s]],
        versions: object,
        rows: Sequence[Float32s],
        *,
        training: bool = False,
        behind: int = 0,
    ) -> int:
        assert not behind, "nothing is under way"
        assert versions == ("version",)
        made.refreshed.append(listed(wanted))
        made.training.append(training)
        for old, new in zip(rows, made.rows(wanted), strict=True):
            old[...] = new
        return 0

    monkeypatch.setattr("shardam._own_reads.read_weights", read)
    monkeypatch.setattr("shardam._own_reads.read_changed", changed)
    monkeypatch.setattr("shardam._foreseen.read_weights_later", later)
    return made
