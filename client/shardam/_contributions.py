"""What a member sends for a step of its group: its contribution to a sync step, or a bounded step without a gradient.

PROTOCOL.md, section 5. A contribution's number is closed on all shards by home's decision: its parts are staged on every shard,
then home is told, and home's answer is the end.
"""

from __future__ import annotations

import dataclasses

from shardam._changes import Turn, close_message
from shardam._chunk_setting import DEFAULT_CHUNK_BYTES
from shardam._messages import PushPart
from shardam._split import split_push_anew
from shardam._stream import Messages
from shardam_proto.errors import MessageTooLarge, ShardamError, make_error
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2

HOME = 0
"""The shard that decides steps."""


@dataclasses.dataclass(eq=False)
class Contribution:
    """A member's parts of one step of a sync group, and how far they have come.

    Attributes:
        parts: one for each shard, empty ones too, by shard index.
        route_map: the map for which it is split.
        own_refusal: why this client refuses its own contribution, which is then refused for all members; the parts are empty.
        number: its number, once it has one.
        step: the step.
        answered: shards that have the part staged, or have said how the step ended.
        refusals: why other shards refused their parts for good.
        closed: of these, the ones on which the number was closed by hand.
        peaks: table id -> the largest magnitude of its gradients on any shard.
        missing: ranks that the step waits for, as home said last; empty: not known.
        absent: of these, the ones that nobody has joined as.
        result: how the step ended; None: not known yet.
        over: it ended on the shards of a former map, and the number is closed everywhere.
        unsendable: why it cannot be sent under the present map, so that the step is refused for all; None: it can.
    """

    parts: list[PushPart]
    route_map: RouteMap
    own_refusal: ShardamError | None = None
    number: int = 0
    step: int = 0
    answered: set[int] = dataclasses.field(default_factory=set)
    refusals: dict[int, ShardamError] = dataclasses.field(default_factory=dict)
    closed: set[int] = dataclasses.field(default_factory=set)
    peaks: dict[int, float] = dataclasses.field(default_factory=dict)
    missing: list[int] = dataclasses.field(default_factory=list)
    absent: list[int] = dataclasses.field(default_factory=list)
    result: group_pb2.StepResult | None = None
    over: bool = False
    unsendable: ShardamError | None = None

    @property
    def contributes(self) -> bool:
        """True: it is this client's part of a step."""
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps in memory until every shard has answered."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def settled(self) -> bool:
        """True: its number is closed on every shard, or will be before the shard looks at the next one."""
        return self.over or (self.result is not None and all(self.is_over(shard) for shard in range(len(self.parts))))

    @property
    def is_decided(self) -> bool:
        """True: its step has ended with it, or a shard has closed its number."""
        return bool(self.closed) or (self.result is not None and not self._came_too_late)

    @property
    def waits_for_members(self) -> bool:
        """True: home has been told, or is told now, and decides when every member has arrived."""
        return self.result is None and self._all_answered

    @property
    def _all_answered(self) -> bool:
        return len(self.answered) + len(self.refusals) == len(self.parts)

    @property
    def _came_too_late(self) -> bool:
        """True: the step was decided without it, so that no decision closes the number where its part was refused."""
        return self.result is not None and not self.result.num_contributions

    def fit(self, route_map: RouteMap, last_number: int = 0) -> None:
        """Splits it for another route map: what was staged is staged nowhere now, and home is to be asked again for the end."""
        if route_map == self.route_map:
            return
        if self.result is not None and self.number <= last_number:
            self.over = True
            return
        is_closed = 0 < self.number <= last_number
        rows = not is_closed or route_map.num_shards == self.route_map.num_shards  # as for other changes
        try:
            self.parts = split_push_anew(self.parts, route_map, rows=rows)
        except MessageTooLarge as error:
            self.unsendable = error
            self.parts = split_push_anew(self.parts, route_map, rows=False)
        self.route_map, self.result = route_map, None
        for known in (self.answered, self.refusals, self.closed, self.peaks, self.missing, self.absent):
            known.clear()
        if self.unsendable is not None:
            self.refusals.update(dict.fromkeys(range(len(self.parts)), self.unsendable))

    def turn(self, shard: int) -> Turn | None:
        """Returns PART; for home ARRIVE once every shard has answered; CLOSE where a part was refused that came too late."""
        if self.over:
            return None
        if shard in self.refusals and self._came_too_late:
            return None if shard in self.closed else Turn.CLOSE
        if shard not in self.answered and shard not in self.refusals:
            return Turn.PART
        return Turn.ARRIVE if shard == HOME and self.waits_for_members else None

    def is_over(self, shard: int) -> bool:
        """True: nothing more is to be told to a shard."""
        if self.over:
            return True
        if shard in self.refusals:
            return self.result is not None and (shard in self.closed or not self._came_too_late)
        return shard in self.answered and (shard != HOME or self.result is not None)

    def messages(
        self, shard: int, turn: Turn, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Messages:
        """Makes the messages of a shard's turn."""
        match turn:
            case Turn.PART:
                return self.parts[shard].messages(header, chunk_bytes)
            case Turn.CLOSE:
                return iter((close_message(header, embedding_pb2.CLOSE_KIND_SKIP),))
            case Turn.ARRIVE:
                return iter((self._arrive(header),))

    def _arrive(self, header: common_pb2.RequestHeader) -> embedding_pb2.ExchangeRequest:
        arrive = embedding_pb2.ArriveRequest(header=header)
        for table_id, peak in sorted(self.peaks.items()):
            arrive.peaks.add(table_id=table_id, peak=peak)
        refusal = self.own_refusal or self._first_refusal()
        if refusal is not None:
            arrive.refusal.reason, arrive.refusal.message = refusal.reason, refusal.message
            arrive.refusal.metadata.update(refusal.metadata)
        return embedding_pb2.ExchangeRequest(arrive=arrive)

    def _first_refusal(self) -> ShardamError | None:
        if not self.refusals:
            return None
        shard, error = min(self.refusals.items())
        return make_error(error.reason, f"{error.message} (refused by shard {shard})", error.metadata)

    def keep_copy(self) -> None:
        """Lets go of arrays that were handed in: their owner may write to them again."""
        for part in self.parts:
            part.keep_copy()

    def take(self, shard: int, response: embedding_pb2.ExchangeResponse) -> bool:
        """Notes a shard's answer: a part that is staged, how the step ended, or a number that is closed."""
        match self.turn(shard):
            case Turn.PART:
                self.answered.add(shard)
                for peak in response.push.peaks:
                    self.peaks[peak.table_id] = max(self.peaks.get(peak.table_id, 0.0), peak.peak)
                if response.push.HasField("result"):
                    self.result = response.push.result
                return True
            case Turn.ARRIVE:
                self.missing, self.absent = list(response.arrive.missing_ranks), list(response.arrive.absent_ranks)
                if response.arrive.HasField("result"):
                    self.result = response.arrive.result
                return self.result is not None
        self.closed.add(shard)
        return True

    def refuse(self, shard: int, error: ShardamError) -> None:
        """Notes that a shard refused its part for good: home then refuses the step for all members."""
        self.refusals[shard] = error

    def refusal(self) -> ShardamError | None:
        """Returns why the step was refused, or None; None, too, after this client's own refusal, which was raised then."""
        if self.result is None or self.result.end != group_pb2.STEP_END_REFUSED or self.own_refusal is not None:
            return None
        return make_error(self.result.refusal.reason, self.result.refusal.message, dict(self.result.refusal.metadata))


@dataclasses.dataclass(eq=False)
class EmptyStep:
    """A step of a member of a bounded group that has no gradient: its number is closed by SKIP, and its clock goes on.

    Attributes:
        route_map: the map whose shards are told.
        number: its number, once it has one.
        step: this client's clock after it.
        closed: shards on which the number is closed.
    """

    route_map: RouteMap
    number: int = 0
    step: int = 0
    closed: set[int] = dataclasses.field(default_factory=set)

    @property
    def contributes(self) -> bool:
        """True: it counts as a step."""
        return True

    @property
    def num_bytes(self) -> int:
        """None: it has no rows."""
        return 0

    @property
    def settled(self) -> bool:
        """True: its number is closed on every shard."""
        return len(self.closed) == self.route_map.num_shards

    @property
    def is_decided(self) -> bool:
        """True: a shard has closed its number."""
        return bool(self.closed)

    @property
    def waits_for_members(self) -> bool:
        """False: it is carried out on arrival."""
        return False

    def fit(self, route_map: RouteMap, last_number: int = 0) -> None:
        """Has it told to the shards of another map; where the number is closed, that is a repeat."""
        if route_map != self.route_map:
            self.route_map = route_map
            self.closed.clear()

    def turn(self, shard: int) -> Turn | None:
        """Returns CLOSE, once."""
        return None if shard in self.closed else Turn.CLOSE

    def is_over(self, shard: int) -> bool:
        """True: the number is closed there."""
        return shard in self.closed

    def messages(
        self, shard: int, turn: Turn, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Messages:
        """Makes the SKIP."""
        return iter((close_message(header, embedding_pb2.CLOSE_KIND_SKIP),))

    def keep_copy(self) -> None:
        """Does nothing: it has no rows."""

    def take(self, shard: int, response: embedding_pb2.ExchangeResponse) -> bool:
        """Notes that a shard has closed the number."""
        self.closed.add(shard)
        return True

    def refuse(self, shard: int, error: ShardamError) -> None:
        """Cannot be: a SKIP that a shard refuses ends the client."""
        raise AssertionError(f"shard {shard} refused a part that number {self.number} has not: {error}")

    def refusal(self) -> ShardamError | None:
        """None: there is nothing to refuse."""
        return None
