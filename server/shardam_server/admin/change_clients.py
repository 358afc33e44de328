"""A client id with one numbered change: it opens on all shards, sends each its part until it is answered, closes, leaves.

Knows numbers and answers, not which change it is nor what becomes of a refused one (row_changes.py, keyed_changes.py).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Generic, NoReturn

from shardam_proto.errors import ShardamError, make_error
from shardam_proto.limits import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.admin.etags import StateId
from shardam_server.admin.shard_calls import Request, Response, Select, ShardCalls

logger = logging.getLogger(__name__)

NUMBER = 1
"""The client has one change, so it has the first number."""

TRIES_PER_TIMEOUT = 2
"""A part waits this share of the time allowed for its answer, so that a lost answer leaves time to ask again."""

FIRST_WAIT_S = 0.05
"""Pause before a part is sent again; it doubles each time. A shard's full queue has room again within about this long."""

LEAVE_TIMEOUT_S = 2.0
"""Saying goodbye is a courtesy; what came before it decides what the request is answered."""


@dataclasses.dataclass(frozen=True)
class Delivery(Generic[Response]):
    """What became of parts, by shard; each part is in one of the first three.

    Attributes:
        answers: the shard has taken its part, now or before.
        refusals: the shard refused it for a reason that stays.
        unknown: no answer in time, or the shard restarted meanwhile: it may have taken its part.
        resent: shards whose answer was lost once, so that a repeat need not be of an earlier request.
    """

    answers: dict[int, Response] = dataclasses.field(default_factory=dict)
    refusals: dict[int, ShardamError] = dataclasses.field(default_factory=dict)
    unknown: dict[int, ShardamError] = dataclasses.field(default_factory=dict)
    resent: set[int] = dataclasses.field(default_factory=set)

    def add(self, other: Delivery[Response]) -> None:
        """Puts in what became of other parts."""
        self.answers.update(other.answers)
        self.refusals.update(other.refusals)
        self.unknown.update(other.unknown)
        self.resent.update(other.resent)

    def describe(self, owner: int, subject: str) -> str:
        """Says, for an error's message, what is known of the change.

        Args:
            owner: the shard whose part is not empty.
            subject: what the change is of: "the row".
        """
        if owner in self.answers:
            return f"{subject} was changed, but not every shard has taken its empty part of the change"
        if owner in self.unknown:
            return f"whether {subject} was changed is not known"
        return f"{subject} was not changed"


