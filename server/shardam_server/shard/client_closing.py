"""Home's closing of clients that left or fell silent: on all shards, and to the same last number (PROTOCOL.md, section 4).

A push cut off by its worker's death may be on some shards only. Home ends the client everywhere, learns how its last numbers
ended, and has the shards that lack some of them close these without their change. Then the client is settled: home tells the
other shards so, and notes it last. What is written on the way makes every part of it repeatable: a restarted home begins again
with each client that is closed and not settled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shardam_proto.errors import ShardamError
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.background import Background
from shardam_server.shard.clients import check_client_id
from shardam_server.shard.context import ShardContext
from shardam_server.shard.last_numbers import HOME, Closing, LastNumbers, Settlement, closed_numbers, settle_here
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peer_lanes import PeerLane

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_WAIT_S = 1.5
"""A client that leaves is answered after this time even if a shard is down: REST gives up after 2 s, a worker after 5 s."""

LONGEST_WAIT_S = 2.0
"""Longest wait between two tries on a shard that fails (DESIGN.md, section 4)."""


class ClientCalls(Protocol):
    """What closing asks of other shards; `Peers` has it."""

    async def end_client(self, peer: ShardEntry, client_id: bytes) -> shard_pb2.EndClientResponse:
        """Ends a client on a peer, or raises ShardamError."""
        ...

    async def settle_client(
        self, peer: ShardEntry, client_id: bytes, numbers: Sequence[shard_pb2.ClosedNumber], *, settled: bool = False
    ) -> None:
        """Closes numbers of an ended client on a peer, says whether it is settled then, or raises ShardamError."""
        ...


class Groups(Protocol):
    """What closing tells groups of workers; `HomeGroups` has it."""

    async def release(self, client_id: bytes, end: Callable[[], T]) -> T:
        """Takes a client out of its group and ends it here, with no other change in between.

        Args:
            client_id: the client.
            end: ends it; on the sequencer's thread.

        Raises:
            ShardamError: one of the two could not be recorded.
        """
        ...

    async def told(self, index: int) -> None:
        """Waits until a shard has carried out every step that was decided: a client may be ended there only then."""
        ...


class ClientClosing:
    """Closes clients; on home alone. Used on the event loop.

    Args:
        shard: home.
        calls: calls the other shards.
        directory: knows where they are.
        groups: groups of workers.
    """

    def __init__(self, shard: ShardContext, calls: ClientCalls, directory: PeerDirectory, groups: Groups) -> None:
        self._shard = shard
        self._calls = calls
        self._directory = directory
        self._groups = groups
        self._closings: dict[bytes, Closing] = {}
        self._lanes: dict[int, PeerLane[bytes]] = {}
        self._background = Background()

    async def start(self) -> None:
        """Begins to call, and goes on with clients that an earlier process life ended and did not settle.

        Raises:
            ShardamError: the other shards' number is not known yet.
        """
        if len(self._shards()) == 1:
            return
        await self._directory.refresh()
        for index in self._shards():
            self._background.start(self._lane(index).run())
        await self.take_up()

    async def take_up(self) -> None:
        """Begins to close clients that are ended here and not settled, and that nobody closes yet."""
        if not self._background.running:
            return
        for client_id, numbers in await self._shard.sequencer.change(self._unsettled):
            if client_id not in self._closings:
                self._begin(client_id, numbers)

    @property
    def num_open(self) -> int:
        """Clients that are being closed."""
        return len(self._closings)

    async def stop(self) -> None:
        """Ends the calls; what is not settled waits for the next start."""
        await self._background.stop()
        for closing in self._closings.values():
            closing.ended.set()  # nobody waits for it here any longer
        self._closings, self._lanes = {}, {}

    async def close(self, client_id: bytes, *, wait_s: float = 0.0) -> None:
        """Ends a client here and begins to close it on all shards; may be repeated.

        Args:
            client_id: the client.
            wait_s: how long to wait until it is ended on all shards.

        Raises:
            BadOption: no client id.
            ShardamError: it could not be recorded that it is ended; nothing was begun.
        """
        check_client_id(client_id)
        alone = len(self._shards()) == 1

        def end() -> LastNumbers:
            return LastNumbers.of(self._shard.state.end_client(client_id, settled=alone, remember=True))

        numbers = await self._groups.release(client_id, end)
        if numbers.settled:
            return
        closing = self._closings.get(client_id) or self._begin(client_id, numbers)
        if wait_s and self._background.running:
            try:
                await asyncio.wait_for(closing.ended.wait(), wait_s)
            except TimeoutError:
                logger.debug("client %s is not ended on all shards yet", client_id.hex())

    def _begin(self, client_id: bytes, numbers: LastNumbers) -> Closing:
        closing = self._closings[client_id] = Closing(client_id, self._shards())
        closing.answer(HOME, numbers)
        for index in self._shards():
            self._lane(index).add(client_id)
        return closing

    async def _attend(self, index: int, client_id: bytes) -> None:
        """Does what a client's closing asks of one shard next; nothing if there is nothing.

        Raises:
            ShardamError: it could not be done; try again.
        """
        closing = self._closings.get(client_id)
        if closing is None:
            return
        self._shard.tenure.check()  # another process may be home by now
        entry = self._shard.state.clients.find(client_id)
        if entry is not None and entry.settled:  # by a shard that was told to forget its state
            self._end_closing(closing)
            return
        if not closing.has_answered(index):
            await self._end(index, closing)
        elif numbers := closing.lacking(index):
            await self._settle(index, closing, numbers)
        elif closing.may_tell(index):
            await self._tell(index, closing)
        else:
            return
        for other in self._shards():
            if closing.lacking(other) or closing.may_tell(other):
                self._lane(other).add(client_id)

    async def _end(self, index: int, closing: Closing) -> None:
        await self._groups.told(index)
        answer = await self._calls.end_client(self._directory.entry(index), closing.client_id)
        closing.answer(index, LastNumbers.from_message(answer))

    async def _settle(self, index: int, closing: Closing, numbers: Settlement) -> None:
        client_id, first, last = closing.client_id, min(numbers), max(numbers)
        try:
            if index == HOME:
                await self._shard.change_now(lambda: settle_here(self._shard.state, client_id, numbers.items()))
            else:
                await self._calls.settle_client(self._directory.entry(index), client_id, closed_numbers(numbers))
        except ShardamError:
            if index != HOME:
                closing.ask_again(index)
            raise
        closing.settle(index, last)
        logger.info("shard %d closed numbers %d to %d of client %s", index, first, last, client_id.hex())

    async def _tell(self, index: int, closing: Closing) -> None:
        """Notes on a shard that the client is settled; home's note ends the closing."""
        client_id = closing.client_id
        if index != HOME:
            try:
                await self._calls.settle_client(self._directory.entry(index), client_id, [], settled=True)
            except ShardamError:
                closing.ask_again(index)
                raise
            closing.tell(index)
            return
        for problem in closing.problems():
            logger.error("%s", problem)
        await self._shard.change(lambda: self._shard.state.end_client(client_id, settled=True))
        self._end_closing(closing)

    def _end_closing(self, closing: Closing) -> None:
        self._closings.pop(closing.client_id, None)
        closing.ended.set()

    def _unsettled(self) -> list[tuple[bytes, LastNumbers]]:
        entries = self._shard.state.clients
        return [(client_id, LastNumbers.of(entry)) for client_id, entry in entries if entry.closed and not entry.settled]

    def _shards(self) -> range:
        return range(self._shard.identity.require_cluster().num_shards)

    def _lane(self, index: int) -> PeerLane[bytes]:
        if index not in self._lanes:
            self._lanes[index] = PeerLane(
                index,
                functools.partial(self._attend, index),
                self._directory.refresh,
                lambda _: "closing clients",
                LONGEST_WAIT_S,
            )
        return self._lanes[index]
