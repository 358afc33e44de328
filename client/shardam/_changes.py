"""Numbered changes, one in flight: every shard gets its part, and a number is closed on all shards in one way.

PROTOCOL.md, section 4. Knows nothing of tables or rows; _parts.py builds the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeGuard, TypeVar

from shardam._calls import RequestT, ShardCall
from shardam._link import ShardLink
from shardam._session import Session, ends_client
from shardam_proto.channels import UnaryCall
from shardam_proto.errors import ShardamError, make_error
from shardam_proto.v1 import embedding_pb2

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class AnyChange(Protocol):
    """A change whatever its messages are."""

    number: int
    refusals: dict[int, ShardamError]
    closed: set[int]

    @property
    def answered(self) -> set[int]:
        """Shards that applied their part."""
        ...

    def stepped_tables(self) -> list[int]:
        """Tables that stepped where the change was applied."""
        ...

    def call_for(self, link: ShardLink) -> Callable[[Session], None]:
        """Returns what sends this shard's part and keeps the answer."""
        ...


@dataclasses.dataclass
class Change(Generic[RequestT, AnswerT]):
    """One numbered change and how far it has come; its parts are kept until every shard has answered.

    Attributes:
        method: picks the stub's method.
        parts: one message per shard, empty ones too, by shard index.
        steps_of: ids of the tables that stepped, from an answer; row changes step none.
        number: its number, once it has one.
        answers: what shards that applied it said.
        refusals: why other shards refused it for good.
        closed: refusing shards on which its number is closed.
    """

    method: Callable[[ShardLink], UnaryCall[RequestT, AnswerT]]
    parts: list[RequestT]
    steps_of: Callable[[AnswerT], list[int]]
    number: int = 0
    answers: dict[int, AnswerT] = dataclasses.field(default_factory=dict)
    refusals: dict[int, ShardamError] = dataclasses.field(default_factory=dict)
    closed: set[int] = dataclasses.field(default_factory=set)

    @property
    def answered(self) -> set[int]:
        """Shards that applied their part."""
        return set(self.answers)

    def stepped_tables(self) -> list[int]:
        """Tables that stepped where the change was applied."""
        return sorted({table_id for answer in self.answers.values() for table_id in self.steps_of(answer)})

    def call_for(self, link: ShardLink) -> Callable[[Session], None]:
        """Returns what sends this shard's part and keeps the answer."""

        def send(session: Session) -> None:
            request = ShardCall(link, self.method, self.parts[link.index], self.number)
            self.answers[link.index] = session.answer(request)

        return send


class ChangeLog:
    """Gives numbers to a client's changes and sees each through before the next. Used from one thread.

    Args:
        session: the client.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_number = 0
        self._unsettled: AnyChange | None = None

    @property
    def has_unsettled(self) -> bool:
        """True: a change got no answer in time; it is kept and sent again before the next one."""
        return self._unsettled is not None

    def run(self, change: AnyChange) -> None:
        """Gives the next number to a change and returns when all shards have applied it.

        Raises:
            ShardUnreachable: a shard did not answer in time; the change is kept, see settle.
            ShardamError: why it was refused, with each shard's outcome; its number is closed everywhere.
        """
        if self._unsettled is not None:
            raise AssertionError("the former change is not settled")
        change.number = self._last_number + 1
        self._unsettled = change
        self.settle()

    def settle(self) -> None:
        """Sends the present change to the shards that have not answered it yet. Nothing to do if there is none.

        Raises:
            ShardamError: as run.
        """
        change = self._unsettled
        if change is None:
            return
        self._send_parts(change)
        if change.refusals:
            self._close_refusing(change)
        self._last_number, self._unsettled = change.number, None
        if change.refusals:
            raise self._refusal(change)

    def _send_parts(self, change: AnyChange) -> None:
        done = change.answered | set(change.refusals)
        links = [link for link in self._session.links if link.index not in done]
        problems: list[BaseException] = []
        for link, error in self._call_all(links, [change.call_for(link) for link in links]):
            if error is None:
                link.acknowledged = change.number
            elif _is_refusal(error):
                change.refusals[link.index] = error
            else:
                problems.append(error)
        if problems:
            raise problems[0]

    def _close_refusing(self, change: AnyChange) -> None:
        """Uses the number up where it was refused: SKIP if no shard applied it, else VOID with the tables that stepped."""
        kind = embedding_pb2.CLOSE_KIND_VOID if change.answered else embedding_pb2.CLOSE_KIND_SKIP
        table_ids = change.stepped_tables()
        links = [link for link in self._session.links if link.index in set(change.refusals) - change.closed]

        def close(link: ShardLink, session: Session) -> None:
            message = embedding_pb2.CloseNumberRequest(kind=kind, table_ids=table_ids)
            session.answer(ShardCall(link, lambda target: target.embedding.CloseNumber, message, change.number))

        problems: list[BaseException] = []
        for link, error in self._call_all(links, [functools.partial(close, link) for link in links]):
            if error is None:
                change.closed.add(link.index)
                link.acknowledged = change.number
            else:
                if _is_refusal(error):
                    self._session.fail(error)  # the number stays open there: this client's numbers no longer agree
                problems.append(error)
        if problems:
            raise problems[0]

    def _call_all(
        self, links: list[ShardLink], calls: list[Callable[[Session], None]]
    ) -> list[tuple[ShardLink, BaseException | None]]:
        """Makes the calls side by side, all of them before any answer is awaited."""
        results = self._session.writers.run_all([functools.partial(call, self._session) for call in calls])
        errors = [result if isinstance(result, BaseException) else None for result in results]
        return list(zip(links, errors, strict=True))

    def _refusal(self, change: AnyChange) -> ShardamError:
        index, first = min(change.refusals.items())
        if len(self._session.links) == 1:
            return first
        outcomes = [
            f"shard {link.index} {change.refusals[link.index].reason if link.index in change.refusals else 'applied it'}"
            for link in self._session.links
        ]
        message = f"{first.message} (refused by shard {index}; number {change.number}: {', '.join(outcomes)})"
        return make_error(first.reason, message, first.metadata)


def _is_refusal(error: BaseException) -> TypeGuard[ShardamError]:
    """True: this shard has decided against the change; it was not applied there, and the number is open."""
    return isinstance(error, ShardamError) and not error.rule.retryable and not ends_client(error)
