"""How the other shards are brought level before a shard starts empty, so that it may take over their table steps.

A shard without state has no numbers: home could not close those that a client left half pushed there, nor know which of them
its table steps hold already. So every client of before is ended everywhere first, and its numbers are made equal on the shards
that have them (PROTOCOL.md, section 4). No such client could go on anyway: its rows on the empty shard are gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from shardam_proto.errors import ShardamError, ShardNotReady
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.last_numbers import HOME, Closing, LastNumbers, closed_numbers
from shardam_server.shard.state import ShardState

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ROUNDS = 10
"""Clients that connect and push while shards are brought level cost another round; a shard that is LOST lets hardly any."""

CALLS_AT_ONCE = 32
"""Calls on one shard that are under way at a time; thousands of clients are told in seconds, and no queue grows."""


class LevelingCalls(Protocol):
    """What leveling asks of other shards; `Peers` has it."""

    async def end_clients(self, peer: ShardEntry) -> list[shard_pb2.EndedClient]:
        """Ends all clients on a peer, or raises ShardamError."""
        ...

    async def settle_client(
        self, peer: ShardEntry, client_id: bytes, numbers: Sequence[shard_pb2.ClosedNumber], *, settled: bool = False
    ) -> None:
        """Closes numbers of an ended client on a peer, says whether it is settled then, or raises ShardamError."""
        ...

    async def table_steps(self, peer: ShardEntry) -> dict[int, int]:
        """Returns a peer's table steps by table id, or raises ShardamError."""
        ...


@dataclasses.dataclass(frozen=True)
class Level:
    """What shards have in common once they are level.

    Attributes:
        client_ids: clients that were ended and have numbers.
        steps: table steps by table id, with all of these numbers.
    """

    client_ids: frozenset[bytes]
    steps: Mapping[int, int]


def take_over(state: ShardState, level: Level) -> None:
    """Gives an empty state the others' table steps, and the clients whose numbers are in them: none is closed here once more.

    Raises:
        JournalFailed, JournalFull: it could not be recorded; it may be repeated.
    """
    for client_id in level.client_ids:
        state.end_client(client_id, settled=True, remember=True)
    state.raise_steps(level.steps)


class Leveling:
    """Brings shards level. Every part may be repeated.

    Args:
        calls: calls the shards.
        peers: all shards but the one that starts empty.
    """

    def __init__(self, calls: LevelingCalls, peers: Sequence[ShardEntry]) -> None:
        self._calls = calls
        self._peers = {peer.index: peer for peer in peers}

    async def run(self) -> Level:
        """Ends all clients, makes their numbers equal, and reads the table steps.

        Raises:
            ShardNotReady: a shard did not do it; or clients kept pushing.
        """
        client_ids: set[bytes] = set()
        steps: dict[int, int] | None = None
        for _ in range(MAX_ROUNDS):
            closings = await self._end()
            new = closings.keys() - client_ids
            if steps is not None and not new:
                return Level(frozenset(client_ids), steps)
            for closing in closings.values():
                await self._make_equal(closing)
            client_ids |= new
            steps = await self._read_steps()
        raise ShardNotReady("clients keep connecting and pushing to the other shards: stop them and try again")

    async def settle(self, level: Level) -> None:
        """Tells the shards that the clients are settled; home last, as when it closes clients.

        Raises:
            ShardNotReady: a shard could not be told.
        """
        free = asyncio.Semaphore(CALLS_AT_ONCE)

        async def tell(peer: ShardEntry, client_id: bytes) -> None:
            async with free:
                await self._ask(peer, lambda: self._calls.settle_client(peer, client_id, [], settled=True))

        for _, peer in sorted(self._peers.items(), key=lambda item: item[0] == HOME):
            await asyncio.gather(*(tell(peer, client_id) for client_id in level.client_ids))

    async def _end(self) -> dict[bytes, Closing]:
        closings: dict[bytes, Closing] = {}
        told: dict[int, dict[bytes, LastNumbers]] = {}
        for index, peer in self._peers.items():
            ended = await self._ask(peer, lambda peer=peer: self._calls.end_clients(peer))  # type: ignore[misc]
            told[index] = {client.client_id: LastNumbers.from_message(client) for client in ended}
        for client_id in {client_id for clients in told.values() for client_id in clients}:
            closings[client_id] = Closing(client_id, list(self._peers))
            for index, clients in told.items():
                closings[client_id].answer(index, clients.get(client_id, LastNumbers()))
        return closings

    async def _make_equal(self, closing: Closing) -> None:
        while not closing.settled:
            for index, peer in self._peers.items():
                if numbers := closing.lacking(index):
                    closed = closed_numbers(numbers)
                    await self._ask(
                        peer,
                        lambda peer=peer, closed=closed: self._calls.settle_client(peer, closing.client_id, closed),  # type: ignore[misc]
                    )
                    closing.settle(index, max(numbers))
        for problem in closing.problems():
            logger.error("%s", problem)

    async def _read_steps(self) -> dict[int, int]:
        steps: dict[int, int] = {}
        for peer in self._peers.values():
            for table_id, step in (await self._ask(peer, lambda peer=peer: self._calls.table_steps(peer))).items():  # type: ignore[misc]
                steps[table_id] = max(step, steps.get(table_id, 0))
        return steps

    async def _ask(self, peer: ShardEntry, action: Callable[[], Awaitable[T]]) -> T:
        try:
            return await action()
        except ShardamError as error:
            raise ShardNotReady(
                f"shard {peer.index} has to be level with the others before a shard can start empty, and it has not answered "
                f"({error.message}): wait until it serves and try again",
                metadata={"shard": str(peer.index)},
            ) from error
