"""What a shard must refuse of a group's numbers, without changing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from shardam_proto.errors import ShardamError
from shardam_server.shard.clients import ANY_CONTENT, ClientEntry, Outcome
from shardam_server.shard.groups.changes import IncomingPart, stage
from shardam_server.shard.state import ShardState
from shardam_testing.group_model.contents import ROW_IDS

Misuse = tuple[str, Callable[[], object]]
"""The reason to expect, and what is refused for it."""


def misuse(state: ShardState, part: IncomingPart) -> None:
    """Tries all that is wrong with a shard in its present state.

    Args:
        state: the shard's.
        part: the last part that some client has made for it.

    Raises:
        AssertionError: something was not refused, or for another reason.
    """
    for expected, action in _misuses(state, part):
        before = state.change_number
        try:
            action()
        except ShardamError as error:
            reason = error.reason
        else:
            reason = "nothing"
        assert (reason, state.change_number) == (expected, before)


def _misuses(state: ShardState, part: IncomingPart) -> Iterator[Misuse]:
    client = state.clients.find(part.origin.client_id)
    if state.groups.exclusive() is not None:
        yield "NOT_A_MEMBER", lambda: state.push([])
        yield "NOT_A_MEMBER", lambda: state.delete(state.table(1), ROW_IDS)
    if client is None:
        yield "UNKNOWN_CLIENT", lambda: stage(state, part)
    elif client.closed:
        yield "CLIENT_CLOSED", lambda: stage(state, part)
    else:
        yield from _misuses_of_open(state, part, client)


def _misuses_of_open(state: ShardState, part: IncomingPart, client: ClientEntry) -> Iterator[Misuse]:
    origin, staged = part.origin, state.groups.part(part.origin.client_id)
    other = dataclasses.replace(origin, digest=b"other")
    if origin.number > client.last_number + 1:
        yield "SEQUENCE_GAP", lambda: stage(state, part)
    elif _takes_any_content(client, origin.number):
        return
    elif origin.number in client.outcomes or (staged is not None and staged.origin.number == origin.number):
        yield "SEQUENCE_REUSED", lambda: stage(state, dataclasses.replace(part, origin=other))
    elif state.groups.of_client(origin.client_id) is None:
        yield "NOT_A_MEMBER", lambda: stage(state, part)
    else:
        yield "GROUP_MISMATCH", lambda: stage(state, dataclasses.replace(part, rank=part.rank + 1))
    next_but_one = dataclasses.replace(origin, number=client.last_number + 2)
    yield "SEQUENCE_GAP", lambda: stage(state, dataclasses.replace(part, origin=next_but_one))


def _takes_any_content(client: ClientEntry, number: int) -> bool:
    """Whether a number was closed without its part: by the decision that counted it, or because it came too late."""
    digest, outcome = client.outcomes.get(number, (b"", Outcome()))
    return digest == ANY_CONTENT or outcome.came_too_late
