"""Home and other shards in one process, joined by plain calls: for closing clients without a network."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from shardam_proto.errors import ShardUnreachable
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, shard_pb2
from shardam_server.shard.client_closing import ClientClosing
from shardam_server.shard.clients import Origin
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.changes import check_here
from shardam_server.shard.groups.delivery import Delivery
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.groups.messages import decode_decision, encode_refusal
from shardam_server.shard.last_numbers import LastNumbers, closed_numbers, end_all_here, end_here, settle_here
from shardam_server.shard.leveling import Leveling, take_over
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.services.peer_groups import update_here
from shardam_server.shard.state import ShardState
from shardam_testing.shard_states import MemoryJournal, journaled_state, make_tables, replayed, shard_context, table_steps

SPECS = [TableSpec("first", 2), TableSpec("second", 2)]

AnswerT = TypeVar("AnswerT")

WAIT_S = 30.0
"""Until a test that waits has failed."""


class ShardGroup:
    """Shards 0 to count - 1.

    Attributes:
        down: shards that do not answer.
        refuse_settling: shards that answer, but settle nothing.
        num_refused: how often they did not.
        lose_answers: shards that do what they are asked once, and whose answer is lost.
        calls: (method, shard, client) of each call that arrived.
        step_timeout_s: of the home that is started next.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.states: list[ShardState] = []
        self.journals: list[MemoryJournal] = []
        self.lineages = [100 + index for index in range(count)]
        for _ in range(count):
            state, journal = journaled_state()
            state.install(make_tables(SPECS))
            self.states.append(state)
            self.journals.append(journal)
        self.down: set[int] = set()
        self.refuse_settling: set[int] = set()
        self.num_refused = 0
        self.lose_answers: set[int] = set()
        self.calls: list[tuple[str, int, bytes]] = []
        self.home: ShardContext
        self.step_timeout_s = 600.0
        self.closing: ClientClosing
        self.groups: HomeGroups

    # -- home

    async def start_home(self) -> None:
        """Starts home's closing over its present state."""
        self.home = shard_context(0, self.states[0], num_shards=self.count)
        directory = PeerDirectory(self.view)
        self.groups = HomeGroups(self.home, Delivery(self.home, self, directory), self.step_timeout_s)
        self.closing = ClientClosing(self.home, self, directory, self.groups)
        self.groups.close_client = self.closing.close
        await self.groups.start()
        await self.closing.start()

    async def stop_home(self) -> None:
        await self.closing.stop()
        await self.groups.stop()
        self.home.sequencer.close()

    async def restart_home(self) -> None:
        """Kills home and starts it from its journal."""
        await self.stop_home()
        self.restart(0)
        await self.start_home()

    def restart(self, index: int) -> None:
        """A shard comes back from its journal."""
        self.states[index] = replayed(self.journals[index].records())
        self.states[index].journal = self.journals[index]

    async def start_empty(self, index: int) -> None:
        """A shard that has lost its state is told to forget it."""
        self.down.add(index)
        if index == 0:
            await self.stop_home()
        leveling = Leveling(self, [entry for entry in self.view().shards.values() if entry.index != index])
        level = await leveling.run()
        self.lineages[index] += 100
        self.states[index], self.journals[index] = journaled_state()
        self.states[index].install(make_tables(SPECS))
        take_over(self.states[index], level)
        await leveling.settle(level)
        self.down.remove(index)
        if index == 0:
            await self.start_home()

    def view(self) -> ClusterView:
        entries = {
            index: ShardEntry(index, f"shard-{index}", "", 1, self.lineages[index], "cpu", 1, ready=index not in self.down)
            for index in range(self.count)
        }
        return ClusterView(ClusterEntry("c1", self.count, seed=0), None, entries)

    # -- calls of home to others

    async def end_client(self, peer: ShardEntry, client_id: bytes) -> shard_pb2.EndClientResponse:
        numbers = self._answer("end", peer.index, client_id, lambda: end_here(self.states[peer.index], client_id))
        return shard_pb2.EndClientResponse(
            header=common_pb2.ResponseHeader(lineage=self.lineages[peer.index]),
            last_number=numbers.last_number,
            numbers=closed_numbers(numbers.tables),
            settled=numbers.settled,
        )

    async def end_clients(self, peer: ShardEntry) -> list[shard_pb2.EndedClient]:
        ended: list[shard_pb2.EndedClient] = []

        def end() -> LastNumbers:
            ended.extend(end_all_here(self.states[peer.index], b"")[0])
            return LastNumbers()

        self._answer("end all", peer.index, b"", end)
        if peer.index == 0:
            await self.groups.let_closed_go()
            await self.closing.take_up()
        return ended

    async def table_steps(self, peer: ShardEntry) -> dict[int, int]:
        return table_steps(self.states[peer.index])

    async def settle_client(
        self, peer: ShardEntry, client_id: bytes, numbers: Sequence[shard_pb2.ClosedNumber], *, settled: bool = False
    ) -> None:
        if peer.index in self.refuse_settling:
            self.num_refused += 1
            raise ShardUnreachable(f"shard {peer.index} settles nothing")
        given = [(closed.number, tuple(closed.table_ids)) for closed in numbers]

        def settle() -> LastNumbers:
            settle_here(self.states[peer.index], client_id, given, settled=settled)
            return LastNumbers()

        self._answer("settle", peer.index, client_id, settle)

    async def update_group(self, peer: ShardEntry, request: shard_pb2.UpdateGroupRequest) -> shard_pb2.UpdateGroupResponse:
        state = self.states[peer.index]
        self._answer("update group", peer.index, b"", lambda: update_here(state, request))
        known = state.groups.find(request.group.name)
        return shard_pb2.UpdateGroupResponse(
            version=0 if known is None else known.group.version, step=0 if known is None else known.step
        )

    async def check_step(self, peer: ShardEntry, request: shard_pb2.CheckStepRequest) -> shard_pb2.CheckStepResponse:
        decision = decode_decision(request.decision)
        refusal = self._answer("check step", peer.index, b"", lambda: check_here(self.states[peer.index], decision))
        return shard_pb2.CheckStepResponse(refusal=encode_refusal(refusal))

    def _answer(self, method: str, index: int, client_id: bytes, action: Callable[[], AnswerT]) -> AnswerT:
        if index in self.down:
            raise ShardUnreachable(f"shard {index} is down")
        self.calls.append((method, index, client_id))
        answer = action()
        if index in self.lose_answers:
            self.lose_answers.remove(index)
            raise ShardUnreachable(f"the answer of shard {index} is lost")
        return answer

    # -- what clients do

    def open(self, client_id: bytes, *, shards: Sequence[int] | None = None) -> None:
        for index in range(self.count) if shards is None else shards:
            self.states[index].open_client(client_id, heartbeats=True)

    def step(self, client_id: bytes, number: int, shards: Sequence[int], table_ids: Sequence[int] = (1, 2)) -> None:
        """Has a number stepped on some shards."""
        for index in shards:
            origin = Origin(client_id, number, b"push")
            state = self.states[index]
            state.run_number(origin, lambda state=state, origin=origin: state.void(table_ids, origin))  # type: ignore[misc]

    # -- what a test sees

    def last_numbers(self, client_id: bytes) -> list[int | None]:
        entries = [state.clients.find(client_id) for state in self.states]
        return [None if entry is None else entry.last_number for entry in entries]

    def steps(self) -> list[dict[int, int]]:
        return [table_steps(state) for state in self.states]

    def is_settled(self, client_id: bytes) -> bool:
        entry = self.states[0].clients.find(client_id)
        return entry is not None and entry.settled

    def is_closed(self, client_id: bytes) -> list[bool]:
        entries = [state.clients.find(client_id) for state in self.states]
        return [entry is not None and entry.closed for entry in entries]

    async def until(self, what: str, look: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not look():
            assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
            await asyncio.sleep(0.005)

    async def until_settled(self, *client_ids: bytes) -> None:
        await self.until("the clients to be settled", lambda: all(map(self.is_settled, client_ids)))


@contextlib.asynccontextmanager
async def running_group(count: int) -> AsyncIterator[ShardGroup]:
    """Yields shards whose home closes clients."""
    group = ShardGroup(count)
    await group.start_home()
    try:
        yield group
    finally:
        await group.stop_home()
