"""Changes under an Idempotency-Key: made once however often they are sent, through whichever admin process.

The key is a client id that never leaves (PROTOCOL.md, section 4), so the shards remember its one number and how it ended for
24 h after it was last sent. The owner is asked first, alone: its part is the whole change, so its refusal leaves the number
open on every shard and a repeat is judged anew; and once it has taken its part, the others have only empty ones to take.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence

import xxhash

from shardam_proto.errors import BadOption, EtagMismatch, SequenceError, ShardamError
from shardam_proto.routing import RouteMap
from shardam_server.admin.change_clients import ChangeClient, Delivery, raise_with
from shardam_server.admin.row_changes import Applied, RowChange
from shardam_server.admin.shard_calls import Request, Response, ShardCalls

KEY_HEADER = "Idempotency-Key"

REPLAYED_HEADER = "Idempotency-Replayed"
"""`true` where the answer is that of an earlier request with the same key."""

_VISIBLE = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)
_MAX_SHOWN = 80  # characters of a key that a message repeats


@dataclasses.dataclass(frozen=True)
class IdempotencyKey:
    """A key as the caller chose it.

    Attributes:
        text: 1 to 255 visible ASCII characters.
    """

    text: str

    @classmethod
    def parse(cls, values: Sequence[str]) -> IdempotencyKey | None:
        """Reads the headers of a request.

        Args:
            values: every Idempotency-Key header.

        Returns:
            The key, or None if there is none.

        Raises:
            BadOption: more than one header, or another text than 1 to 255 visible ASCII characters.
        """
        if not values:
            return None
        if len(values) > 1:
            raise BadOption(f"the request has {len(values)} {KEY_HEADER} headers; send one")
        if not _VISIBLE.fullmatch(values[0]):
            raise BadOption(
                f"{KEY_HEADER} {values[0][:_MAX_SHOWN]!r} must be 1 to 255 visible ASCII characters, such as a UUID",
                metadata={"idempotency_key": values[0][:_MAX_SHOWN]},
            )
        return cls(values[0])

    @property
    def client_id(self) -> bytes:
        """The client id that stands for the key on the shards."""
        return xxhash.xxh3_128_digest(self.text.encode("ascii"))

    def reused(self, state: str) -> SequenceError:
        """Returns the error for a key that stands for another change.

        Args:
            state: what this request has changed.
        """
        shown = self.text[:_MAX_SHOWN]
        return SequenceError(
            f"{KEY_HEADER} {shown!r} was used for another change within the last 24 h; send each change with a key of its own; "
            f"{state}",
            reason="SEQUENCE_REUSED",
            metadata={"idempotency_key": shown},
        )


class KeyedClient:
    """The client of a key, for one request.

    Args:
        calls: reaches the shards.
        route_map: says which shards there are; all take part in every change.
        key: the key.
        request_id: for the shards' logs.
    """

    def __init__(self, calls: ShardCalls, route_map: RouteMap, key: IdempotencyKey, request_id: int) -> None:
        self._calls = calls
        self._key = key
        self._client = ChangeClient(calls, route_map, key.client_id, request_id)

    def open(self, subject: str) -> bool:
        """Registers the client, or finds it; returns whether some shard has taken a change under the key before.

        Args:
            subject: what the change is of, for messages.

        Raises:
            ShardamError: a shard did not answer; this request has changed nothing.
        """
        try:
            self._client.open()
        except ShardamError as error:
            raise_with(error, f"{subject} was not changed by this request; {_again()}")
        return bool(self._client.used)

    def run(self, change: RowChange[Request, Response]) -> Applied[Response]:
        """Makes the change, or finishes it, or finds out how it ended.

        Raises:
            EtagMismatch: the precondition does not hold; nothing has changed, and the key is still free.
            SequenceError: the key was used for another change (SEQUENCE_REUSED).
            ShardamError: a shard refused, did not answer or restarted; the message says whether the row was changed.
        """
        client, owner = self._client, change.shard
        try:
            change.precondition.check_owner(client.state_of(owner))
        except EtagMismatch as error:
            if owner in client.used:  # what was applied had another condition: this one would have been refused
                raise self._key.reused(f"{change.subject} was not changed") from error
            raise
        deadline = time.monotonic() + self._calls.timeout_s
        delivery: Delivery[Response] = Delivery()
        for stage in self._stages(change):
            delivery.add(client.deliver({shard: change.parts[shard] for shard in stage}, change.select, deadline))
            self._settle(change, delivery)
        answer = delivery.answers[owner]
        return Applied(answer, client.state_of(owner), self._is_replay(owner, answer, delivery))

    def _stages(self, change: RowChange[Request, Response]) -> Iterator[list[int]]:
        """Yields the shards to be asked one after the other: those that can tell another change apart, the owner, the rest."""
        used = self._client.used
        stages = (
            [shard for shard in change.parts if shard in used],
            [change.shard] if change.shard not in used else [],
            [shard for shard in change.parts if shard not in used and shard != change.shard],
        )
        return (stage for stage in stages if stage)

    def _settle(self, change: RowChange[Request, Response], delivery: Delivery[Response]) -> None:
        """Ends the change after a stage that brought no answer or a refusal."""
        owner, refusals = change.shard, delivery.refusals
        applied = owner in delivery.answers
        if applied and self._is_replay(owner, delivery.answers[owner], delivery):
            # The owner knows this very change, so where the number has another content it was closed by VOID.
            for shard in [shard for shard, error in refusals.items() if error.reason == "SEQUENCE_REUSED"]:
                del refusals[shard]
        state = delivery.describe(owner, change.subject)
        if delivery.unknown:
            raise_with(delivery.unknown[min(delivery.unknown)], f"{state}; {_again()}")
        if not refusals:
            return
        if any(error.reason == "SEQUENCE_REUSED" for error in refusals.values()):
            raise self._key.reused(state)
        if applied:
            self._client.close_number(refusals, applied_elsewhere=True)
        raise_with(refusals[min(refusals)], state)

    def _is_replay(self, owner: int, answer: Response, delivery: Delivery[Response]) -> bool:
        if owner in self._client.used:
            return True
        return bool(getattr(answer, "repeated_number", False)) and owner not in delivery.resent


def _again() -> str:
    return f"send it again with the same {KEY_HEADER}, which makes it at most once"
