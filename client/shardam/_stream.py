"""One Exchange call with one shard: requests leave in order, and each answer finds its request by its id.

Messages are bytes both ways: whoever sends rows lays the message out (shardam_proto/wire.py), and an answer's rows reach their
request as views of what was received. Knows nothing of numbers or rows; a broken call fails everything that waits, and is never
mended: _link.py opens another.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from shardam._answers import Piece, read_answer
from shardam._backoff import Deadline
from shardam._endings import copy_of, ends_client
from shardam._forks import FORKS
from shardam_proto.channels import translate
from shardam_proto.errors import ShardamError, ShardUnreachable, make_error
from shardam_proto.v1 import embedding_pb2

logger = logging.getLogger(__name__)

Messages = Iterator[embedding_pb2.ExchangeRequest | bytes]
"""Of a request; those with rows are laid out by hand, the small ones protobuf's."""

Reply = embedding_pb2.ExchangeResponse | ShardamError


class StreamRequest:
    """A request on its way: one message, or the chunks of one part.

    Args:
        request_id: its id, in every message of it.
        messages: makes its messages, one when the former has left, so that only one of them is in memory.
        budget_s: how long its answer may take once its last message has left; as long without a sign of movement before.
        incarnation: the process life it is meant for.
        settled: called once, with the answer, the refusal or why the stream ended; from the stream's thread as a rule.
        take: called with each piece of an answer with rows, in order, before `settled` is, with an empty answer; None: what is
            asked for has no rows. What it raises ends the stream.

    Attributes:
        num_sent: messages that gRPC has taken.
        dropped: another try stands for it: if it has not begun to leave, it never will.
        encode_s: seconds that its messages took to be made.
        began_at: time.monotonic() when gRPC was given the first one.
        heard_at: time.monotonic() of the last message of its answer; 0: none yet.
    """

    def __init__(
        self,
        request_id: int,
        messages: Callable[[], Messages],
        budget_s: float,
        incarnation: int,
        settled: Callable[[Reply], None],
        take: Callable[[Piece], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.budget_s = budget_s
        self.incarnation = incarnation
        self.num_sent = 0
        self.dropped = False
        self.queued_at = time.monotonic()
        self.sent_at: float | None = None
        self.stream: ExchangeStream | None = None
        self.encode_s = 0.0
        self.began_at = 0.0
        self.heard_at = 0.0
        self._num_pieces = 0
        self._take = take
        self._messages: Callable[[], Messages] | None = messages
        self._settled: Callable[[Reply], None] | None = settled

    @property
    def is_settled(self) -> bool:
        """True: nobody waits for its answer any more."""
        return self._settled is None

    @property
    def wants_rows(self) -> bool:
        """True: its answer comes in pieces."""
        return self._take is not None

    @property
    def overdue_at(self) -> float:
        """By time.monotonic(), when its answer is so late that the outcome counts as unknown; it moves while messages leave."""
        if self.sent_at is not None:
            return max(self.sent_at, self.heard_at) + self.budget_s
        moved_at = self.stream.moved_at if self.stream is not None else self.queued_at
        return max(self.queued_at, moved_at) + self.budget_s

    def messages(self) -> Iterator[bytes]:
        """Makes its messages; none if it is settled."""
        messages = iter(()) if self._messages is None else self._messages()
        while True:
            started = time.perf_counter()
            message = next(messages, None)
            if message is None:
                return
            data = message if isinstance(message, bytes) else message.SerializeToString()
            self.encode_s += time.perf_counter() - started
            self.began_at = self.began_at or time.monotonic()
            yield data
            del data, message

    def take(self, piece: Piece) -> None:
        """Hands on a piece of its answer.

        Raises:
            ShardUnreachable: the piece does not follow those before it, or no rows were asked for: the stream has to end.
        """
        taking = self._take
        if self.is_settled:
            return
        if taking is None or piece.header.chunk_index != self._num_pieces:
            expected = "no rows" if taking is None else f"chunk {self._num_pieces}"
            raise ShardUnreachable(
                f"chunk {piece.header.chunk_index} of {piece.num_chunks} came as the answer to request {self.request_id}, "
                f"expected {expected}; the shard runs another version, or is broken"
            )
        self._num_pieces += 1
        taking(piece)

    def settle(self, reply: Reply) -> None:
        """Tells whoever waits; later replies are nobody's."""
        settled = self._settled
        self.forget()
        if settled is not None:
            settled(reply)

    def forget(self) -> None:
        """Takes no reply any more, and lets go of what it would have sent."""
        self._settled, self._messages, self._take = None, None, None

    def abandon(self) -> None:
        """Forgets it, on its stream too."""
        self.forget()
        if self.stream is not None:
            self.stream.forget(self)


class ExchangeCall(Protocol):
    """What gRPC returns for a stream: the answers, and the call's end."""

    def __iter__(self) -> Iterator[bytes]:
        """Yields messages; raises grpc.RpcError at a bad end."""
        ...

    def cancel(self) -> bool:
        """Ends the call."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has a function called, in gRPC's thread that serves the call, when it has ended; False: it has."""
        ...


class ExchangeStream:
    """One stream. Thread-safe.

    Args:
        start: makes the call from its outgoing messages.
        peer: the shard's name in messages.

    Attributes:
        moved_at: time.monotonic() when gRPC last took a message.
        heard_at: time.monotonic() of the last answer; 0: none yet.
    """

    def __init__(self, start: Callable[[Iterator[bytes]], ExchangeCall], peer: str) -> None:
        self.peer = peer
        self.moved_at = time.monotonic()
        self.heard_at = 0.0
        self._queue: collections.deque[StreamRequest] = collections.deque()
        self._pending: dict[int, StreamRequest] = {}
        self._end: ShardamError | None = None
        self._changed = threading.Condition()
        self._sends, self._call_is_over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._call = start(self._outgoing())
        if not self._call.add_callback(self._on_call_end):
            self._call_is_over.set()
        FORKS.add_stream(self)
        try:
            self._reader = FORKS.start_inside(self._read, "shardam-stream")
        except RuntimeError:  # the interpreter ends
            self.end(ShardUnreachable(f"{peer}: no thread for its stream"))
            raise
        self._threads.append(self._reader)

    @property
    def ended(self) -> bool:
        """True: it takes nothing more."""
        return self._end is not None

    def send(self, request: StreamRequest) -> None:
        """Puts a request behind those before it; on an ended stream it fails at once."""
        with self._changed:
            request.stream = self
            if self._end is None:
                self._pending[request.request_id] = request
                self._queue.append(request)
                self._changed.notify_all()
                return
        request.settle(copy_of(self._end))

    def forget(self, request: StreamRequest) -> None:
        """Lets go of a request whose answer nobody needs any more."""
        with self._changed:
            self._pending.pop(request.request_id, None)

    def end(self, error: ShardamError) -> None:
        """Ends the stream; everything that waits fails with the error of the first end."""
        with self._changed:
            first = self._end is None
            if self._end is None:
                self._end = error
            pending = list(self._pending.values())
            self._pending.clear()
            self._queue.clear()
            self._changed.notify_all()
        if first:
            with FORKS.passage_if_open() as inside:
                if inside:  # else the fork ends the call
                    self._call.cancel()
        for request in pending:
            request.settle(copy_of(self._end))

    def cancel(self) -> None:
        """Ends the call of an ended stream."""
        self._call.cancel()

    def join(self) -> None:
        """Waits until the thread of an ended stream is gone."""
        if self._reader is not threading.current_thread():
            self._reader.join()

    def wait_for_threads(self, deadline: Deadline) -> bool:
        """Waits until the threads of an ended stream are gone, gRPC's too; False: some are not at the deadline."""
        if not (self._sends.wait(deadline.remaining_s) and self._call_is_over.wait(deadline.remaining_s)):
            return False
        for thread in self._threads:
            thread.join(deadline.remaining_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _on_call_end(self) -> None:
        self._threads.append(threading.current_thread())
        self._call_is_over.set()

    def _outgoing(self) -> Iterator[bytes]:
        """What gRPC sends, in a thread of its own that asks for the next message once the former has left."""
        self._threads.append(threading.current_thread())
        self._sends.set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._end is not None)
                if self._end is not None:
                    return
                request = self._queue.popleft()
            if not request.dropped:
                yield from self._messages_of(request)
            del request  # a waiting thread keeps no gradients alive

    def _messages_of(self, request: StreamRequest) -> Iterator[bytes]:
        for message in request.messages():
            yield message
            del message
            request.num_sent += 1
            self.moved_at = time.monotonic()
            if request.is_settled:
                # It was refused, or an earlier try of it was answered: the rest would be sent for nothing. The shard drops what
                # has come when the next change begins.
                return
        request.sent_at = time.monotonic()

    def _read(self) -> None:
        try:
            for data in self._call:
                self._deliver(data)
                del data
            error: ShardamError = ShardUnreachable(f"{self.peer} has ended the stream", metadata={"peer": self.peer})
        except grpc.RpcError as problem:
            error = _stream_error(problem, self.peer)
            problem.__traceback__ = None  # it is the call itself, and would keep itself alive
        except ShardUnreachable as problem:
            error = ShardUnreachable(f"{self.peer}: {problem.message}", metadata={"peer": self.peer})
            logger.warning("%s", error.message)
        except Exception as problem:  # the thread's edge: whoever waits is told
            logger.exception("%s: the stream's reader failed", self.peer)
            error = ShardUnreachable(f"{self.peer}: its answers could not be read: {problem!r}")
        self.end(error)

    def _deliver(self, data: bytes) -> None:
        """Gives a message to its request, if that has not been given up.

        Raises:
            ShardUnreachable: it is no part of a valid answer.
        """
        self.heard_at = time.monotonic()
        answer = read_answer(data)
        is_last = not isinstance(answer, Piece) or answer.is_last
        with self._changed:
            request = self._pending.get(answer.request_id)
        if request is None:
            return
        request.heard_at = self.heard_at
        if isinstance(answer, Piece):
            request.take(answer)
            if not is_last:
                return
            answer = embedding_pb2.ExchangeResponse(request_id=answer.request_id)
        elif request.wants_rows and not answer.HasField("refusal"):
            raise ShardUnreachable(f"an answer without rows came to request {answer.request_id}, which asked for some")
        self.forget(request)
        if answer.HasField("refusal"):
            refusal = answer.refusal
            request.settle(make_error(refusal.reason, refusal.message, dict(refusal.metadata)))
        else:
            request.settle(answer)


def _stream_error(problem: grpc.RpcError, peer: str) -> ShardamError:
    """Returns what a stream's end means for what waited on it: the outcome is unknown, unless the client has ended."""
    error = translate(problem, peer)
    if error.rule.retryable or ends_client(error):
        return error
    return ShardUnreachable(f"{peer}: the stream broke: {error.message}", metadata={"peer": peer})
