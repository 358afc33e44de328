"""A client with a queue of changes on scripted shards, and the changes that tests send through it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from shardam._arrays import Int64s
from shardam._group import GroupOptions
from shardam._parts import PushChange, RowWrite, TableStepGradient, assign_change, delete_change, push_change
from shardam._pusher import Pusher
from shardam._session import Session
from shardam._steps import StepChange, StepKind, step_change
from shardam_kernels.factors import AdamOptions
from shardam_proto.routing import RouteMap
from shardam_testing.scripted_shards import INFO, Ending, ScriptedShard, scripted_session


@dataclasses.dataclass
class ScriptedClient:
    """A client and its shards."""

    session: Session
    shards: list[ScriptedShard]
    pusher: Pusher

    def ids_of(self, shard: int, count: int = 2) -> Int64s:
        """Ids that a shard owns."""
        return ids_of_shard(shard, count, len(self.shards))

    def push_of(self, row_ids: Int64s, value: float = 1.0, dim: int = 2) -> PushChange:
        """A push of one table."""
        gradients = np.full((row_ids.size, dim), value, np.float32)
        step = TableStepGradient("t", INFO.table_id, row_ids, gradients, AdamOptions())
        return push_change([step], self.session.route_map)

    def push(self, shard: int, count: int = 2) -> PushChange:
        """Pushes rows of one shard and waits."""
        change = self.push_of(self.ids_of(shard, count))
        self.pusher.run(change)
        return change

    def queue(self, shard: int, count: int = 2) -> None:
        """Queues a push of rows of one shard."""
        self.pusher.submit(self.push_of(self.ids_of(shard, count)))

    def step_of(self, shard: int, kind: StepKind = "gradient") -> StepChange:
        """What a step with rows of one shard sends in the client's mode."""
        gradients = np.ones((2, 2), np.float32)
        sections = [TableStepGradient("t", INFO.table_id, self.ids_of(shard), gradients, AdamOptions())]
        change = step_change(self.session, sections if kind == "gradient" else [], kind)
        if change is None:
            raise AssertionError(f"a step of kind {kind} sends nothing here")
        return change

    def step(self, shard: int = 0, kind: StepKind = "gradient") -> StepChange:
        """Makes a step and waits for its end."""
        change = self.step_of(shard, kind)
        self.pusher.run(change)
        return change

    def queue_step(self, shard: int = 0, kind: StepKind = "gradient") -> None:
        """Queues a step."""
        self.pusher.submit(self.step_of(shard, kind))

    def assign(self, row_ids: Int64s) -> int:
        """Assigns rows and waits; returns how many were written."""
        write = RowWrite(row_ids, np.ones((row_ids.size, 2), np.float32), None, None, if_absent=False)
        change = assign_change("t", INFO.table_id, write, self.session.route_map)
        self.pusher.run(change)
        return sum(answer.num_assigned for answer in change.answers.values())

    def delete(self, row_ids: Int64s) -> int:
        """Deletes rows and waits; returns how many existed."""
        change = delete_change("t", INFO.table_id, row_ids, self.session.route_map)
        self.pusher.run(change)
        return sum(answer.num_deleted for answer in change.answers.values())

    def endings(self) -> list[list[Ending]]:
        """How the numbers ended, by shard."""
        return [shard.closed for shard in self.shards]


def ids_of_shard(shard: int, count: int = 2, num_shards: int = 3) -> Int64s:
    """Returns the first ids that a shard owns."""
    row_ids = np.arange(20 * count * num_shards, dtype=np.int64)
    owned: Int64s = row_ids[RouteMap(1, num_shards).shards_of(row_ids) == shard][:count]
    return owned


def pushed(*numbers: int) -> list[Ending]:
    """Returns these numbers, ended as pushes."""
    return [(number, "push", [INFO.table_id]) for number in numbers]


@contextlib.contextmanager
def scripted_client(
    count: int,
    shard_timeout_s: float = 20.0,
    client_lease_s: float = 30.0,
    group: GroupOptions | None = None,
    chunk_bytes: int | None = None,
) -> Iterator[ScriptedClient]:
    """Starts scripted shards and a client on them, a member of a group if one is given; ends all."""
    with scripted_session(count, shard_timeout_s, client_lease_s, group, chunk_bytes) as (session, shards):
        pusher = Pusher(session)
        try:
            yield ScriptedClient(session, shards, pusher)
        finally:
            pusher.close()
