"""What requests of members wait for on a shard: the step before theirs (sync), or members that are too far behind (bounded)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from shardam_proto.errors import ShardNotReady
from shardam_proto.v1 import common_pb2
from shardam_server.shard.groups.clocks import clock_of, ranks_behind, slowest_clock
from shardam_server.shard.groups.entries import GroupEntry
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.state import ShardState


@dataclasses.dataclass(frozen=True)
class Passage:
    """A request need not wait.

    Attributes:
        staleness: of a pull in a bounded group: steps that the slowest member is behind the client; None: of anything else.
    """

    staleness: int | None = None


PassageOf = Callable[[ShardState, common_pb2.RequestHeader], Passage | None]
"""Says whether a request may go on, by its header; None: it waits. Raises why it never will."""


def change_passage(state: ShardState, header: common_pb2.RequestHeader) -> Passage | None:
    """Lets a change go on once the step before its own is carried out here. One that will be refused is not kept waiting."""
    client = state.clients.find(header.client_id)
    found = state.groups.of_client(header.client_id) if header.step else None
    if found is None or client is None or client.closed:
        return Passage()
    entry, _ = found
    return _after_step(entry, header) if entry.group.terms.mode == "sync" else Passage()


def pull_passage(state: ShardState, header: common_pb2.RequestHeader) -> Passage | None:
    """Lets a pull go on once the step before its own is carried out here, or no member is too far behind.

    Raises:
        ClientClosed: its client is unknown, or has left or was dropped.
        NotAMember: it is a training pull, and its client a member of no group.
    """
    if not header.step:
        return Passage()
    state.clients.get(header.client_id)
    entry, member = state.groups.require_member(header.client_id)
    if entry.group.terms.mode == "sync":
        return _after_step(entry, header)
    staleness = max(0, clock_of(state, member) - slowest_clock(state, entry.group))
    return Passage(staleness) if staleness <= entry.group.terms.max_staleness else None


def _after_step(entry: GroupEntry, header: common_pb2.RequestHeader) -> Passage | None:
    return Passage() if entry.step >= header.step - 1 else None


def waits_for(state: ShardState, header: common_pb2.RequestHeader) -> dict[str, str]:
    """Returns whom a training pull of a bounded group's member waits for, as an error's metadata; empty: nobody."""
    found = state.groups.of_client(header.client_id) if header.step else None
    if found is None or found[0].group.terms.mode != "bounded":
        return {}
    ranks, absent = ranks_behind(state, found[0].group, found[1])
    lists = {"missing_ranks": ranks, "absent_ranks": absent}
    return {name: ",".join(map(str, listed)) for name, listed in lists.items() if listed}


def require_passage(passage_of: PassageOf, state: ShardState, header: common_pb2.RequestHeader) -> Passage:
    """Returns the passage of a request that cannot wait: one of a unary call.

    Raises:
        ShardNotReady: it would have to (retryable).
        ShardamError: as passage_of.
    """
    passage = passage_of(state, header)
    if passage is None:
        raise ShardNotReady(
            f"step {header.step} of client {header.client_id.hex()} waits for other members of its group here; try again, or "
            "ask on an Exchange stream, where it can wait",
            metadata={"step": str(header.step)},
        )
    return passage


class StepWaits:
    """Requests that wait for steps. Used on the event loop, where it reads what the sequencer's thread changes.

    Args:
        state: returns the shard's state.
        metrics: of the shard.
    """

    def __init__(self, state: Callable[[], ShardState], metrics: ShardMetrics) -> None:
        self._state = state
        self._metrics = metrics
        self._groups: dict[str, _GroupWaits] = {}

    async def passed(self, passage_of: PassageOf, header: common_pb2.RequestHeader) -> Passage:
        """Waits until a request may go on.

        Raises:
            ShardamError: as passage_of, as soon as that is so.
        """
        found = self._state().groups.of_client(header.client_id)
        if found is None:  # no group is left that it could wait for
            return require_passage(passage_of, self._state(), header)
        name, mode = found[0].group.name, found[0].group.terms.mode
        group = self._groups.get(name)
        if group is None:
            # The mark is older than the first look: what changes in between is seen by the notice that follows it.
            group = self._groups[name] = _GroupWaits(_mark(self._state(), name))
        start = time.perf_counter()
        try:
            return await group.passed(lambda: passage_of(self._state(), header))
        finally:
            if mode == "sync":
                self._metrics.step_wait_seconds.observe(time.perf_counter() - start)
            if group.is_empty:
                self._groups.pop(name, None)

    def notice(self) -> None:
        """Lets requests go on that wait no more; called after each change of the shard's state."""
        for name, group in list(self._groups.items()):
            group.notice(_mark(self._state(), name))


Mark = tuple[int, int, int, int]
"""What requests of a group can wait for: version, step, lowest clock, members whose clients are open."""


def _mark(state: ShardState, name: str) -> Mark | None:
    entry = state.groups.find(name)
    if entry is None:
        return None
    group, clients = entry.group, [state.clients.find(member.client_id) for member in entry.group.members]
    num_open = sum(client is not None and not client.closed for client in clients)
    slowest = slowest_clock(state, group) if group.terms.mode == "bounded" and group.members else 0
    return group.version, entry.step, slowest, num_open


class _GroupWaits:
    """Requests that wait for one group; looked at again only when its mark is another one.

    Args:
        mark: what the group is like.
    """

    def __init__(self, mark: Mark | None) -> None:
        self._mark = mark
        self._waiters: dict[asyncio.Future[Passage], Callable[[], Passage | None]] = {}

    @property
    def is_empty(self) -> bool:
        """True: nothing waits."""
        return not self._waiters

    async def passed(self, look: Callable[[], Passage | None]) -> Passage:
        """Waits until a look finds that a request may go on; raises what it raises."""
        passage = look()
        if passage is not None:
            return passage
        waiter: asyncio.Future[Passage] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = look
        try:
            return await waiter
        finally:
            del self._waiters[waiter]

    def notice(self, mark: Mark | None) -> None:
        """Looks again, in the order in which requests came."""
        if mark == self._mark:
            return
        self._mark = mark
        for waiter, look in list(self._waiters.items()):
            if waiter.done():
                continue
            try:
                passage = look()
            except Exception as error:  # noqa: BLE001 - it is the waiter's, whoever made the change
                waiter.set_exception(error)
            else:
                if passage is not None:
                    waiter.set_result(passage)
