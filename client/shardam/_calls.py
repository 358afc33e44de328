"""A request on its way to one shard, as a value."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from shardam._answers import Piece
from shardam._forks import is_fork_error
from shardam._link import ShardLink
from shardam._stream import Reply, StreamRequest
from shardam._timings import Timings
from shardam_proto.channels import UnaryCall
from shardam_proto.errors import ShardamError, ShardUnreachable
from shardam_proto.v1 import common_pb2, embedding_pb2


class Request(Protocol):
    """A request message: all begin with a header."""

    @property
    def header(self) -> common_pb2.RequestHeader:
        """The header, filled in when the message is sent."""
        ...


RequestT = TypeVar("RequestT", bound=Request)
ResponseT = TypeVar("ResponseT")
AnswerT = TypeVar("AnswerT", covariant=True)


class AnyCall(Protocol[AnswerT]):
    """A request for one shard that changes nothing, or nothing more when it is repeated."""

    @property
    def link(self) -> ShardLink:
        """The shard."""
        ...

    @property
    def header(self) -> common_pb2.RequestHeader:
        """The request's header, filled in before each try."""
        ...

    @property
    def step(self) -> int:
        """Step of the client's group for which it waits; 0: it waits for nothing."""
        ...

    def make(self, timeout_s: float) -> AnswerT:
        """Makes the call once."""
        ...


@dataclasses.dataclass(frozen=True)
class ShardCall(Generic[RequestT, ResponseT]):
    """A unary call.

    Attributes:
        link: the shard.
        method: picks the stub's method; the stub changes when the shard moves.
        message: the request without its header.
    """

    link: ShardLink
    method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]]
    message: RequestT

    @property
    def header(self) -> common_pb2.RequestHeader:
        """The request's header."""
        return self.message.header

    @property
    def step(self) -> int:
        """0: it waits for nothing; reads that have to are in _unary_reads.py."""
        return 0

    def make(self, timeout_s: float) -> ResponseT:
        """Makes the call once; raises as ShardLink.call."""
        return self.link.call(self.method, self.message, timeout_s)


class Question(Protocol):
    """What is asked of a shard over its stream, and what takes the rows of the answer."""

    def message(self, header: bytes) -> bytes:
        """Returns the request's one message.

        Args:
            header: the header field, encoded.
        """
        ...

    def begin(self) -> None:
        """Forgets what has come so far: the answer of another try begins."""
        ...

    def take(self, piece: Piece) -> None:
        """Takes the next piece of the answer.

        Raises:
            ShardUnreachable: it is none of an answer to this question.
        """
        ...


class StreamCall:
    """A read over a shard's stream: sent first, waited for later. One thread makes it; answers come from the stream's.

    Args:
        link: the shard.
        question: what is asked.
        step: of the client's group, if the read waits for it.
        timings: where its times are counted.
    """

    def __init__(self, link: ShardLink, question: Question, step: int, timings: Timings) -> None:
        self.link = link
        self.header = common_pb2.RequestHeader()
        self.step = step
        self._question = question
        self._timings = timings
        self._asked: StreamRequest | None = None
        self._answered_by: common_pb2.ResponseHeader | None = None
        self._decode_s = 0.0
        self._timeout_s = 0.0
        self._given_up: ShardUnreachable | None = None
        self._reply: Future[None] = Future()
        self._lock = threading.Lock()

    def make(self, timeout_s: float) -> common_pb2.ResponseHeader:
        """Asks once; raises as wait."""
        self.send(timeout_s)
        return self.wait()

    def send(self, timeout_s: float) -> None:
        """Sends the question, with the header as it is now; wait says what becomes of it.

        Args:
            timeout_s: how long its answer may take once it has left.
        """
        self._timeout_s = timeout_s
        header = embedding_pb2.PullRequest(header=self.header).SerializeToString()
        reply: Future[None] = Future()
        asked = StreamRequest(
            self.header.request_id,
            lambda: iter((self._question.message(header),)),
            timeout_s,
            self.header.incarnation,
            functools.partial(_resolve, reply),
            lambda piece: self._take(asked, piece),
        )
        with self._lock:
            self._asked, self._reply, self._answered_by, self._decode_s = asked, reply, None, 0.0
            self._given_up = None
            self._question.begin()
        try:
            self.link.stream().send(asked)
        except ShardamError as error:
            reply.set_exception(error)

    def wait(self) -> common_pb2.ResponseHeader:
        """Waits for the answer to what was sent; may be called again.

        Returns:
            The header of its first message.

        Raises:
            ShardUnreachable: no answer in time, or the stream broke.
            ShardamError: the shard's reason.
        """
        while True:
            try:
                self._wait()
            except ShardUnreachable as error:
                if not is_fork_error(error):
                    raise
                self.send(self._timeout_s)
                continue
            if self._answered_by is None:
                raise AssertionError("an answer with rows ended without one")
            return self._answered_by

    def has_failed(self) -> bool:
        """Waits as wait does; returns whether wait raises."""
        try:
            self.wait()
        except ShardamError:
            return True
        return False

    def abandon(self) -> None:
        """Takes no answer any more."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.abandon()

    def _wait(self) -> None:
        asked, reply = self._asked, self._reply
        while True:
            if self._given_up is not None:
                raise self._given_up
            if asked is None:
                raise AssertionError("nothing was sent, or it was abandoned")
            try:
                reply.result(max(0.0, asked.overdue_at - time.monotonic()))
                return
            except TimeoutError:
                if time.monotonic() >= asked.overdue_at and not asked.is_settled:
                    self._given_up = self.link.give_up(asked)
                    self.abandon()

    def _take(self, asked: StreamRequest, piece: Piece) -> None:
        """Takes a piece of the answer; one of a try that was given up would spoil the next one's."""
        with self._lock:
            if asked is not self._asked:
                return
            if self._answered_by is None:
                self._answered_by = piece.header
            started = time.perf_counter()
            self._question.take(piece)
            self._decode_s += time.perf_counter() - started
            if piece.is_last:
                self._timings.add("decode", self._decode_s)
                count_times(self._timings, asked, self._answered_by)


def count_times(timings: Timings, asked: StreamRequest, header: common_pb2.ResponseHeader) -> None:
    """Counts where the time between a request and its answer went.

    Args:
        timings: where.
        asked: the request, whose last message has been received just now.
        header: the answer's.
    """
    timings.add("encode", asked.encode_s)
    if header.shard_ns:
        shard_s, kernel_s = header.shard_ns / 1e9, header.kernel_ns / 1e9
        timings.add("wire", asked.heard_at - asked.began_at - shard_s)
        timings.add("shard", shard_s - kernel_s)
        timings.add("kernel", kernel_s)


def _resolve(reply: Future[None], answer: Reply) -> None:
    if isinstance(answer, ShardamError):
        reply.set_exception(answer)
    else:
        reply.set_result(None)
