"""One Exchange stream: requests in their order, changes applied in it, answers as they come (PROTOCOL.md, section 3).

A request is admitted before the next message is read: a change then has its place in the sequencer's order, whatever becomes of
the stream. What a request waits for, it waits for in a task of its own, which later messages pass.
"""

from __future__ import annotations

import asyncio
import math
import time

import grpc.aio

from shardam_proto.errors import BadOption, ShardamError, ShardNotReady
from shardam_proto.v1 import common_pb2, embedding_pb2, shard_pb2
from shardam_server.shard.chunks import Chunk, ChunkedPart
from shardam_server.shard.context import ShardContext
from shardam_server.shard.front import explain, is_cancelled
from shardam_server.shard.groups.waits import waits_for
from shardam_server.shard.parking import Window
from shardam_server.shard.phases import Laps
from shardam_server.shard.services.exchange_answers import AnswerWriter, Asked
from shardam_server.shard.services.exchange_chunks import StreamChunks, is_chunk
from shardam_server.shard.services.exchange_messages import StreamRequest, read_request
from shardam_server.shard.services.exchange_order import Answer, Apply, StreamOrder, within_budget
from shardam_server.shard.services.exchange_work import ExchangeWork
from shardam_server.shard.services.pulls import Pull
from shardam_server.shard.services.row_answers import RowAnswer

METHOD_OF_KIND = {"pull": "Pull", "pull_changed": "Pull", "push": "Push"}
"""Kinds of requests whose duration is measured, by the name of the unary call."""

MEASURED_KINDS = frozenset(METHOD_OF_KIND)
"""Kinds whose phases are measured."""


