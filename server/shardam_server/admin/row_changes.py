"""One change of one row: a part to every shard, empty ones too, by a client id of its own (PROTOCOL.md, section 4).

Knows numbers and outcomes, not what the parts say (row_writes.py). Nothing is kept here between requests: what a later repeat
has to know, the shards keep.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Generic

from shardam_proto.errors import ShardamError
from shardam_proto.limits import CLIENT_ID_BYTES
from shardam_proto.routing import RouteMap
from shardam_server.admin.change_clients import ChangeClient, raise_with
from shardam_server.admin.etags import Precondition, StateId
from shardam_server.admin.shard_calls import Request, Response, Select, ShardCalls

READ_IT = "read it"
"""What to do when it is not known whether a change without an Idempotency-Key was made."""


@dataclasses.dataclass(frozen=True)
class RowChange(Generic[Request, Response]):
    """A change before it is sent.

    Attributes:
        shard: the row's owner; the parts of all other shards are empty.
        route_map: says so.
        select: picks the stub's method.
        parts: request by shard index, for every shard; headers are filled in when they are sent.
        precondition: its part that the owner cannot check, whose state it is, is checked here; the rest stands in the part.
        subject: what the change is of, for messages.
    """

    shard: int
    route_map: RouteMap
    select: Select[Request, Response]
    parts: Mapping[int, Request]
    precondition: Precondition
    subject: str = "the row"


@dataclasses.dataclass(frozen=True)
class Applied(Generic[Response]):
    """A change that every shard has taken.

    Attributes:
        answer: the owner's answer.
        owner: the owner's state.
        replayed: an earlier request made the change, and this is the answer that it got.
    """

    answer: Response
    owner: StateId
    replayed: bool = False


def run_change(calls: ShardCalls, change: RowChange[Request, Response], request_id: int) -> Applied[Response]:
    """Makes a change by a new client id: opens it on all shards, sends the parts, and leaves.

    Where the change is refused its number is closed.

    Args:
        calls: reaches the shards.
        change: the change.
        request_id: for the shards' logs.

    Raises:
        EtagMismatch: the precondition does not hold; nothing has changed.
        ShardamError: a shard refused, did not answer or restarted; the message says whether the row was changed.
    """
    client = ChangeClient(calls, change.route_map, secrets.token_bytes(CLIENT_ID_BYTES), request_id)
    try:
        try:
            client.open()
        except ShardamError as error:
            raise_with(error, f"{change.subject} was not changed")
        owner = client.state_of(change.shard)
        change.precondition.check_owner(owner)
        delivery = client.deliver(change.parts, change.select, time.monotonic() + calls.timeout_s)
        state = delivery.describe(change.shard, change.subject)
        if delivery.unknown:
            todo = f": {READ_IT}" if change.shard in delivery.unknown else ""
            raise_with(delivery.unknown[min(delivery.unknown)], state + todo)
        if delivery.refusals:
            client.close_number(delivery.refusals, applied_elsewhere=bool(delivery.answers))
            raise_with(delivery.refusals[min(delivery.refusals)], state)
        return Applied(delivery.answers[change.shard], owner)
    finally:
        client.leave()
