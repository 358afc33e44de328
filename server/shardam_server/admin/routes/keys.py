"""The Idempotency-Key header of routes that change something, and what their answers say of it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request

from shardam_server.admin.keyed_changes import KEY_HEADER, REPLAYED_HEADER, IdempotencyKey

_DESCRIPTION = """Makes this change at most once, however often it is sent: 1 to 255 visible ASCII characters, such as a UUID.

A repeat with the same key gets the first one's answer (status, numbers, ETag) with `Idempotency-Replayed: true`, through any
admin process, after restarts of shards that keep a journal, and until 24 h after the key was last sent. After 503, or a
connection that broke, send it again: what was begun is finished. A refusal (such as 412) leaves the key free, so a repeat is
judged anew; a 404 of a row that is not there is an answer and is repeated. The key with another change (another row, body or
condition) is 400 SEQUENCE_REUSED and changes nothing. Each key takes one of a shard's client entries (--max-clients) for that
time. Without the header every request is a change of its own."""


async def _idempotency_key(
    request: Request,
    idempotency_key: Annotated[str | None, Header(description=_DESCRIPTION)] = None,
) -> IdempotencyKey | None:
    return IdempotencyKey.parse(request.headers.getlist(KEY_HEADER))


Key = Annotated[IdempotencyKey | None, Depends(_idempotency_key)]
"""The request's Idempotency-Key or None, as a parameter of an endpoint."""

KEYED_ANSWER: dict[int | str, dict[str, object]] = {
    200: {
        "headers": {
            REPLAYED_HEADER: {
                "description": "true: an earlier request with the same Idempotency-Key made the change; this is its answer",
                "schema": {"type": "string", "enum": ["true"]},
            }
        }
    }
}
"""What OpenAPI says of an answer to a request with a key."""


def replayed_header(replayed: bool) -> dict[str, str]:
    """Returns the header of an answer that is an earlier request's."""
    return {REPLAYED_HEADER: "true"} if replayed else {}