class ChangeClient:
    """One client id on all shards.

    It opens without heartbeats: one that never leaves, because this process dies in between or because its id has to be
    known to a later repeat, is forgotten by the shards 24 h after its last contact.

    Args:
        calls: reaches the shards.
        route_map: says which shards there are.
        client_id: 16 bytes.
        request_id: for the shards' logs.
    """

    def __init__(self, calls: ShardCalls, route_map: RouteMap, client_id: bytes, request_id: int) -> None:
        self._calls = calls
        self._client_id = client_id
        self._request_id = request_id
        self._shards = range(route_map.num_shards)
        self._epoch = route_map.epoch
        self._opened: dict[int, common_pb2.ResponseHeader] = {}

    def open(self) -> None:
        """Registers the client on all shards and notes who they are and whether its number is used there.

        Raises:
            ShardamError: one did not; nothing was changed.
        """
        requests = {
            shard: embedding_pb2.OpenRequest(
                header=common_pb2.RequestHeader(client_id=self._client_id),
                min_protocol_version=MIN_PROTOCOL_VERSION,
                max_protocol_version=PROTOCOL_VERSION,
                heartbeats=False,
            )
            for shard in self._shards
        }
        outcomes = self._calls.call_many(requests, lambda stubs: stubs.embedding.Open, self._request_id, epoch=self._epoch)
        for shard, outcome in sorted(outcomes.items()):
            if isinstance(outcome, ShardamError):
                raise outcome
            self._opened[shard] = outcome.header

    def state_of(self, shard: int) -> StateId:
        """Returns the state of a shard when the client opened on it."""
        header = self._opened[shard]
        return StateId(shard, header.lineage, header.timeline)

    @property
    def used(self) -> frozenset[int]:
        """Shards on which the number had been used before the client opened now."""
        return frozenset(shard for shard, header in self._opened.items() if header.last_number >= NUMBER)

    def deliver(self, parts: Mapping[int, Request], select: Select[Request, Response], deadline: float) -> Delivery[Response]:
        """Sends shards their parts, all at once, until each has answered or the time is over.

        Args:
            parts: request by shard index; headers are filled in here.
            select: picks the stub's method.
            deadline: time.monotonic() after which no part is sent again.
        """
        delivery: Delivery[Response] = Delivery()
        pending, wait_s = dict(parts), FIRST_WAIT_S
        while True:
            unknown: dict[int, ShardamError] = {}
            for shard, outcome in self._attempt(pending, select).items():
                if not isinstance(outcome, ShardamError):
                    delivery.answers[shard] = outcome
                elif outcome.rule.retryable:
                    unknown[shard] = outcome
                else:
                    delivery.refusals[shard] = outcome
            if not unknown:
                return delivery
            if self._calls.closed or _restarted(unknown) or time.monotonic() + wait_s > deadline:
                delivery.unknown.update(unknown)
                return delivery
            pending = {shard: parts[shard] for shard in unknown}
            delivery.resent.update(pending)
            time.sleep(wait_s)
            wait_s *= 2

    def _attempt(
        self, parts: Mapping[int, Request], select: Select[Request, Response]
    ) -> Mapping[int, Response | ShardamError]:
        for shard, part in parts.items():
            part.header.CopyFrom(self._header(shard))
        return self._call_all(parts, select, self._calls.timeout_s / TRIES_PER_TIMEOUT)

    def _call_all(
        self, requests: Mapping[int, Request], select: Select[Request, Response], timeout_s: float
    ) -> Mapping[int, Response | ShardamError]:
        try:
            return self._calls.call_many(requests, select, self._request_id, timeout_s, epoch=self._epoch)
        except ShardamError as error:  # the cluster is not known any more, or this process ends: there is no answer
            return dict.fromkeys(requests, error)

    def _header(self, shard: int) -> common_pb2.RequestHeader:
        opened = self._opened[shard]
        return common_pb2.RequestHeader(
            client_id=self._client_id, number=NUMBER, incarnation=opened.incarnation, timeline=opened.timeline
        )

    def close_number(self, shards: Iterable[int], *, applied_elsewhere: bool) -> None:
        """Uses the number up where it was refused. A failure is only logged: no number follows."""
        kind = embedding_pb2.CLOSE_KIND_VOID if applied_elsewhere else embedding_pb2.CLOSE_KIND_SKIP
        requests = {shard: embedding_pb2.CloseNumberRequest(header=self._header(shard), kind=kind) for shard in shards}
        outcomes = self._call_all(requests, lambda stubs: stubs.embedding.CloseNumber, self._calls.timeout_s)
        for shard, outcome in outcomes.items():
            if isinstance(outcome, ShardamError):
                logger.warning("shard %d did not close the number of a refused change: %s", shard, outcome.message)

    def leave(self) -> None:
        """Ends the client on all shards, as far as they answer."""
        header = common_pb2.RequestHeader(client_id=self._client_id)
        requests = {shard: embedding_pb2.LeaveRequest(header=header) for shard in self._shards}
        timeout_s = min(LEAVE_TIMEOUT_S, self._calls.timeout_s)
        outcomes = self._call_all(requests, lambda stubs: stubs.embedding.Leave, timeout_s)
        for shard, outcome in outcomes.items():
            if isinstance(outcome, ShardamError):
                logger.info("shard %d could not be told that a change's client leaves: %s", shard, outcome.message)


def raise_with(error: ShardamError, state: str) -> NoReturn:
    """Raises the error of a shard with what is known of the change."""
    raise make_error(error.reason, f"{error.message}; {state}", error.metadata) from error


def _restarted(errors: Mapping[int, ShardamError]) -> bool:
    """True: a shard came back as another process; what it knows of the client, only Open can tell."""
    return any(error.reason == "NEW_INCARNATION" for error in errors.values())
