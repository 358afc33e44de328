"""A move of scripted shards to another number of shards, as home does it: held, brought to one number, and begun anew."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from shardam_proto.registry import ClusterView
from shardam_testing.scripted_client import ScriptedClient
from shardam_testing.scripted_shards import ScriptedShard, view_of
from shardam_testing.waiting import wait_for


@dataclasses.dataclass
class Registry:
    """What Redis would say.

    Attributes:
        view: the cluster now.
    """

    view: ClusterView


@dataclasses.dataclass
class Resharding:
    """Moves a client's cluster.

    Attributes:
        client: the client.
        registry: where it looks its shards up.
        former: shards of former maps, stopped.
    """

    client: ScriptedClient
    registry: Registry
    former: list[ScriptedShard] = dataclasses.field(default_factory=list)

    def hold(self) -> int:
        """Holds changes on all shards and brings them to one number, which is returned; the client goes on sending."""
        shards = self.client.shards
        for shard in shards:
            with shard.lock:
                shard.held_after = shard.last
        target = max(shard.last for shard in shards)
        for shard in shards:
            shard.held_after = target
        wait_for("all shards to have the same number", lambda: all(shard.last == target for shard in shards))
        return target

    def release(self) -> None:
        """Goes on with the former shards."""
        for shard in self.client.shards:
            shard.held_after = None

    def new_shards(self, count: int, last: int) -> list[ScriptedShard]:
        """Returns shards of the next map, not started: they know the client's numbers up to the last."""
        former = self.client.shards[0]
        shards = [
            ScriptedShard(
                index,
                incarnation=former.incarnation + 1000 + index,
                lineage=former.lineage + 1000 + index,
                epoch=former.epoch + 1,
                client_id=former.client_id,
                last=last,
                seeded_last=last,
                client_lease_s=former.client_lease_s,
            )
            for index in range(count)
        ]
        if former.group is not None:
            group = former.group.moved_to(shards)
            for shard in shards:
                shard.group = group
        return shards

    def replace(self, shards: list[ScriptedShard]) -> None:
        """Stops the former shards and starts others; Redis shows them, first without, then with them being ready."""
        former = self.client.shards
        self.former += former
        self.client.shards = shards
        for shard in former:
            shard.stop()
        for shard in shards:
            shard.start()
        self.registry.view = view_of(shards)

    def reshard(self, count: int) -> int:
        """Moves to so many shards; returns the last number that the new ones know."""
        last = self.hold()
        self.replace(self.new_shards(count, last))
        return last

    def applied(self) -> dict[int, list[list[int]]]:
        """Returns what was applied under each number, one list for each shard that applied it."""
        found: dict[int, list[list[int]]] = {}
        for shard in (*self.former, *self.client.shards):
            for number, row_ids in shard.applied.items():
                found.setdefault(number, []).append(row_ids)
        return found


@contextlib.contextmanager
def resharding(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resharding]:
    """Has a client look its shards up where moves are noted; ends the shards of the last one."""
    registry = Registry(view_of(client.shards))
    monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: registry.view)
    moves = Resharding(client, registry)
    first = list(client.shards)
    try:
        yield moves
    finally:
        client.pusher.close()
        client.session.close()
        for shard in client.shards:
            if shard not in first:
                shard.stop()
