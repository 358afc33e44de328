"""Which clients have been silent for too long, and which were idle for a day (PROTOCOL.md, section 4).

Silence counts only while home itself ran: it is added up from home's own ticks, and a long gap between two of them says that
home, not the client, was away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from shardam_proto.errors import ShardamError
from shardam_server.shard.background import Background
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.context import ShardContext
from shardam_server.shard.tenure import boot_seconds

logger = logging.getLogger(__name__)

TICKS_PER_LEASE = 10
"""A client is closed at most a tenth of the lease later than it could be."""

LONGEST_GAP_TICKS = 2.0
"""A gap of more ticks was a pause of home; a busy event loop delays a tick by less than one."""

FORGET_EVERY_S = 600.0
"""Idle entries are kept for a day; ten minutes more do not matter."""


class Silence:
    """Adds up how long each client has not been heard of. Pure but for its clock.

    Args:
        lease_s: silence after which a client counts as gone.
        now: the clock.
    """

    def __init__(self, lease_s: float, now: Callable[[], float] = boot_seconds) -> None:
        self.tick_s = lease_s / TICKS_PER_LEASE
        self._lease_s = lease_s
        self._now = now
        self._last_tick = now()
        self._heard: dict[bytes, tuple[float, float]] = {}  # time of last contact, silence since in ticks' time

    def pause(self) -> None:
        """Passes over the time since the last tick: nobody could be heard."""
        self._last_tick = self._now()

    def tick(self, clients: Iterable[tuple[bytes, ClientEntry]]) -> dict[bytes, float]:
        """Adds the time since the last tick.

        Args:
            clients: all clients of home; those that are open and send heartbeats are watched.

        Returns:
            Clients whose silence is over the lease, and their silence in seconds.
        """
        now = self._now()
        gap_s, self._last_tick = now - self._last_tick, now
        passed_s = gap_s if gap_s <= LONGEST_GAP_TICKS * self.tick_s else self.tick_s
        heard = {}
        for client_id, entry in clients:
            if entry.heartbeats and not entry.closed:
                contact, silence_s = self._heard.get(client_id, (None, 0.0))
                heard[client_id] = entry.last_contact, silence_s + passed_s if contact == entry.last_contact else 0.0
        self._heard = heard
        return {client_id: silence_s for client_id, (_, silence_s) in heard.items() if silence_s > self._lease_s}


class Closes(Protocol):
    """What the watch asks of home's closing of clients; `ClientClosing` has it."""

    async def start(self) -> None:
        """Begins to call other shards."""
        ...

    async def stop(self) -> None:
        """Ends the calls."""
        ...

    async def close(self, client_id: bytes, *, wait_s: float = 0.0) -> None:
        """Ends a client on all shards, or raises ShardamError."""
        ...


class ClientWatch:
    """Closes silent clients (home) and forgets idle ones (every shard), from start to stop. Used on the event loop.

    Args:
        shard: the shard.
        closing: closes clients; not used on other shards than home.
        silence: adds up their silence.
    """

    def __init__(self, shard: ShardContext, closing: Closes, silence: Silence) -> None:
        self._shard = shard
        self._closing = closing
        self._silence = silence
        self._background = Background()

    async def start(self) -> None:
        """Begins; the shard serves.

        Raises:
            ShardamError: as ClientClosing.start.
        """
        self._background.start(self._forget_forever())
        if self._shard.identity.is_home:
            await self._closing.start()
            self._silence.pause()
            self._background.start(self._watch_forever())

    async def stop(self) -> None:
        """Ends; may be called without start."""
        await self._background.stop()
        await self._closing.stop()

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._silence.tick_s)
            if not self._shard.is_serving or self._shard.tenure.suspended:
                self._silence.pause()
                continue
            await self.close_silent()

    async def close_silent(self) -> None:
        """Ticks once, and closes clients whose silence is over the lease."""
        state = self._shard.state
        silent = await self._shard.sequencer.change(lambda: self._silence.tick(state.clients))
        for client_id, silence_s in silent.items():
            try:
                await self._closing.close(client_id)
            except ShardamError as error:
                logger.warning("client %s is silent and cannot be closed yet: %s", client_id.hex(), error.message)
                continue
            self._shard.metrics.clients_dropped.inc()
            logger.info("client %s was silent for %.1f s and is closed", client_id.hex(), silence_s)

    async def _forget_forever(self) -> None:
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            if self._shard.is_serving:
                await self.forget_idle()

    async def forget_idle(self) -> None:
        """Forgets clients without contact for a day; not those that home still has to settle."""
        try:
            num_forgotten = await self._shard.change(self._forget)
        except ShardamError as error:
            logger.warning("idle clients cannot be forgotten yet: %s", error.message)
            return
        if num_forgotten:
            logger.info("forgot %d clients without contact for a day", num_forgotten)

    def _forget(self) -> int:
        state = self._shard.state
        if self._shard.identity.is_home:  # one without numbers here may have some on a shard that is away
            for client_id, entry in state.clients:
                if entry.closed and not entry.settled:
                    state.clients.touch(client_id)
        return state.forget_idle_clients()
