"""Home's part beside its shard: what it knows of a pending step, of joins and of clients that go; a crash takes all of it.

It answers what is asked at once where it can; the rest is done piece by piece by `work`, so that a crash may come between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.groups import roster
from shardam_server.shard.groups.arrivals import Arrival, give_up, missing_ranks, propose, refuse
from shardam_server.shard.groups.changes import check_step, decide, set_group
from shardam_server.shard.groups.entries import GroupEntry, StagedPart
from shardam_server.shard.groups.messages import encode_decision, encode_group
from shardam_server.shard.groups.values import Decision, Refusal
from shardam_server.shard.last_numbers import HOME, Closing, LastNumbers, settle_here
from shardam_server.shard.state import ShardState
from shardam_testing.group_model.contents import NUM_SHARDS
from shardam_testing.group_model.messages import (
    Arrive,
    ArriveAnswer,
    Check,
    Checked,
    End,
    Ended,
    Gone,
    Join,
    Joined,
    Leave,
    Left,
    Settle,
    Settled,
    Update,
    Updated,
)
from shardam_testing.group_model.oracle import GROUP, Oracle
from shardam_testing.group_model.shards import ModelShard

PEERS = range(1, NUM_SHARDS)

TIMEOUT_S = 600.0
"""Only shown in the refusal's message."""


@dataclasses.dataclass
class PendingCheck:
    """A decision that the shards are asked about."""

    decision: Decision
    request: shard_pb2.CheckStepRequest
    agreed: set[int]
    refusal: Refusal | None = None


