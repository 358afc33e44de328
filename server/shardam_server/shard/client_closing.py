"""Home's closing of clients that left or fell silent: on all shards, and to the same last number (PROTOCOL.md, section 4).

A push cut off by its worker's death may be on some shards only. Home ends the client everywhere, learns how its last numbers
ended, and has the shards that lack some of them close these without their change. What is written on the way makes every part
of it repeatable: a restarted home begins again with each client that is closed and not settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from shardam_proto.errors import ShardamError
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.background import Background
from shardam_server.shard.clients import check_client_id
from shardam_server.shard.context import ShardContext
from shardam_server.shard.last_numbers import Closing, LastNumbers, Settlement, closed_numbers, settle_here
from shardam_server.shard.lineages import SeenLineages
from shardam_server.shard.peer_directory import PeerDirectory

logger = logging.getLogger(__name__)

HOME = 0
"""Index of the shard that closes clients."""

LEAVE_WAIT_S = 1.5
"""A client that leaves is answered after this time even if a shard is down: REST gives up after 2 s, a worker after 5 s."""

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0
"""Waits between two tries on a shard that fails double from the first to the longest (DESIGN.md, section 4: cap 2 s)."""

LOOK_EVERY_S = 1.0
"""A shard that starts empty is noticed after this time, before many clients have opened there."""


class ClientCalls(Protocol):
    """What closing asks of other shards; `Peers` has it."""

    async def end_client(self, peer: ShardEntry, client_id: bytes) -> shard_pb2.EndClientResponse:
        """Ends a client on a peer, or raises ShardamError."""
        ...

    async def settle_client(self, peer: ShardEntry, client_id: bytes, numbers: Sequence[shard_pb2.ClosedNumber]) -> None:
        """Closes numbers of an ended client on a peer, or raises ShardamError."""
        ...


class ClientClosing:
    """Closes clients; on home alone. Used on the event loop.

    Args:
        shard: home.
        calls: calls the other shards.
        directory: knows where they are.
    """

    def __init__(self, shard: ShardContext, calls: ClientCalls, directory: PeerDirectory) -> None:
        self._shard = shard
        self._calls = calls
        self._directory = directory
        self._lineages = SeenLineages()
        self._closings: dict[bytes, Closing] = {}
        self._lanes: dict[int, _Lane] = {}
        self._background = Background()

    async def start(self) -> None:
        """Begins to call, and goes on with clients that an earlier process life ended and did not settle.

        Raises:
            ShardamError: the other shards' number is not known yet.
        """
        if len(self._shards()) == 1:
            return
        await self._look_around()
        self._background.start(self._look_around_forever())
        for index in self._shards():
            self._background.start(self._lane(index).run())
        for client_id, numbers in await self._shard.sequencer.change(self._unsettled):
            if client_id not in self._closings:
                self._begin(client_id, numbers)

    async def stop(self) -> None:
        """Ends the calls; what is not settled waits for the next start."""
        await self._background.stop()

    async def _look_around_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look_around()

    async def _look_around(self) -> None:
        """Reads where the other shards are, and notices those that have given their state up."""
        await self._directory.refresh()
        for entry in self._directory.entries():
            if entry.ready and entry.index != HOME:
                await self._note_lineage(entry.index, entry.lineage)

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

        def end() -> LastNumbers | None:
            entry = self._shard.state.end_client(client_id, settled=alone)
            return None if entry is None else LastNumbers.of(entry)

        numbers = await self._shard.change(end)
        if alone:
            return
        closing = self._closings.get(client_id) or self._begin(client_id, numbers)
        if wait_s and self._background.running:
            try:
                await asyncio.wait_for(closing.ended.wait(), wait_s)
            except TimeoutError:
                logger.debug("client %s is not ended on all shards yet", client_id.hex())

    def _begin(self, client_id: bytes, numbers: LastNumbers | None) -> Closing:
        closing = self._closings[client_id] = Closing(client_id, self._shards())
        # A home that does not know the client has lost the state that its numbers were part of.
        closing.answer(HOME, numbers or LastNumbers(), pass_over=numbers is None)
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
        if not closing.has_answered(index):
            await self._end(index, closing)
        elif numbers := closing.lacking(index):
            await self._settle(index, closing, numbers)
        elif index == HOME and closing.settled:
            await self._finish(closing)
            return
        else:
            return
        for other in self._shards():
            if closing.lacking(other) or (other == HOME and closing.settled):
                self._lane(other).add(client_id)

    async def _end(self, index: int, closing: Closing) -> None:
        answer = await self._calls.end_client(self._directory.entry(index), closing.client_id)
        await self._note_lineage(index, answer.header.lineage)
        given_up = not answer.last_number and self._lineages.has_given_up(index, closing.client_id)
        closing.answer(index, LastNumbers.from_message(answer), pass_over=given_up)

    async def _settle(self, index: int, closing: Closing, numbers: Settlement) -> None:
        client_id, first, last = closing.client_id, min(numbers), max(numbers)
        try:
            if index == HOME:
                await self._shard.change(lambda: settle_here(self._shard.state, client_id, numbers.items()))
            else:
                await self._calls.settle_client(self._directory.entry(index), client_id, closed_numbers(numbers))
        except ShardamError:
            if index != HOME:
                closing.ask_again(index)
            raise
        closing.settle(index, last)
        logger.info("shard %d closed numbers %d to %d of client %s", index, first, last, client_id.hex())

    async def _finish(self, closing: Closing) -> None:
        client_id = closing.client_id
        for index, (first, last) in closing.unknown().items():
            logger.error(
                "numbers %d to %d of client %s are missing on shard %d, and no shard remembers all of them: its table steps "
                "stay behind those of other shards",
                first,
                last,
                client_id.hex(),
                index,
            )
        await self._shard.change(lambda: self._shard.state.end_client(client_id, settled=True))
        self._closings.pop(client_id, None)
        self._lineages.forget(client_id)

    async def _note_lineage(self, index: int, lineage: int) -> None:
        """Notices a shard that started empty: it took over table steps, and with them all numbers of the clients of then."""
        if not self._lineages.note(index, lineage):
            return
        self._lineages.give_up(index, await self._shard.sequencer.change(self._known_clients))
        for client_id, closing in self._closings.items():
            closing.ask_again(index)
            self._lane(index).add(client_id)

    def _known_clients(self) -> list[bytes]:
        return [client_id for client_id, entry in self._shard.state.clients if not entry.settled]

    def _unsettled(self) -> list[tuple[bytes, LastNumbers]]:
        entries = self._shard.state.clients
        return [(client_id, LastNumbers.of(entry)) for client_id, entry in entries if entry.closed and not entry.settled]

    def _shards(self) -> range:
        return range(self._shard.identity.require_cluster().num_shards)

    def _lane(self, index: int) -> _Lane:
        if index not in self._lanes:
            self._lanes[index] = _Lane(index, lambda client_id: self._attend(index, client_id), self._look_around)
        return self._lanes[index]


class _Lane:
    """What all closings ask of one shard: one thing at a time, so that a shard that is down costs one call now and then.

    Args:
        index: the shard's.
        attend: does what a client's closing asks of the shard next.
        look_around: called after a failure: the shard may be elsewhere now.
    """

    def __init__(
        self,
        index: int,
        attend: Callable[[bytes], Coroutine[None, None, None]],
        look_around: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        self._index = index
        self._attend = attend
        self._look_around = look_around
        self._waiting: dict[bytes, None] = {}  # in order
        self._wake = asyncio.Event()

    def add(self, client_id: bytes) -> None:
        """Has a client attended to after those before it."""
        self._waiting[client_id] = None
        self._wake.set()

    async def run(self) -> None:
        """Attends to clients for ever; one that fails goes behind the others."""
        wait_s = FIRST_WAIT_S
        while True:
            await self._wake.wait()
            if not self._waiting:
                self._wake.clear()
                continue
            client_id = next(iter(self._waiting))
            del self._waiting[client_id]
            try:
                await self._attend(client_id)
                wait_s = FIRST_WAIT_S
            except ShardamError as error:
                if wait_s == FIRST_WAIT_S:
                    logger.warning("closing clients waits for shard %d: %s", self._index, error.message)
                self.add(client_id)
                await asyncio.sleep(wait_s)
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
                await self._look_around()
