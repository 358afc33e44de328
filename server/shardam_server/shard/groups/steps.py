"""Home's decisions: members arrive at a step, and are answered once it is decided (PROTOCOL.md, section 5).

What follows from who has arrived is in arrivals.py, what a decision does in changes.py; this is when it happens. A decision is
a change of home's own state: once it is durable there, members are answered and the other shards are told.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable

from shardam_proto.errors import GroupMismatch, NotAMember, SequenceError, ShardamError, StaleState
from shardam_proto.v1 import embedding_pb2
from shardam_server.shard.background import Background
from shardam_server.shard.client_liveness import LONGEST_GAP_TICKS
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.arrivals import Arrival, Proposal, give_up, missing_ranks, propose
from shardam_server.shard.groups.changes import check_here, decide
from shardam_server.shard.groups.delivery import Delivery
from shardam_server.shard.groups.messages import decode_refusal, encode_result
from shardam_server.shard.groups.pending import PendingStep, PendingSteps
from shardam_server.shard.groups.values import Decision, Refusal, StepResult

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 600.0
"""How long a step waits for its ranks by default: longer than any evaluation or checkpoint should keep one of them."""

BUDGET_SHARE = 0.8
"""An Arrive is answered after this part of its budget, so that the answer is there before the client gives it up."""

RETRY_S = 0.5
"""A decision that cannot be recorded now is tried again after this time."""

LONGEST_TICK_S = 1.0
"""The clock of steps is looked at this often, or ten times in a shorter time-out."""


class HomeSteps:
    """The steps of sync groups, on home. Used on the event loop.

    Args:
        shard: home.
        delivery: tells the other shards.
        pending: who has arrived.
        lock: held while a group's members or steps change.
        close_client: closes a client on all shards.
        step_timeout_s: how long a step waits for its ranks once one has arrived.
    """

    def __init__(
        self,
        shard: ShardContext,
        delivery: Delivery,
        pending: PendingSteps,
        lock: asyncio.Lock,
        close_client: Callable[[bytes], Awaitable[None]],
        step_timeout_s: float,
    ) -> None:
        self._close_client = close_client
        self._shard = shard
        self._delivery = delivery
        self._pending = pending
        self._lock = lock
        self._step_timeout_s = step_timeout_s
        self._background = Background()
        self._reconsidering: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to watch the time that steps wait."""
        self._background.start(self._watch_steps())

    async def stop(self) -> None:
        """Ends, and forgets who has arrived; may be called without start."""
        await self._background.stop()
        for task in self._reconsidering:
            task.cancel()
        await asyncio.gather(*self._reconsidering, return_exceptions=True)
        self._pending.clear()

    async def arrive(self, request: embedding_pb2.ArriveRequest) -> embedding_pb2.ArriveResponse:
        """Waits until a member's step is decided, or its budget is nearly over.

        Raises:
            WrongRole: this shard is not home.
            ClientClosed, NotAMember: the client is no member.
            StaleState: a part is missing here; send it again (retryable).
            ShardamError: as ShardContext.check_serving.
        """
        self._shard.identity.require_home("groups are kept by")
        shard, header = self._shard, request.header
        deadline = time.monotonic() + header.budget_s * BUDGET_SHARE if header.budget_s else math.inf
        while True:
            shard.check_serving(header)
            try:
                result, name = await shard.sequencer.change(lambda: self._standing(request))
            except NotAMember:
                await self._close_client(header.client_id)  # its numbers can no longer agree; the group goes on without it
                raise
            if result is None:
                pending = self._pending.of(name)
                changed = pending.changed
                self._note(name, pending, request)
                await self._wait(changed, deadline - time.monotonic())
                if time.monotonic() < deadline and shard.is_serving:
                    continue
                return self._undecided(request, name)
            await shard.state.journal.durable()
            return embedding_pb2.ArriveResponse(header=shard.header(header, header.number), result=encode_result(result))

    def _undecided(self, request: embedding_pb2.ArriveRequest, name: str) -> embedding_pb2.ArriveResponse:
        """Answers that a step is not decided, and for whom it waits, which the member says to its user."""
        answer = embedding_pb2.ArriveResponse(header=self._shard.header(request.header, 0))
        entry = self._shard.state.groups.find(name)
        if entry is not None:
            present = {member.rank for member in entry.group.members}
            answer.missing_ranks.extend(missing_ranks(entry.group, self._pending.of(name).arrived_at(entry)))
            answer.absent_ranks.extend(rank for rank in answer.missing_ranks if rank not in present)
        return answer

    def _standing(self, request: embedding_pb2.ArriveRequest) -> tuple[StepResult | None, str]:
        """Returns how a member's step has ended, if it has, and the group; on the sequencer's thread."""
        state, header = self._shard.state, request.header
        known = state.clients.find(header.client_id)
        if known is not None and header.number <= known.last_number:
            return _former(known, header.number), ""
        client = state.clients.get(header.client_id)
        entry, member = state.groups.require_member(header.client_id)
        name = entry.group.name
        if entry.group.terms.mode != "sync" or member.rank != header.rank:
            raise GroupMismatch(
                f"client {header.client_id.hex()} is rank {member.rank} of group {name!r} ({entry.group.terms}), and arrives "
                f"as rank {header.rank} of a sync group"
            )
        if header.step <= entry.step:
            raise NotAMember(
                f"step {header.step} of group {name!r} was decided without rank {member.rank}, which a shard had refused; "
                "connect again"
            )
        part = state.groups.part(header.client_id)
        has_part = part is not None and part.origin.number == header.number and part.step == header.step
        if header.number != client.last_number + 1 or header.step != entry.step + 1:
            raise StaleState(
                f"number {header.number} for step {header.step} came after number {client.last_number} and step {entry.step}",
                reason="SEQUENCE_GAP",
                metadata={"last": str(client.last_number), "number": str(header.number)},
            )
        if not has_part and not request.HasField("refusal"):
            raise StaleState(
                f"the part of number {header.number} is not here; send it again",
                reason="SEQUENCE_GAP",
                metadata={"last": str(client.last_number), "number": str(header.number)},
            )
        return None, name

    def _note(self, name: str, pending: PendingStep, request: embedding_pb2.ArriveRequest) -> None:
        client_id = request.header.client_id
        arrival = Arrival(
            client_id,
            request.header.number,
            {peak.table_id: peak.peak for peak in request.peaks},
            decode_refusal(request.refusal) if request.HasField("refusal") else None,
        )
        if pending.note(request.header.step, arrival):
            self.reconsider(name)

    async def _wait(self, changed: asyncio.Event, seconds: float) -> None:
        """Waits for a change, the end of a time, or the shard's drain."""
        waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(self._shard.streams.wait_for_drain())]
        try:
            timeout = None if math.isinf(seconds) else max(0.0, seconds)
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def reconsider(self, name: str) -> None:
        """Looks whether a group's next step can be decided, beside everything else."""
        task = asyncio.create_task(self._decide_what_can_be(name))
        self._reconsidering.add(task)

        def leave(_: asyncio.Task[None]) -> None:
            self._reconsidering.discard(task)
            if not task.cancelled() and task.exception() is not None:
                logger.error("a step of group %r could not be decided", name, exc_info=task.exception())

        task.add_done_callback(leave)

    async def _decide_what_can_be(self, name: str, *, given_up: bool = False) -> None:
        pending = self._pending.of(name)
        checked: Decision | None = None
        refusal: Refusal | None = None
        while True:
            async with self._lock:
                try:
                    proposal = await self._shard.sequencer.change(lambda: self._propose(name, pending, given_up=given_up))
                    if proposal is None:
                        return
                    decision = proposal.decision
                    if not proposal.needs_check or decision == checked:
                        await self._commit(pending, _refused(decision, refusal) if decision == checked else decision)
                        leaving = list(pending.leaving)
                        break
                except ShardamError as error:  # overslept its lease, a full disk, about to end
                    logger.warning("step %d of group %r cannot be decided yet: %s", pending.step, name, error.message)
                    asyncio.get_running_loop().call_later(RETRY_S, self.reconsider, name)
                    return
            # Without the lock: members may go while a shard that is asked is away.
            checked, refusal = decision, await self._check(decision)
        self._delivery.tell(name)
        for client_id in leaving:
            await self._close_client(client_id)

    def _propose(self, name: str, pending: PendingStep, *, given_up: bool) -> Proposal | None:
        """Says what follows from who has arrived; on the sequencer's thread."""
        entry = self._shard.state.groups.find(name)
        if entry is None or entry.group.terms.mode != "sync" or not entry.group.members:
            return None
        if not given_up and len(pending.arrivals) < len(entry.group.members):
            return None  # told of each arrival: nothing is looked through before the last
        arrivals, parts = pending.arrived_at(entry), self._shard.state.groups.parts_by_client()
        if not given_up or pending.since is None or not missing_ranks(entry.group, arrivals):
            return propose(entry.group, entry.step + 1, arrivals, parts)
        waited_s = time.monotonic() - pending.since
        return Proposal(give_up(entry.group, entry.step + 1, arrivals, parts, waited_s))

    async def _check(self, decision: Decision) -> Refusal | None:
        """Asks all shards whether a step's merged gradients may be applied; returns why they may not."""
        state = self._shard.state
        here = await self._shard.sequencer.change(lambda: check_here(state, decision))
        return here or await self._delivery.check(decision)

    async def _commit(self, pending: PendingStep, decision: Decision) -> None:
        """Carries a decision out here; from then on it holds.

        Raises:
            ShardamError: it could not be recorded; nothing is decided.
        """
        try:
            await self._shard.change(lambda: decide(self._shard.state, decision))
        except ShardamError as error:
            if error.rule.retryable or decision.end == "refused":
                raise
            logger.warning("step %d of group %r cannot be applied here: %s", decision.step, decision.group, error.message)
            decision = _refused(decision, Refusal.of(error))
            await self._shard.change(lambda: decide(self._shard.state, decision))
        if pending.since is not None:
            self._shard.metrics.group_step_seconds.observe(time.monotonic() - pending.since)
        self._shard.metrics.count_step(decision.end)
        if decision.refusal is not None:
            logger.warning("step %d of group %r was refused: %s", decision.step, decision.group, decision.refusal.message)
        pending.forget(list(pending.arrivals))

    async def _watch_steps(self) -> None:
        """Gives up steps whose ranks do not arrive in time; time in which home was paused or served nobody does not count."""
        tick_s = min(LONGEST_TICK_S, self._step_timeout_s / 10)
        while True:
            began = time.monotonic()
            await asyncio.sleep(tick_s)
            passed_s = time.monotonic() - began
            paused = passed_s > LONGEST_GAP_TICKS * tick_s or not self._shard.is_serving
            for name, pending in self._pending:
                if paused:
                    pending.pause(passed_s)
                if pending.since is not None and time.monotonic() - pending.since > self._step_timeout_s:
                    await self._decide_what_can_be(name, given_up=True)


def _refused(decision: Decision, refusal: Refusal | None) -> Decision:
    """Returns a decision, refused if there is a reason."""
    return decision if refusal is None else dataclasses.replace(decision, end="refused", refusal=refusal)


def _former(client: ClientEntry, number: int) -> StepResult:
    """Returns how the step ended that a client's closed number contributed to; also of a client that has left since."""
    kept = client.outcomes.get(number)
    if kept is None:
        raise SequenceError(f"number {number} is too old to be answered", reason="SEQUENCE_EXPIRED")
    result = kept[1].result
    if result is None:
        raise GroupMismatch(f"number {number} was no contribution to a step of a sync group")
    return result