class ModelHome:
    """Home in one of its lives.

    Args:
        shard: the shard that it is.
        oracle: is told when a step is given up.
        life: number of the life.
    """

    def __init__(self, shard: ModelShard, oracle: Oracle, life: int) -> None:
        self.life = life
        self._shard = shard
        self._oracle = oracle
        self._arrivals: dict[bytes, Arrival] = {}
        self._joins: dict[bytes, int] = {}
        self._confirmed: dict[int, tuple[int, int]] = {}
        self._check: PendingCheck | None = None
        self._to_end: dict[bytes, None] = {}
        self._closings: dict[bytes, Closing] = {}
        for client_id, entry in self.state.clients:
            if entry.closed and not entry.settled:
                self._begin(client_id, LastNumbers.of(entry))

    @property
    def state(self) -> ShardState:
        return self._shard.state

    @property
    def entry(self) -> GroupEntry | None:
        return self.state.groups.find(GROUP)

    @property
    def num_arrived(self) -> int:
        return len(self._arrivals)

    @property
    def num_closing(self) -> int:
        return len(self._to_end) + len(self._closings)

    def receive(self, body: object) -> None:
        """Handles a message to home."""
        self._ways[type(body)](self, body)
        self._shard.settle_disk()

    # -- members

    def _join(self, body: Join) -> None:
        request, state, entry = body.request, self.state, self.entry
        step = 0 if entry is None else entry.step
        group = None if entry is None else entry.group
        try:
            state.clients.get(request.client_id)
            joined = roster.join(group, [], request, step + 1, {})
        except ShardamError as error:
            if error.reason == "CLIENT_CLOSED":
                self._shard.send(request.client_id, Gone(error.reason))
            elif error.reason != "GROUP_MISMATCH":  # of that it hears nothing here, and tries again
                raise
            return
        if joined.group is not group:
            set_group(state, joined.group, step)
        for client_id in joined.superseded:
            self._forget(client_id)
            self._to_end[client_id] = None
        self._joins[request.client_id] = joined.group.version

    def drop(self, client_id: bytes) -> None:
        """Lets a member go: it left, or is silent. It is out of the group at once, and ended with the next work."""
        self._release(client_id)
        self._to_end[client_id] = None
        self._shard.settle_disk()

    def _release(self, client_id: bytes) -> None:
        entry = self.entry
        if entry is not None:
            group = roster.leave(entry.group, client_id)
            if group is not entry.group:
                set_group(self.state, group, entry.step)
        self._forget(client_id)

    def _forget(self, client_id: bytes) -> None:
        self._oracle.let_go.add(client_id)
        self._arrivals.pop(client_id, None)
        self._joins.pop(client_id, None)

    def _leave(self, body: Leave) -> None:
        client = self.state.clients.find(body.client_id)
        if client is not None and client.closed:
            self._shard.send(body.client_id, Left())
        else:
            self.drop(body.client_id)

    # -- steps

    def _arrive(self, body: Arrive) -> None:
        client, found = self.state.clients.find(body.client_id), self.state.groups.of_client(body.client_id)
        if client is None or client.closed:
            self._shard.send(body.client_id, Gone("CLIENT_CLOSED"))
        elif body.number <= client.last_number:
            _, outcome = client.outcomes[body.number]
            assert outcome.result is not None
            self._shard.send(body.client_id, ArriveAnswer(body.number, outcome.result))
        elif found is None:
            self._shard.send(body.client_id, Gone("NOT_A_MEMBER"))
        elif body.step <= found[0].step:  # home itself had refused its part: no decision has closed its number
            self._shard.send(body.client_id, Gone("NOT_A_MEMBER"))
            self.drop(body.client_id)
        else:
            self._take(body, found[0])

    def _take(self, body: Arrive, entry: GroupEntry) -> None:
        part = self.state.groups.part(body.client_id)
        staged = part is not None and (part.origin.number, part.step) == (body.number, body.step)
        assert body.step == entry.step + 1
        assert staged or body.refusal is not None, "home has lost a part that it had acknowledged"
        self._arrivals[body.client_id] = Arrival(body.client_id, body.number, body.peaks, body.refusal)

    def _parts(self) -> Mapping[bytes, StagedPart]:
        return {part.origin.client_id: part for part in self.state.groups.parts()}

    def _decide(self, decision: Decision) -> None:
        entry = decide(self.state, decision)
        for one in decision.contributions:
            _, outcome = self.state.clients.get(one.client_id).outcomes[one.number]
            assert outcome.result is not None
            self._shard.send(one.client_id, ArriveAnswer(one.number, outcome.result))
        assert entry.step == decision.step
        self._arrivals.clear()
        self._check = None

    def give_up(self) -> bool:
        """Gives the pending step up, if a rank has arrived and another is missing; returns whether it has."""
        entry = self.entry
        if entry is None or not self._arrivals or not missing_ranks(entry.group, self._arrivals):
            return False
        self._oracle.giving_up = True
        self._decide(give_up(entry.group, entry.step + 1, self._arrivals, self._parts(), TIMEOUT_S))
        self._oracle.giving_up = False
        self._shard.settle_disk()
        return True

    def _proceed(self) -> bool:
        """Decides the pending step, if it can be; returns whether it has."""
        entry = self.entry
        if entry is None or not entry.group.members:
            return False
        proposal = propose(entry.group, entry.step + 1, self._arrivals, self._parts())
        if proposal is None:
            return False
        decision = proposal.decision
        if not proposal.needs_check:
            self._decide(decision)
            return True
        if self._check is None or self._check.decision != decision:
            self._begin_check(decision)
        assert self._check is not None
        if self._check.refusal is not None:
            refusal = self._check.refusal
            self._decide(refuse(entry.group, entry.step + 1, self._arrivals, self._parts(), refusal))
            return True
        if len(self._check.agreed) == NUM_SHARDS:
            self._decide(decision)
            return True
        return False

    def _begin_check(self, decision: Decision) -> None:
        request = shard_pb2.CheckStepRequest(decision=encode_decision(decision))
        self._check = PendingCheck(decision, request, {HOME})
        try:
            check_step(self.state, decision)
        except ShardamError as error:
            self._check.refusal = Refusal.of(error)

    def _checked(self, body: Checked) -> None:
        if body.life == self.life and self._check is not None and self._check.request == body.request:
            self._check.agreed.add(body.shard)
            self._check.refusal = self._check.refusal or body.refusal

    # -- peers

    def _updated(self, body: Updated) -> None:
        if body.life == self.life:
            self._confirmed[body.shard] = max(self._confirmed.get(body.shard, (0, 0)), (body.version, body.step))

    def _is_told(self, peer: int) -> bool:
        """Whether a peer has confirmed members and last decision."""
        entry = self.entry
        version, step = self._confirmed.get(peer, (0, 0))
        return entry is None or (version >= entry.group.version and step >= entry.step)

    # -- clients that go

    def _begin(self, client_id: bytes, numbers: LastNumbers) -> None:
        closing = self._closings[client_id] = Closing(client_id, range(NUM_SHARDS))
        closing.answer(HOME, numbers)

    def _end_here(self, client_id: bytes) -> None:
        self._release(client_id)  # it may have joined again since it was let go
        numbers = LastNumbers.of(self.state.end_client(client_id, remember=True))
        self._shard.send(client_id, Left())
        if not numbers.settled and client_id not in self._closings:
            self._begin(client_id, numbers)

    def _ended(self, body: Ended) -> None:
        closing = self._closings.get(body.client_id)
        if body.life == self.life and closing is not None and not closing.has_answered(body.shard):
            closing.answer(body.shard, body.numbers)

    def _settled(self, body: Settled) -> None:
        closing = self._closings.get(body.client_id)
        if body.life != self.life or closing is None:
            return
        if body.last_number is None:
            closing.ask_again(body.shard)
        elif body.settled:
            closing.tell(body.shard)
        elif closing.has_answered(body.shard):
            closing.settle(body.shard, body.last_number)

    def _attend(self, client_id: bytes, closing: Closing) -> bool:
        """Does what a closing asks of home itself; returns whether there was anything."""
        if numbers := closing.lacking(HOME):
            settle_here(self.state, client_id, numbers.items())
            closing.settle(HOME, max(numbers))
        elif closing.may_tell(HOME):
            assert not closing.problems()
            self.state.end_client(client_id, settled=True)
            del self._closings[client_id]
        else:
            return False
        return True

    # -- what home does by itself

    def work(self) -> bool:
        """Does the next thing that there is to do here; False: there is none."""
        done = self._work()
        self._shard.settle_disk()
        return done

    def _work(self) -> bool:
        for client_id in self._to_end:
            self._end_here(client_id)
            del self._to_end[client_id]
            return True
        return self._proceed() or any(self._attend(*one) for one in list(self._closings.items()))

    def speak(self) -> None:
        """Says, once more, all that others are to be told now."""
        self._tell_group()
        for client_id, version in list(self._joins.items()):
            entry = self.entry
            member = None if entry is None else entry.group.member(client_id)
            if member is None:
                del self._joins[client_id]
            elif all(self._confirmed.get(peer, (0, 0))[0] >= version for peer in PEERS):
                del self._joins[client_id]
                self._shard.send(client_id, Joined(member.first_step))
        if self._check is not None:
            for peer in set(PEERS) - self._check.agreed:
                self._shard.send(peer, Check(self.life, self._check.request))
        for client_id, closing in self._closings.items():
            for peer in PEERS:
                self._speak_of(client_id, closing, peer)

    def _tell_group(self) -> None:
        entry = self.entry
        if entry is None:
            return
        decision = None if entry.decision is None else encode_decision(entry.decision)
        request = shard_pb2.UpdateGroupRequest(group=encode_group(entry.group), step=entry.step, decision=decision)
        for peer in PEERS:
            if not self._is_told(peer):
                self._shard.send(peer, Update(self.life, request))

    def _speak_of(self, client_id: bytes, closing: Closing, peer: int) -> None:
        if not closing.has_answered(peer):
            if self._is_told(peer):
                self._shard.send(peer, End(self.life, client_id))
        elif numbers := closing.lacking(peer):
            self._shard.send(peer, Settle(self.life, client_id, tuple(numbers.items()), settled=False))
        elif closing.may_tell(peer):
            self._shard.send(peer, Settle(self.life, client_id, (), settled=True))

    _ways: ClassVar[Mapping[type, Callable[..., None]]] = {
        Join: _join,
        Arrive: _arrive,
        Leave: _leave,
        Updated: _updated,
        Checked: _checked,
        Ended: _ended,
        Settled: _settled,
    }
