"""One Exchange stream: requests in their order, changes applied in it, answers as they come (PROTOCOL.md, section 3).

A request is admitted before the next message is read: a change then has its place in the sequencer's order, whatever becomes of
the stream. What a request waits for, it waits for in a task of its own, which later messages pass.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from typing import Protocol

import grpc.aio

from shardam_proto.errors import BadOption, ShardamError, ShardNotReady
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2, shard_pb2
from shardam_server.shard.chunks import Chunk, ChunkedPart
from shardam_server.shard.context import ShardContext
from shardam_server.shard.front import explain, is_cancelled
from shardam_server.shard.groups.waits import waits_for
from shardam_server.shard.parking import Window
from shardam_server.shard.services.exchange_chunks import StreamChunks, is_chunk
from shardam_server.shard.services.exchange_messages import StreamRequest, read_request
from shardam_server.shard.services.exchange_order import Answer, Apply, StreamOrder, within_budget
from shardam_server.shard.services.pulls import Pull, Pulls
from shardam_server.shard.services.pushes import Pushes, PushPart
from shardam_server.shard.services.row_changes import RowChanges

logger = logging.getLogger(__name__)

METHOD_OF_KIND = {"pull": "Pull", "push": "Push"}
"""Kinds of requests whose duration is measured, by the name of the unary call."""


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

    def apply(self, request: StreamRequest) -> embedding_pb2.ExchangeResponse:
        """Applies a change that came as one message; on the sequencer's thread.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        answer = embedding_pb2.ExchangeResponse(request_id=request.header.request_id)
        match request.message:
            case embedding_pb2.PushRequest() as message:
                answer.push.CopyFrom(self.pushes.apply(PushPart.of_message(message, request.row_ids, request.rows)))
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

    def apply_chunks(self, part: ChunkedPart) -> embedding_pb2.ExchangeResponse:
        """Applies a part that came in chunks; on the sequencer's thread.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        push = self.pushes.apply(PushPart.of_chunks(part))
        return embedding_pb2.ExchangeResponse(request_id=part.head.header.request_id, push=push)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request that has to be answered.

    Attributes:
        kind: the field of its message.
        request_id: its id.
        arrived: time.perf_counter() of its first message.
        held_bytes: what it and its answer hold until it is answered, beside what the sequencer counts.
    """

    kind: str
    request_id: int
    arrived: float
    held_bytes: int = 0


