"""One change of one row by a client id of its own: a part to every shard, empty ones too (PROTOCOL.md, section 4).

Knows numbers and outcomes, not what the parts say (row_writes.py). The client id lives for the one change, so nothing is kept
here between requests.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Generic, NoReturn

from shardam_proto.errors import ShardamError, make_error
from shardam_proto.limits import CLIENT_ID_BYTES, MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.admin.etags import Precondition
from shardam_server.admin.shard_calls import Request, Response, Select, ShardCalls

logger = logging.getLogger(__name__)

NUMBER = 1
"""The client id is new, so its only change has the first number."""

TRIES_PER_TIMEOUT = 2
"""A part waits this share of the time allowed for its answer, so that a lost answer leaves time to ask again."""

FIRST_WAIT_S = 0.05
LEAVE_TIMEOUT_S = 2.0
"""Saying goodbye is a courtesy; what came before it decides what the request is answered."""


@dataclasses.dataclass(frozen=True)
class RowChange(Generic[Request, Response]):
    """A change before it is sent.

    Attributes:
        shard: the row's owner; the parts of all other shards are empty.
        select: picks the stub's method.
        parts: request by shard index, for every shard; headers are filled in when they are sent.
        precondition: its part that the owner cannot check, the process life, is checked here; the rest stands in the part.
    """

    shard: int
    select: Select[Request, Response]
    parts: Mapping[int, Request]
    precondition: Precondition


def run_change(calls: ShardCalls, change: RowChange[Request, Response], request_id: int) -> tuple[Response, int]:
    """Opens a client on all shards, sends the change, closes its number where it is refused, and leaves.

    Args:
        calls: reaches the shards.
        change: the change.
        request_id: for the shards' logs.

    Returns:
        The owner's answer, and the owner's incarnation.

    Raises:
        EtagMismatch: the precondition does not hold; nothing has changed.
        ShardamError: a shard refused, did not answer or restarted; the message says whether the row was changed.
    """
    client = _Client(calls, change.parts, request_id)
    try:
        client.open()
        change.precondition.check_process(change.shard, client.headers[change.shard].incarnation)
        return client.send(change), client.headers[change.shard].incarnation
    finally:
        client.leave()


class _Client:
    """A client id with one number."""

    def __init__(self, calls: ShardCalls, shards: Iterable[int], request_id: int) -> None:
        self.headers = {shard: common_pb2.RequestHeader() for shard in shards}
        self._calls = calls
        self._request_id = request_id
        self._client_id = secrets.token_bytes(CLIENT_ID_BYTES)

    def open(self) -> None:
        """Registers the client on all shards and notes who they are.

        Raises:
            ShardamError: one did not; nothing was changed.
        """
        requests = {
            shard: embedding_pb2.OpenRequest(
                header=common_pb2.RequestHeader(client_id=self._client_id),
                min_protocol_version=MIN_PROTOCOL_VERSION,
                max_protocol_version=PROTOCOL_VERSION,
            )
            for shard in self.headers
        }
        outcomes = self._calls.call_many(requests, lambda stubs: stubs.embedding.Open, self._request_id)
        for shard, outcome in sorted(outcomes.items()):
            if isinstance(outcome, ShardamError):
                _raise_with(outcome, "the row was not changed")
            self.headers[shard] = common_pb2.RequestHeader(
                client_id=self._client_id,
                number=NUMBER,
                incarnation=outcome.header.incarnation,
                timeline=outcome.header.timeline,
            )

    def send(self, change: RowChange[Request, Response]) -> Response:
        """Sends every shard its part until all have answered, and returns the owner's answer.

        Raises:
            ShardamError: a shard refused its part, or gave no answer in time.
        """
        answers: dict[int, Response] = {}
        refusals: dict[int, ShardamError] = {}
        deadline, wait_s = time.monotonic() + self._calls.timeout_s, FIRST_WAIT_S
        while pending := {shard: part for shard, part in change.parts.items() if shard not in answers | refusals}:
            unknown: dict[int, ShardamError] = {}
            for shard, outcome in self._attempt(pending, change.select).items():
                if not isinstance(outcome, ShardamError):
                    answers[shard] = outcome
                elif outcome.rule.retryable:
                    unknown[shard] = outcome
                else:
                    refusals[shard] = outcome
            if unknown and (_restarted(unknown) or time.monotonic() + wait_s > deadline):
                _raise_with(unknown[min(unknown)], _state_of_row(change.shard, answers, refusals))
            if unknown:
                time.sleep(wait_s)
                wait_s *= 2
        if refusals:
            self._close(refusals, applied_elsewhere=bool(answers))
            _raise_with(refusals[min(refusals)], _state_of_row(change.shard, answers, refusals))
        return answers[change.shard]

    def _attempt(
        self, parts: Mapping[int, Request], select: Select[Request, Response]
    ) -> Mapping[int, Response | ShardamError]:
        for shard, part in parts.items():
            part.header.CopyFrom(self.headers[shard])
        try:
            return self._calls.call_many(parts, select, self._request_id, self._calls.timeout_s / TRIES_PER_TIMEOUT)
        except ShardamError as error:  # the cluster is not known any more, so no part has an answer
            return dict.fromkeys(parts, error)

    def _close(self, refusals: Iterable[int], *, applied_elsewhere: bool) -> None:
        """Uses the number up where it was refused. A failure is only logged: the client leaves, no number follows."""
        kind = embedding_pb2.CLOSE_KIND_VOID if applied_elsewhere else embedding_pb2.CLOSE_KIND_SKIP
        requests = {shard: embedding_pb2.CloseNumberRequest(header=self.headers[shard], kind=kind) for shard in refusals}
        outcomes = self._calls.call_many(requests, lambda stubs: stubs.embedding.CloseNumber, self._request_id)
        for shard, outcome in outcomes.items():
            if isinstance(outcome, ShardamError):
                logger.warning("shard %d did not close the number of a refused change: %s", shard, outcome.message)

    def leave(self) -> None:
        """Ends the client on all shards, as far as they answer."""
        header = common_pb2.RequestHeader(client_id=self._client_id)
        requests = {shard: embedding_pb2.LeaveRequest(header=header) for shard in self.headers}
        timeout_s = min(LEAVE_TIMEOUT_S, self._calls.timeout_s)
        try:
            outcomes = self._calls.call_many(requests, lambda stubs: stubs.embedding.Leave, self._request_id, timeout_s)
        except ShardamError as error:
            outcomes = dict.fromkeys(requests, error)
        for shard, outcome in outcomes.items():
            if isinstance(outcome, ShardamError):
                logger.info("shard %d could not be told that a change's client leaves: %s", shard, outcome.message)


def _restarted(errors: Mapping[int, ShardamError]) -> bool:
    """True: a shard came back as another process, which does not know the client; asking again cannot help."""
    return any(error.reason == "NEW_INCARNATION" for error in errors.values())


def _state_of_row(owner: int, answers: Mapping[int, object], refusals: Mapping[int, ShardamError]) -> str:
    if owner in answers:
        return "the row was changed, but not every shard has taken its empty part of the change"
    if owner in refusals:
        return "the row was not changed"
    return "whether the row was changed is not known: read it"


def _raise_with(error: ShardamError, state: str) -> NoReturn:
    raise make_error(error.reason, f"{error.message}; {state}", error.metadata) from error
