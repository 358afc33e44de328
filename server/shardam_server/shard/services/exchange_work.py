"""What the changes of a stream do: the same as the unary calls, by the kind of their message."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from shardam_proto.v1 import embedding_pb2, row_pb2
from shardam_server.shard.chunks import ChunkedPart
from shardam_server.shard.phases import Laps
from shardam_server.shard.services.exchange_messages import StreamRequest
from shardam_server.shard.services.pulls import Pulls
from shardam_server.shard.services.pushes import Pushes, PushPart
from shardam_server.shard.services.row_changes import RowChanges


class Arrives(Protocol):
    """Takes in what members tell home of their steps; home's is HomeSteps, as on the other shards, where it refuses."""

    async def arrive(self, request: embedding_pb2.ArriveRequest) -> embedding_pb2.ArriveResponse:
        """Answers once the step is decided, or without a result when the message's budget is over; cancelled with its stream.

        Raises:
            ShardamError: it is refused.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ExchangeWork:
    """What requests do, in the stream as in unary calls.

    Attributes:
        pulls: reads weights.
        pushes: applies parts and closes numbers.
        row_changes: changes rows.
        arrives: waits for the decisions of steps.
    """

    pulls: Pulls
    pushes: Pushes
    row_changes: RowChanges
    arrives: Arrives

    def apply(self, request: StreamRequest, laps: Laps) -> embedding_pb2.ExchangeResponse:
        """Applies a change that came as one message; on the sequencer's thread.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        answer = embedding_pb2.ExchangeResponse(request_id=request.header.request_id)
        match request.message:
            case embedding_pb2.PushRequest() as message:
                part = PushPart.of_message(message, request.row_ids, request.rows)
                answer.push.CopyFrom(self.pushes.apply(part, laps))
            case embedding_pb2.CloseNumberRequest() as message:
                answer.close_number.CopyFrom(self.pushes.close_number(message))
            case row_pb2.AssignRowsRequest() as message:
                answer.assign_rows.CopyFrom(self.row_changes.assign(message))
            case row_pb2.DeleteRowsRequest() as message:
                answer.delete_rows.CopyFrom(self.row_changes.delete(message))
            case row_pb2.ClearMomentsRequest() as message:
                answer.clear_moments.CopyFrom(self.row_changes.clear_moments(message))
            case _:
                raise AssertionError(f"{request.kind} is no change")
        return answer

    def apply_chunks(self, part: ChunkedPart, laps: Laps) -> embedding_pb2.ExchangeResponse:
        """Applies a part that came in chunks; on the sequencer's thread.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        push = self.pushes.apply(PushPart.of_chunks(part), laps)
        return embedding_pb2.ExchangeResponse(request_id=part.head.header.request_id, push=push)