class ExchangeStream:
    """One stream from its start to its end; made on the event loop.

    Args:
        shard: the shard.
        work: what requests do.
        context: the call, which takes and gives messages as bytes.
    """

    def __init__(
        self,
        shard: ShardContext,
        work: ExchangeWork,
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> None:
        self._shard = shard
        self._work = work
        self._context = context
        self._window = Window()
        self._writing = asyncio.Lock()
        self._answers: set[asyncio.Task[None]] = set()
        self._order = StreamOrder(shard)
        self._chunks = StreamChunks(shard.streams.open_parts, work.pushes, self._refuse_part)

    async def run(self) -> None:
        """Serves until the client has sent its last request or the shard drains, and all that was accepted is answered.

        Raises:
            ShardNotReady: the shard drains already.
            BadOption: a message is not protobuf of this service.
        """
        if self._shard.serving == shard_pb2.SERVING_STATE_DRAINING:
            raise ShardNotReady(f"shard {self._shard.identity.index} is draining; try again")
        with self._shard.streams.opened():
            reading = asyncio.create_task(self._read_all())
            draining = asyncio.create_task(self._shard.streams.wait_for_drain())
            try:
                await asyncio.wait({reading, draining}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    # What is read from here on is refused as NOT_READY; a client that goes on sending must not hold this up.
                    self._chunks.refuse(ShardNotReady(f"shard {self._shard.identity.index} is draining; send the part again"))
                    await self._answered()
                stopped = not reading.done() and reading.cancel()
                await self._answered()
                if not stopped:
                    reading.result()  # raises why the stream cannot be read
            finally:
                for task in (reading, draining, *self._answers):
                    task.cancel()
                self._chunks.drop()

    async def _answered(self) -> None:
        """Waits until what has been asked so far is answered."""
        if self._answers:
            await asyncio.wait(set(self._answers))

    async def _read_all(self) -> None:
        while True:
            await self._window.wait_for_room()
            await self._shard.sequencer.wait_for_room()
            data = await self._context.read()
            if data is grpc.aio.EOF:  # type: ignore[comparison-overlap]  # the stubs leave it out
                return
            self._shard.metrics.received_bytes.inc(len(data))
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Admits a message or refuses it; a chunk that is not a part's last has no answer.

        Raises:
            BadOption: it is not protobuf of this service: its sender means something else by this stream.
        """
        arrived = time.perf_counter()
        request = read_request(data)
        if request is None:
            unknown = "the message holds none of the requests that this version knows; use matching shardam packages"
            self._refuse(_Asked("request", 0, arrived), BadOption(unknown))
            return
        header = request.header
        asked = _Asked(request.kind, header.request_id, arrived)
        chunk = _chunk(request)
        try:
            _check_header(request.kind, header)
            if chunk is None:
                self._admit(request, asked)
            else:
                self._admit_chunk(chunk, asked)
        except Exception as error:  # noqa: BLE001 - the edge of one request; explain() logs what is no refusal
            if chunk is not None:
                self._chunks.forget(header)
            self._refuse(asked, error)

    def _admit(self, request: StreamRequest, asked: _Asked) -> None:
        header, message = request.header, request.message
        self._shard.check_serving(header)
        if isinstance(message, embedding_pb2.PullRequest):
            pull = Pull(message, request.row_ids)
            held_bytes = request.num_bytes + self._work.pulls.answer_bytes(message)
            self._start(dataclasses.replace(asked, held_bytes=held_bytes), self._pull(pull))
        elif isinstance(message, embedding_pb2.ArriveRequest):
            self._start(asked, lambda: self._arrive(message))
        else:
            self._chunks.give_way(header)
            self._change(asked, header, lambda: self._work.apply(request), request.num_bytes)

    def _admit_chunk(self, chunk: Chunk, asked: _Asked) -> None:
        if self._chunks.is_refused(chunk.head.header):
            return
        self._shard.check_serving(chunk.head.header, chunks=True)
        part = self._chunks.take(chunk, asked.arrived)
        if part is not None:
            whole = dataclasses.replace(asked, arrived=part.arrived)
            self._change(whole, part.head.header, lambda: self._work.apply_chunks(part), part.sizes.total_bytes)

    def _change(self, asked: _Asked, header: common_pb2.RequestHeader, apply: Apply, num_bytes: int) -> None:
        """Admits a change, or parks it; what is parked counts as held by the stream, since the sequencer has not got it yet."""
        if self._order.must_park(header):
            held = dataclasses.replace(asked, held_bytes=num_bytes)
            self._start(held, self._order.parked_change(header, apply, num_bytes))
        else:
            self._start(asked, self._order.change(header, apply, num_bytes))

    def _pull(self, pull: Pull) -> Answer:
        """Lets a pull read once it may, within its budget."""
        header = pull.head.header
        allowed = self._order.pull(header)

        def behind() -> dict[str, str]:
            return waits_for(self._shard.state, header)

        async def read() -> bytes:
            async with within_budget(header, "the pull", "pull again, or with more time", behind):
                return await self._work.pulls.read_on_stream(pull, await allowed())

        return read

    async def _arrive(self, request: embedding_pb2.ArriveRequest) -> embedding_pb2.ExchangeResponse:
        with self._shard.streams.parking.place():
            arrive = await self._shard.streams.until_drain(self._work.arrives.arrive(request))
        return embedding_pb2.ExchangeResponse(request_id=request.header.request_id, arrive=arrive)

    def _refuse(self, asked: _Asked, error: Exception) -> None:
        async def fail() -> embedding_pb2.ExchangeResponse:
            raise error

        self._start(asked, fail)

    def _refuse_part(self, part: ChunkedPart, error: ShardamError) -> None:
        self._refuse(_Asked("push", part.head.header.request_id, part.arrived), error)

    def _start(self, asked: _Asked, answer: Answer) -> None:
        self._window.enter(asked.held_bytes)
        task = asyncio.create_task(self._respond(asked, answer))
        self._answers.add(task)

        def leave(_: asyncio.Task[None]) -> None:
            self._answers.discard(task)
            self._window.leave(asked.held_bytes)

        task.add_done_callback(leave)

    async def _respond(self, asked: _Asked, answer: Answer) -> None:
        """Waits for an answer and sends it."""
        metrics = self._shard.metrics
        try:
            response = await answer()
        except (Exception, asyncio.CancelledError) as failure:
            if is_cancelled(failure):
                raise
            error = explain(failure, f"Exchange {asked.kind}", asked.request_id, metrics)
            refusal = embedding_pb2.Refusal(reason=error.reason, message=error.message, metadata=error.metadata)
            response = embedding_pb2.ExchangeResponse(request_id=asked.request_id, refusal=refusal)
        else:
            metrics.observe(METHOD_OF_KIND.get(asked.kind, asked.kind), time.perf_counter() - asked.arrived)
        data = response if isinstance(response, bytes) else response.SerializeToString()
        try:
            async with self._writing:
                await self._shard.streams.turns.take(len(data))
                await self._context.write(data)
        except grpc.aio.BaseError as failure:
            logger.debug("the answer of %s could not be sent: %s", asked.kind, failure, extra={"request_id": asked.request_id})
        else:
            metrics.sent_bytes.inc(len(data))


def _chunk(request: StreamRequest) -> Chunk | None:
    """Returns a push that is one chunk of several."""
    message = request.message
    if isinstance(message, embedding_pb2.PushRequest) and is_chunk(message.header):
        return Chunk(message, request.row_ids, request.rows)
    return None


def _check_header(kind: str, header: common_pb2.RequestHeader) -> None:
    """Checks what only requests on a stream need.

    Raises:
        BadOption: no request_id, or a budget that is no time.
    """
    if not header.request_id:
        raise BadOption(f"a {kind} on a stream needs a request_id, or its answer could not be told from others")
    if not 0 <= header.budget_s < math.inf:
        raise BadOption(f"budget_s must be finite and at least 0, got {header.budget_s:g}")