class ExchangeStream:
    """One stream from its start to its end; made on the event loop.

    Args:
        shard: the shard.
        work: what requests do.
        context: the call, which takes and gives messages as bytes.
    """

    def __init__(self, shard: ShardContext, work: ExchangeWork, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._shard = shard
        self._work = work
        self._context = context
        self._window = Window()
        self._unanswered: set[Asked] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self._answers = AnswerWriter(context, shard.streams.turns, shard.metrics, self._leave)
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
            writing = asyncio.create_task(self._answers.run())
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
                for task in (reading, writing, draining, *self._waiting):
                    task.cancel()
                self._chunks.drop()

    async def _answered(self) -> None:
        """Waits until what has been asked so far is answered."""
        for asked in self._unanswered:
            asked.ended = asked.ended or asyncio.get_running_loop().create_future()
        ends = [asked.ended for asked in self._unanswered if asked.ended is not None]
        if ends:
            await asyncio.wait(ends)

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
            self._refuse(Asked("request", 0, Laps(arrived), arrived), BadOption(unknown))
            return
        header = request.header
        asked = Asked(request.kind, header.request_id, Laps(arrived), arrived)
        chunk = _chunk(request)
        try:
            _check_header(request.kind, header)
            if chunk is None:
                self._admit(request, asked)
            else:
                self._admit_chunk(chunk, asked)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the edge of one request; _refuse logs it
            if chunk is not None:
                self._chunks.forget(header)
            self._refuse(asked, error)

    def _admit(self, request: StreamRequest, asked: Asked) -> None:
        header, message = request.header, request.message
        self._shard.check_serving(header)
        if isinstance(message, embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest):
            pull = self._work.pulls.find(message, request.row_ids)
            asked.held_bytes = request.num_bytes + pull.rows_bytes
            self._pull(pull, asked)
        elif isinstance(message, embedding_pb2.ArriveRequest):
            self._start(asked, lambda: self._arrive(message))
        else:
            self._chunks.give_way(header)
            self._change(asked, header, lambda: self._work.apply(request, asked.laps), request.num_bytes)

    def _admit_chunk(self, chunk: Chunk, asked: Asked) -> None:
        if self._chunks.is_refused(chunk.head.header):
            return
        self._shard.check_serving(chunk.head.header, chunks=True)
        part = self._chunks.take(chunk, asked.arrived)
        if part is not None:
            asked.arrived = part.arrived
            self._change(asked, part.head.header, lambda: self._work.apply_chunks(part, asked.laps), part.sizes.total_bytes)

    def _change(self, asked: Asked, header: common_pb2.RequestHeader, apply: Apply, num_bytes: int) -> None:
        """Admits a change, or parks it; what is parked counts as held by the stream, since the sequencer has not got it yet."""
        if self._order.must_park(header):
            asked.held_bytes = num_bytes
            self._start(asked, self._order.parked_change(header, apply, num_bytes))
        else:
            self._start(asked, self._order.change(header, apply, num_bytes))

    def _pull(self, pull: Pull, asked: Asked) -> None:
        """Lets a pull read at once if it is small and may, else within its budget once it may."""
        header = pull.head.header
        passage = self._order.passage_now(header)
        answer = None if passage is None else self._work.pulls.read_at_once(pull, passage, asked.laps)
        if answer is not None:
            self._enter(asked)
            self._send(asked, answer)
            return
        allowed = self._order.pull(header)

        def behind() -> dict[str, str]:
            return waits_for(self._shard.state, header)

        async def read() -> RowAnswer:
            async with within_budget(header, "the pull", "pull again, or with more time", behind):
                return await self._work.pulls.read_on_stream(pull, await allowed(), asked.laps)

        self._start(asked, read)

    async def _arrive(self, request: embedding_pb2.ArriveRequest) -> embedding_pb2.ExchangeResponse:
        with self._shard.streams.parking.place():
            arrive = await self._shard.streams.until_drain(self._work.arrives.arrive(request))
        return embedding_pb2.ExchangeResponse(request_id=request.header.request_id, arrive=arrive)

    def _refuse(self, asked: Asked, error: BaseException) -> None:
        self._enter(asked)
        self._send_refusal(asked, error)

    def _refuse_part(self, part: ChunkedPart, error: ShardamError) -> None:
        self._refuse(Asked("push", part.head.header.request_id, Laps(part.arrived), part.arrived), error)

    def _enter(self, asked: Asked) -> None:
        """Counts a request until it is answered."""
        self._window.enter(asked.held_bytes)
        self._unanswered.add(asked)

    def _leave(self, asked: Asked) -> None:
        self._window.leave(asked.held_bytes)
        self._unanswered.discard(asked)
        if asked.ended is not None and not asked.ended.done():
            asked.ended.set_result(None)

    def _start(self, asked: Asked, answer: Answer) -> None:
        """Waits for an answer in a task of its own, which later messages pass."""
        self._enter(asked)
        task = asyncio.create_task(self._respond(asked, answer))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _respond(self, asked: Asked, answer: Answer) -> None:
        try:
            response = await answer()
        except (Exception, asyncio.CancelledError) as failure:
            if is_cancelled(failure):
                raise
            self._send_refusal(asked, failure)
        else:
            self._send(asked, response)

    def _send(self, asked: Asked, response: embedding_pb2.ExchangeResponse | RowAnswer) -> None:
        """Sends an answer, which says how long it took."""
        now = time.perf_counter()
        shard_ns, kernel_ns = int(1e9 * (now - asked.laps.start)), asked.laps.kernel_ns
        if isinstance(response, RowAnswer):
            response.note_times(shard_ns, kernel_ns)
            messages = response.messages
        else:
            if response.HasField("push"):
                response.push.header.shard_ns, response.push.header.kernel_ns = shard_ns, kernel_ns
                asked.laps.end("settle")
            messages = [response.SerializeToString()]
        self._shard.metrics.observe(METHOD_OF_KIND.get(asked.kind, asked.kind), now - asked.arrived)
        self._answers.put(asked, messages, measured=asked.kind in MEASURED_KINDS)

    def _send_refusal(self, asked: Asked, failure: BaseException) -> None:
        error = explain(failure, f"Exchange {asked.kind}", asked.request_id, self._shard.metrics)
        refusal = embedding_pb2.Refusal(reason=error.reason, message=error.message, metadata=error.metadata)
        response = embedding_pb2.ExchangeResponse(request_id=asked.request_id, refusal=refusal)
        self._answers.put(asked, [response.SerializeToString()], measured=False)


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
