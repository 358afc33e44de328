"""Home's groups: it takes members in and lets them go, and tells every shard (PROTOCOL.md, section 5).

Who may join is in roster.py, how a group's steps are decided in steps.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shardam_proto.errors import BadOption
from shardam_proto.schema import check_name
from shardam_proto.v1 import embedding_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups import roster
from shardam_server.shard.groups.arrivals import missing_ranks
from shardam_server.shard.groups.changes import set_group
from shardam_server.shard.groups.clocks import slowest_clock
from shardam_server.shard.groups.delivery import Delivery
from shardam_server.shard.groups.messages import decode_terms
from shardam_server.shard.groups.pending import PendingSteps
from shardam_server.shard.groups.steps import STEP_TIMEOUT_S, HomeSteps
from shardam_server.shard.groups.values import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")

TELL_WAIT_S = 5.0
"""A join waits this long for all shards to know the member, then has itself repeated."""


class HomeGroups:
    """All groups of a cluster, on home. Used on the event loop.

    Args:
        shard: home.
        delivery: tells the other shards.
        step_timeout_s: how long a step waits for its ranks once one has arrived.

    Attributes:
        close_client: closes a client on all shards; set by whoever makes both.
        steps: their steps.
    """

    def __init__(self, shard: ShardContext, delivery: Delivery, step_timeout_s: float = STEP_TIMEOUT_S) -> None:
        self.close_client: Callable[[bytes], Awaitable[None]] = _nobody
        self._shard = shard
        self._delivery = delivery
        self._pending = PendingSteps()
        self._lock = asyncio.Lock()
        self.steps = HomeSteps(shard, delivery, self._pending, self._lock, self._close, step_timeout_s)

    async def start(self) -> None:
        """Begins; on another shard than home there is nothing to do.

        Raises:
            ShardamError: as Delivery.start.
        """
        if not self._shard.identity.is_home:
            return
        await self._delivery.start()
        await self.let_closed_go()
        self.steps.start()

    async def stop(self) -> None:
        """Ends; may be called without start."""
        await self.steps.stop()
        await self._delivery.stop()

    async def _close(self, client_id: bytes) -> None:
        await self.close_client(client_id)

    # -- members

    async def join(self, request: embedding_pb2.JoinGroupRequest) -> int:
        """Takes a client into a group and tells every shard; may be repeated. Returns its first step.

        Raises:
            WrongRole: this shard is not home.
            GroupMismatch: as roster.join.
            ClientClosed: the client is not open here.
            ShardNotReady: not every shard could be told yet; repeat it.
            BadOption: a name, rank or term that cannot be, or a client without heartbeats.
        """
        self._shard.identity.require_home("groups are kept by")
        check_name(request.group, "group name")
        asked = roster.JoinRequest(
            request.header.client_id, request.group, decode_terms(request.terms), request.rank, request.restart_count
        )
        known = self._shard.state.groups.find(asked.group) is not None
        former = (0, 0) if known else await self._delivery.former(asked.group)  # what home alone changes
        async with self._lock:
            joined = await self._shard.change(lambda: self._join(asked, *former))
        self._pending.of(asked.group).forget(joined.superseded)
        for client_id in joined.superseded:
            logger.info("client %s has been replaced in group %r", client_id.hex(), asked.group)
            await self.close_client(client_id)
        self._delivery.tell(asked.group)
        self.steps.reconsider(asked.group)
        await self._delivery.told_all(TELL_WAIT_S)
        member = joined.group.member(asked.client_id)
        if member is None:
            raise AssertionError("a group has no place for the client that joined it")
        return member.first_step

    def _join(self, asked: roster.JoinRequest, former_version: int, former_step: int) -> roster.Joined:
        """Joins, on the sequencer's thread."""
        state = self._shard.state
        if not state.clients.get(asked.client_id).heartbeats:
            raise BadOption("a member of a group sends heartbeats, or a dead one would stop the others; open with heartbeats")
        entry = state.groups.find(asked.group)
        group = Group(asked.group, asked.terms, former_version) if entry is None else entry.group
        step = former_step if entry is None else entry.step
        begins_after = step
        if asked.terms.mode == "bounded":
            begins_after = slowest_clock(state, group) if group.members else 0
        others = [other.group for other in state.groups if other.group.name != asked.group]
        joined = roster.join(group, others, asked, begins_after + 1, self._silences(group))
        if joined.group is not group:
            set_group(state, joined.group, step)
            logger.info(
                "client %s joins group %r (%s) as rank %d (restarts %d), for step %d",
                asked.client_id.hex(),
                asked.group,
                asked.terms,
                asked.rank,
                asked.restart_count,
                begins_after + 1,
            )
        return joined

    def _silences(self, group: Group) -> dict[bytes, float]:
        now, clients = time.monotonic(), self._shard.state.clients
        entries = {member.client_id: clients.find(member.client_id) for member in group.members}
        return {client_id: math.inf if one is None else now - one.last_contact for client_id, one in entries.items()}

    async def release(self, client_id: bytes, end: Callable[[], T]) -> T:
        """Takes a client out of its group and ends it, with no other change in between; its group goes on without it.

        Args:
            client_id: the client.
            end: ends it; on the sequencer's thread.

        Raises:
            ShardamError: one of the two could not be recorded.
        """
        name: str | None = None

        def leave_and_end() -> T:
            nonlocal name
            name = self._leave(client_id)
            return end()

        try:
            async with self._lock:
                return await self._shard.change(leave_and_end)
        finally:
            if name is not None:
                self._go_on_without(name, client_id)

    def _go_on_without(self, name: str, client_id: bytes) -> None:
        pending = self._pending.of(name)
        pending.leaving.discard(client_id)
        pending.forget([client_id])
        self._delivery.tell(name)
        self.steps.reconsider(name)

    def _leave(self, client_id: bytes) -> str | None:
        """Leaves, on the sequencer's thread; returns the group's name."""
        state = self._shard.state
        found = state.groups.of_client(client_id)
        if found is None:
            return None
        entry, member = found
        logger.info("rank %d (client %s) leaves group %r", member.rank, client_id.hex(), entry.group.name)
        set_group(state, roster.leave(entry.group, client_id), entry.step)
        return entry.group.name

    def leaves_later(self, client_id: bytes) -> bool:
        """Notes that a client leaves; True: it has arrived at a step, and is closed once that is decided."""
        found = self._shard.state.groups.of_client(client_id)
        if found is None:
            return False
        pending = self._pending.of(found[0].group.name)
        if client_id not in pending.arrivals:
            return False
        pending.leaving.add(client_id)
        return True

    async def let_closed_go(self) -> None:
        """Takes out members whose clients were closed otherwise: by a shard that starts empty, or before a crash."""
        if not self._shard.identity.is_home:
            return
        clients = self._shard.state.clients
        members = [member.client_id for entry in self._shard.state.groups for member in entry.group.members]
        for client_id in members:
            entry = clients.find(client_id)
            if entry is None or entry.closed:
                await self.release(client_id, lambda: None)

    async def told(self, index: int) -> None:
        """Waits until a shard has confirmed every decision: a client may be ended there only then."""
        await self._delivery.told(index)

    # -- questions

    def waiting(self) -> list[tuple[Group, int, list[int], float]]:
        """Returns the sync groups whose next step waits: group, step, missing ranks, seconds since the first arrival.

        A group whose ranks all compute keeps nobody waiting. One whose ranks have not all joined waits, whoever has arrived.
        """
        found = []
        for entry in self._shard.state.groups:
            if entry.group.terms.mode == "sync" and entry.group.members:
                pending = self._pending.of(entry.group.name)
                arrived = pending.arrived_at(entry)
                missing = missing_ranks(entry.group, arrived)
                if not missing or not (arrived or entry.group.missing_ranks()):
                    continue
                waited_s = 0.0 if pending.since is None else time.monotonic() - pending.since
                found.append((entry.group, entry.step + 1, missing, waited_s))
        return found

    def has_arrived(self, name: str, client_id: bytes) -> bool:
        """Whether a member waits for its step's decision."""
        return client_id in self._pending.of(name).arrivals


async def _nobody(client_id: bytes) -> None:
    raise AssertionError(f"client {client_id.hex()} cannot be closed: nobody closes clients")
