"""A numbered change as a value: what each shard is to be told of it next, and how its number has ended there so far.

PROTOCOL.md, section 4. Knows nothing of streams; _parts.py builds the parts, _lane.py sends them. A member's contribution to a
step of a sync group is in _contributions.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from shardam._chunk_setting import DEFAULT_CHUNK_BYTES
from shardam._stream import Messages
from shardam_proto.errors import MessageTooLarge, ShardamError, make_error
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2

AnswerT = TypeVar("AnswerT")
PartAnswerT = TypeVar("PartAnswerT", covariant=True)


class Part(Protocol[PartAnswerT]):
    """What one shard gets of a change."""

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and rows that it keeps in memory."""
        ...

    def messages(self, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Messages:
        """Makes its messages, one after the other; the header is the iterator's from then on."""
        ...

    def keep_copy(self) -> None:
        """Lets go of arrays that were handed in: their owner may write to them again."""
        ...

    def answer(self, response: embedding_pb2.ExchangeResponse) -> PartAnswerT:
        """Returns the answer of its kind."""
        ...


PartT = TypeVar("PartT", bound=Part[object])


class SplitAnew(Protocol[PartT]):
    """Puts the parts of a change together again and splits them for another route map."""

    def __call__(self, parts: Sequence[PartT], route_map: RouteMap, *, rows: bool = True) -> list[PartT]:
        """Splits them; rows: False: leaves the rows out.

        Raises:
            MessageTooLarge: a part does not fit now.
        """
        ...


class Turn(enum.Enum):
    """What a shard is to be told of a change.

    Attributes:
        PART: its part.
        CLOSE: that the number ends without it.
        ARRIVE: home alone: that every shard has answered, so that it may decide the step.
    """

    PART = "part"
    CLOSE = "close"
    ARRIVE = "arrive"


class AnyChange(Protocol):
    """A change whatever its messages are.

    Attributes:
        number: its number, once it has one.
        step: the step of the client's group that it belongs to; 0: none.
    """

    number: int
    step: int

    @property
    def contributes(self) -> bool:
        """True: it is this client's part of a step, where the client is in a group."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps in memory until every shard has answered."""
        ...

    @property
    def settled(self) -> bool:
        """True: its number is closed on every shard."""
        ...

    @property
    def is_decided(self) -> bool:
        """True: it has ended on a shard, or its step has; whatever becomes of the shards, its number is closed on all."""
        ...

    @property
    def waits_for_members(self) -> bool:
        """True: no shard has anything to do for it before other members of the group have arrived."""
        ...

    def fit(self, route_map: RouteMap, last_number: int = 0) -> None:
        """Splits it for another route map, if it is split for a former one; what shards of that one said counts no more.

        Args:
            route_map: the map.
            last_number: up to this number this client's changes are closed on every shard of the map.
        """
        ...

    def turn(self, shard: int) -> Turn | None:
        """Returns what a shard is to be told now; None: nothing, or nothing until another shard has answered."""
        ...

    def is_over(self, shard: int) -> bool:
        """True: nothing more is to be told to a shard."""
        ...

    def messages(
        self, shard: int, turn: Turn, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Messages:
        """Makes the messages of a shard's turn, rows in chunks of chunk_bytes at most."""
        ...

    def keep_copy(self) -> None:
        """Lets go of arrays that were handed in: their owner may write to them again."""
        ...

    def take(self, shard: int, response: embedding_pb2.ExchangeResponse) -> bool:
        """Notes that a shard has done what its turn was; returns whether the number counts there as taken from now on."""
        ...

    def refuse(self, shard: int, error: ShardamError) -> None:
        """Notes that a shard refused its part for good."""
        ...

    def refusal(self) -> ShardamError | None:
        """Returns why a settled change was refused, with each shard's outcome, or None."""
        ...


@dataclasses.dataclass(eq=False)
class Change(Generic[PartT, AnswerT]):
    """One numbered change and how far it has come; its parts are kept until every shard has answered.

    Attributes:
        parts: one for each shard, empty ones too, by shard index.
        route_map: the map for which it is split.
        split_anew: splits its parts for another one.
        answer_of: reads the answer of a part.
        steps_of: ids of the tables that stepped, from an answer; row changes step none.
        contributes: it is a push.
        number: its number, once it has one.
        step: of a push in a bounded group: this client's clock after it; of a row change in a sync group: the step before which
            it waits.
        answers: what shards that applied it said.
        refusals: why other shards refused it for good.
        closed: refusing shards on which its number is closed.
        over: why it was refused by the shards of a former map, which have closed its number everywhere; None: it was not.
        unsendable: why it cannot be sent under the present map, so that its number is closed without it; None: it can.
    """

    parts: list[PartT]
    route_map: RouteMap
    split_anew: SplitAnew[PartT]
    answer_of: Callable[[PartT, embedding_pb2.ExchangeResponse], AnswerT]
    steps_of: Callable[[AnswerT], list[int]]
    contributes: bool = False
    number: int = 0
    step: int = 0
    answers: dict[int, AnswerT] = dataclasses.field(default_factory=dict)
    refusals: dict[int, ShardamError] = dataclasses.field(default_factory=dict)
    closed: set[int] = dataclasses.field(default_factory=set)
    over: ShardamError | None = None
    unsendable: ShardamError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps in memory until every shard has answered."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def settled(self) -> bool:
        """True: its number is closed on every shard."""
        return self.over is not None or len(self.answers) + len(self.closed) == len(self.parts)

    @property
    def is_decided(self) -> bool:
        """True: a shard has applied it, or closed its number."""
        return bool(self.answers or self.closed)

    @property
    def waits_for_members(self) -> bool:
        """False: it is applied on arrival."""
        return False

    def fit(self, route_map: RouteMap, last_number: int = 0) -> None:
        """Splits it for another route map.

        A number that is closed is asked for once more, for the new shards' part of its outcome. One that is not was applied
        nowhere: shards apply up to the highest number that any of them had.
        """
        if route_map == self.route_map:
            return
        is_closed = 0 < self.number <= last_number
        rows = not is_closed or route_map.num_shards == self.route_map.num_shards  # the same parts as before are known there
        if is_closed and self.refusals:
            self.over = self.refusal()  # this client closed it, once it knew all outcomes
            return
        try:
            self.parts = self.split_anew(self.parts, route_map, rows=rows)
        except MessageTooLarge as error:
            self.unsendable = error
            self.parts = self.split_anew(self.parts, route_map, rows=False)
        self.route_map = route_map
        self.answers.clear()
        self.closed.clear()
        self.refusals = {} if self.unsendable is None else dict.fromkeys(range(len(self.parts)), self.unsendable)

    def turn(self, shard: int) -> Turn | None:
        """Returns PART; where that was refused CLOSE, once all other outcomes are known."""
        if self.is_over(shard):
            return None
        if shard not in self.refusals:
            return Turn.PART
        return Turn.CLOSE if len(self.answers) + len(self.refusals) == len(self.parts) else None

    def is_over(self, shard: int) -> bool:
        """True: the shard has applied it, or closed the number that it had refused."""
        return self.over is not None or shard in self.answers or shard in self.closed

    def stepped_tables(self) -> list[int]:
        """Tables that stepped where the change was applied."""
        return sorted({table_id for answer in self.answers.values() for table_id in self.steps_of(answer)})

    def messages(
        self, shard: int, turn: Turn, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Messages:
        """Makes the shard's part; where it was refused, SKIP if no shard applied it, else VOID with what stepped elsewhere."""
        if turn is Turn.PART:
            return self.parts[shard].messages(header, chunk_bytes)
        kind = embedding_pb2.CLOSE_KIND_VOID if self.answers else embedding_pb2.CLOSE_KIND_SKIP
        return iter((close_message(header, kind, self.stepped_tables()),))

    def keep_copy(self) -> None:
        """Lets go of arrays that were handed in: their owner may write to them again."""
        for part in self.parts:
            part.keep_copy()

    def take(self, shard: int, response: embedding_pb2.ExchangeResponse) -> bool:
        """Notes that a shard has applied its part, or closed the number that it had refused."""
        if shard in self.refusals:
            self.closed.add(shard)
        else:
            self.answers[shard] = self.answer_of(self.parts[shard], response)
        return True

    def refuse(self, shard: int, error: ShardamError) -> None:
        """Notes that a shard refused its part for good."""
        self.refusals[shard] = error

    def refusal(self) -> ShardamError | None:
        """Returns why a settled change was refused, with each shard's outcome, or None."""
        if self.over is not None or not self.refusals:
            return self.over
        index, first = min(self.refusals.items())
        if len(self.parts) == 1:
            return first
        outcomes = [
            f"shard {shard} {self.refusals[shard].reason if shard in self.refusals else 'applied it'}"
            for shard in range(len(self.parts))
        ]
        message = f"{first.message} (refused by shard {index}; number {self.number}: {', '.join(outcomes)})"
        return make_error(first.reason, message, first.metadata)


def close_message(
    header: common_pb2.RequestHeader, kind: embedding_pb2.CloseKind.ValueType, table_ids: Sequence[int] = ()
) -> embedding_pb2.ExchangeRequest:
    """Returns the message that closes a number."""
    close = embedding_pb2.CloseNumberRequest(header=header, kind=kind, table_ids=table_ids)
    return embedding_pb2.ExchangeRequest(close_number=close)
