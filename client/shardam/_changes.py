"""A numbered change as a value: its parts, and how its number has ended on each shard so far (PROTOCOL.md, section 4).

Knows nothing of streams; _parts.py builds the parts, _lane.py sends them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from shardam_proto.errors import ShardamError, make_error
from shardam_proto.v1 import common_pb2, embedding_pb2

AnswerT = TypeVar("AnswerT")
PartAnswerT = TypeVar("PartAnswerT", covariant=True)


class Part(Protocol[PartAnswerT]):
    """What one shard gets of a change."""

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and rows that it keeps in memory."""
        ...

    def messages(self, header: common_pb2.RequestHeader) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes its messages, one after the other; the header is the iterator's from then on."""
        ...

    def answer(self, response: embedding_pb2.ExchangeResponse) -> PartAnswerT:
        """Returns the answer of its kind."""
        ...


PartT = TypeVar("PartT", bound=Part[object])


class AnyChange(Protocol):
    """A change whatever its messages are."""

    number: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps in memory until every shard has answered."""
        ...

    @property
    def closes(self) -> bool:
        """True: every shard has an outcome and some refused it, so its number is to be closed where it was refused."""
        ...

    @property
    def settled(self) -> bool:
        """True: its number is closed on every shard."""
        ...

    def refused_by(self, shard: int) -> bool:
        """True: the shard refused it for good."""
        ...

    def messages(self, shard: int, header: common_pb2.RequestHeader) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes the messages that are this shard's turn: its part, or how its number ends there."""
        ...

    def take(self, shard: int, response: embedding_pb2.ExchangeResponse) -> None:
        """Notes that a shard has done what its messages said."""
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
        answer_of: reads the answer of a part.
        steps_of: ids of the tables that stepped, from an answer; row changes step none.
        number: its number, once it has one.
        answers: what shards that applied it said.
        refusals: why other shards refused it for good.
        closed: refusing shards on which its number is closed.
    """

    parts: list[PartT]
    answer_of: Callable[[PartT, embedding_pb2.ExchangeResponse], AnswerT]
    steps_of: Callable[[AnswerT], list[int]]
    number: int = 0
    answers: dict[int, AnswerT] = dataclasses.field(default_factory=dict)
    refusals: dict[int, ShardamError] = dataclasses.field(default_factory=dict)
    closed: set[int] = dataclasses.field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps in memory until every shard has answered."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def closes(self) -> bool:
        """True: every shard has an outcome and some refused it."""
        return bool(self.refusals) and len(self.answers) + len(self.refusals) == len(self.parts)

    @property
    def settled(self) -> bool:
        """True: its number is closed on every shard."""
        return len(self.answers) + len(self.closed) == len(self.parts)

    def refused_by(self, shard: int) -> bool:
        """True: the shard refused it for good."""
        return shard in self.refusals

    def stepped_tables(self) -> list[int]:
        """Tables that stepped where the change was applied."""
        return sorted({table_id for answer in self.answers.values() for table_id in self.steps_of(answer)})

    def messages(self, shard: int, header: common_pb2.RequestHeader) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes the shard's part; where it was refused, SKIP if no shard applied it, else VOID with what stepped elsewhere."""
        if shard not in self.refusals:
            return self.parts[shard].messages(header)
        kind = embedding_pb2.CLOSE_KIND_VOID if self.answers else embedding_pb2.CLOSE_KIND_SKIP
        close = embedding_pb2.CloseNumberRequest(header=header, kind=kind, table_ids=self.stepped_tables())
        return iter((embedding_pb2.ExchangeRequest(close_number=close),))

    def take(self, shard: int, response: embedding_pb2.ExchangeResponse) -> None:
        """Notes that a shard has applied its part, or closed the number that it had refused."""
        if shard in self.refusals:
            self.closed.add(shard)
        else:
            self.answers[shard] = self.answer_of(self.parts[shard], response)

    def refuse(self, shard: int, error: ShardamError) -> None:
        """Notes that a shard refused its part for good."""
        self.refusals[shard] = error

    def refusal(self) -> ShardamError | None:
        """Returns why a settled change was refused, with each shard's outcome, or None."""
        if not self.refusals:
            return None
        index, first = min(self.refusals.items())
        if len(self.parts) == 1:
            return first
        outcomes = [
            f"shard {shard} {self.refusals[shard].reason if shard in self.refusals else 'applied it'}"
            for shard in range(len(self.parts))
        ]
        message = f"{first.message} (refused by shard {index}; number {self.number}: {', '.join(outcomes)})"
        return make_error(first.reason, message, first.metadata)
