"""Answers as they come off a stream: small ones as protobuf reads them, rows in pieces that nobody has copied."""

from __future__ import annotations

import dataclasses

from shardam_proto import wire
from shardam_proto.v1 import common_pb2, embedding_pb2

_PULL = embedding_pb2.ExchangeResponse.PULL_FIELD_NUMBER
_PULL_CHANGED = embedding_pb2.ExchangeResponse.PULL_CHANGED_FIELD_NUMBER

_NOTHING = memoryview(b"")

RowsHead = embedding_pb2.PullResponse | embedding_pb2.PullChangedResponse


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """An answer with rows, or one chunk of it.

    Attributes:
        request_id: the request that it answers.
        head: its small fields.
        positions: of a PullChangedResponse.
        rows: its rows; a view of the message, which is nobody else's.
    """

    request_id: int
    head: RowsHead
    positions: memoryview
    rows: memoryview

    @property
    def header(self) -> common_pb2.ResponseHeader:
        """The header."""
        return self.head.header

    @property
    def num_chunks(self) -> int:
        """Chunks of the answer, 1 where it is whole."""
        return max(1, self.head.header.num_chunks)

    @property
    def is_last(self) -> bool:
        """True: the answer ends with it."""
        return self.head.header.chunk_index + 1 >= self.num_chunks


def read_answer(data: bytes) -> embedding_pb2.ExchangeResponse | Piece:
    """Reads one message of a stream.

    Raises:
        google.protobuf.message.DecodeError: it is none.
    """
    envelope = wire.open_envelope(data)
    if envelope is not None and envelope.kind in (_PULL, _PULL_CHANGED):
        parts = wire.split(data, envelope.start, envelope.end)
        if parts is not None:
            if envelope.kind == _PULL:  # a PullResponse has no field of positions' number: protobuf passes it over
                return Piece(envelope.request_id, embedding_pb2.PullResponse.FromString(parts.head), _NOTHING, parts.second)
            changed_head = embedding_pb2.PullChangedResponse.FromString(parts.head)
            return Piece(envelope.request_id, changed_head, parts.first, parts.second)
    response = embedding_pb2.ExchangeResponse.FromString(data)
    match response.WhichOneof("response"):
        case "pull":
            return Piece(response.request_id, response.pull, _NOTHING, memoryview(response.pull.rows))
        case "pull_changed":
            changed = response.pull_changed
            return Piece(response.request_id, changed, memoryview(changed.positions), memoryview(changed.rows))
    return response
