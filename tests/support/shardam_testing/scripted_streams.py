"""The stream of a scripted shard: puts chunks together, and loses, holds back or refuses answers as it is told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shardam_proto.errors import BadOption, ShardamError
from shardam_proto.v1 import embedding_pb2, row_pb2

if TYPE_CHECKING:
    from shardam_testing.scripted_shards import ScriptedShard

LOSE_ANSWER = "lose answer"
"""The shard does what it is asked, and the caller sees the connection fail."""

SWALLOW = "swallow"
"""The shard does what it is asked and never answers; the stream lives on. On streams only."""

HOLD = "hold"
"""The shard does what it is asked and answers after its next answer. On streams only."""

Fault = ShardamError | str | threading.Event | None
"""An event is a gate: the shard takes nothing more until it is set, then goes on as ever. None: no fault."""

_Read = embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest

_Request = (
    _Read
    | embedding_pb2.ArriveRequest
    | embedding_pb2.PushRequest
    | embedding_pb2.CloseNumberRequest
    | row_pb2.AssignRowsRequest
    | row_pb2.DeleteRowsRequest
    | row_pb2.ClearMomentsRequest
)


class BrokenConnection(Exception):
    """The connection is to fail here."""


class ScriptedStream:
    """One Exchange call.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ScriptedShard) -> None:
        self._shard = shard
        self._chunks: list[embedding_pb2.PushRequest] = []
        self._held: list[embedding_pb2.ExchangeResponse] = []

    def take(self, message: embedding_pb2.ExchangeRequest) -> list[embedding_pb2.ExchangeResponse]:
        """Takes one message and returns what is answered now."""
        request: _Request | None = getattr(message, message.WhichOneof("request") or "pull")
        if isinstance(request, embedding_pb2.PushRequest):
            request = self._whole(request)
        if request is None:
            return []
        try:
            if self._shard.group is not None and isinstance(request, _Read):
                self._shard.group.await_step(self._shard, request.header)
            answer, fault = self._shard.answer(request)
        except ShardamError as error:
            self._shard.refused[error.reason] += 1
            refusal = embedding_pb2.Refusal(reason=error.reason, message=error.message, metadata=error.metadata)
            answer, fault = embedding_pb2.ExchangeResponse(request_id=request.header.request_id, refusal=refusal), None
        if fault == LOSE_ANSWER:
            raise BrokenConnection
        if fault == SWALLOW:
            return []
        if fault == HOLD:
            self._held.append(answer)
            return []
        held, self._held = self._held, []
        return [*self._shard.cut_answer(answer), *held]

    def _whole(self, push: embedding_pb2.PushRequest) -> embedding_pb2.PushRequest | None:
        """Returns a push once its last chunk is there."""
        shard, header = self._shard, push.header
        if header.num_chunks <= 1:
            return push
        shard.num_chunks += 1
        if shard.cuts and shard.cuts[0] == header.chunk_index:
            shard.fired[f"cut at chunk {shard.cuts.popleft()}"] += 1
            raise BrokenConnection
        if header.chunk_index == 0:
            self._chunks = []
        self._chunks.append(push)
        first = self._chunks[0]
        ids = [(chunk.header.request_id, chunk.header.number, chunk.header.num_chunks) for chunk in self._chunks]
        if header.chunk_index != len(self._chunks) - 1 or len(set(ids)) != 1:
            raise AssertionError(f"chunk {header.chunk_index} of request {header.request_id} came after {ids}")
        if len(self._chunks) < header.num_chunks:
            return None
        whole = embedding_pb2.PushRequest(
            header=header, options=first.options, sections=first.sections, contribution=first.contribution
        )
        whole.row_ids = b"".join(chunk.row_ids for chunk in self._chunks)
        whole.rows = b"".join(chunk.rows for chunk in self._chunks)
        self._chunks = []
        if len(whole.row_ids) + len(whole.rows) != first.total_bytes:
            raise BadOption(f"total_bytes is {first.total_bytes}")
        return whole
