"""Requests of an Exchange stream as they come: raw bytes, taken apart without a copy of what is large.

A message of the layout of `shardam_proto.wire` is split: protobuf reads its small fields, its ids and rows are views. Any other
message is protobuf's as a whole, which copies them and changes nothing else.
"""

from __future__ import annotations

import dataclasses

from google.protobuf.message import DecodeError

from shardam_proto.errors import BadOption
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2
from shardam_proto.wire import open_envelope, split
from shardam_server.shard.chunks import Buffer

SPLIT_BYTES = 4096
"""Bytes from which a message is split: protobuf copies a smaller one in less time than it takes to find its parts."""

RequestMessage = (
    embedding_pb2.PullRequest
    | embedding_pb2.PullChangedRequest
    | embedding_pb2.PushRequest
    | embedding_pb2.CloseNumberRequest
    | embedding_pb2.ArriveRequest
    | row_pb2.AssignRowsRequest
    | row_pb2.DeleteRowsRequest
    | row_pb2.ClearMomentsRequest
)
"""The one message inside an ExchangeRequest."""

_NAMES = {field.number: field.name for field in embedding_pb2.ExchangeRequest.DESCRIPTOR.fields}
"""Kinds of requests by the numbers of their fields."""

_WITH_ROWS: dict[str, type[embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest | embedding_pb2.PushRequest]] = {
    "pull": embedding_pb2.PullRequest,
    "pull_changed": embedding_pb2.PullChangedRequest,
    "push": embedding_pb2.PushRequest,
}
"""Kinds of requests whose messages have ids and rows as their last fields."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request of a stream.

    Attributes:
        kind: name of its field in ExchangeRequest.
        message: its message; whether it still holds ids and rows is not said.
        row_ids: ids of a pull or push, as views of the received bytes if these are many.
        rows: gradients of a push, likewise.
        num_bytes: of the whole message as received.
    """

    kind: str
    message: RequestMessage
    row_ids: Buffer
    rows: Buffer
    num_bytes: int

    @property
    def header(self) -> common_pb2.RequestHeader:
        """Its header."""
        return self.message.header


def read_request(data: bytes) -> StreamRequest | None:
    """Reads a message of a stream; None: it holds none of the requests that this version knows.

    Raises:
        BadOption: it is not protobuf of this service.
    """
    try:
        return _split_request(data) or _whole_request(data)
    except DecodeError as error:
        raise BadOption(f"the stream holds what is no ExchangeRequest: {error}; use matching shardam packages") from error


def _split_request(data: bytes) -> StreamRequest | None:
    """Takes a large message apart; None: it is small, has no rows, or is laid out in another way."""
    if len(data) < SPLIT_BYTES:
        return None
    envelope = open_envelope(data)
    kind = "" if envelope is None else _NAMES.get(envelope.kind, "")
    if envelope is None or kind not in _WITH_ROWS:
        return None
    parts = split(data, envelope.start, envelope.end)
    if parts is None:
        return None
    return StreamRequest(kind, _WITH_ROWS[kind].FromString(parts.head), parts.first, parts.second, len(data))


def _whole_request(data: bytes) -> StreamRequest | None:
    request = embedding_pb2.ExchangeRequest.FromString(data)
    kind = request.WhichOneof("request")
    if kind is None:
        return None
    message: RequestMessage = getattr(request, kind)
    if isinstance(message, embedding_pb2.PushRequest):
        return StreamRequest(kind, message, message.row_ids, message.rows, len(data))  # each access to a field copies it
    if isinstance(message, embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest):
        return StreamRequest(kind, message, message.row_ids, b"", len(data))
    return StreamRequest(kind, message, b"", b"", len(data))
