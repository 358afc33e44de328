"""One shard as a client sees it: its channel, its stubs, its stream, and who answered there."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar, cast

import grpc

from shardam._endings import copy_of
from shardam._forks import FORKS, fork_error
from shardam._stream import ExchangeCall, ExchangeStream, StreamRequest
from shardam_proto.channels import Metadata, UnaryCall, call, open_channel, token_metadata
from shardam_proto.errors import ShardamError, ShardLost, ShardUnreachable
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import checkpoint_pb2_grpc, embedding_pb2, embedding_pb2_grpc, row_pb2_grpc, table_pb2_grpc

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

EXCHANGE_METHOD = "/shardam.v1.EmbeddingService/Exchange"
"""Called without the generated stub, since its messages are bytes here, both ways."""


class Exchange(Protocol):
    """Begins an Exchange call."""

    def __call__(self, requests: Iterator[bytes], *, metadata: Metadata) -> ExchangeCall:
        """Sends what the iterator yields, from a thread of gRPC's."""
        ...


class _Way:
    """A channel to one address with its stubs and, once something is to be sent on it, its stream."""

    def __init__(self, address: str) -> None:
        self.channel: grpc.Channel = open_channel(address)
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(self.channel)
        self.exchange = cast("Exchange", self.channel.stream_stream(EXCHANGE_METHOD))
        self.rows = row_pb2_grpc.RowServiceStub(self.channel)
        self.tables = table_pb2_grpc.TableServiceStub(self.channel)
        self.checkpoints = checkpoint_pb2_grpc.CheckpointServiceStub(self.channel)
        self.stream: ExchangeStream | None = None
        self.heard_at = 0.0
        self.forked = False

    def close_channel(self) -> None:
        """Closes the channel; unary calls on it fail."""
        self.channel.close()

    def close(self, error: ShardamError) -> None:
        """Ends stream and channel; calls that run on it fail and are tried again on the next way, if there is one."""
        if self.stream is not None:
            self.stream.end(error)
        self.channel.close()
        if self.stream is not None:
            self.stream.join()


class ShardLink:
    """The way to one shard.

    Args:
        entry: the shard as it is registered.
        token: the cluster's token, or None.
        epoch: epoch of the route map by which it is a shard; it belongs to no other.

    Attributes:
        epoch: that epoch.
        address: registered host:port.
        incarnation: process life that answered Open.
        lineage: lineage of its state then.
        timeline: timeline of its state then.
        acknowledged: last number of this client that the shard has answered or closed.
        closed: last one whose end it has told, or the end of whose step: a part that is staged is not closed.
        lock: held while the link is opened again.
    """

    def __init__(self, entry: ShardEntry, token: str | None, epoch: int) -> None:
        self.index = entry.index
        self.epoch = epoch
        self.address = entry.address
        self.incarnation = 0
        self.lineage = 0
        self.timeline = 0
        self.acknowledged = 0
        self.closed = 0
        self.lock = threading.Lock()
        self._token = token
        self._registered = entry.incarnation
        self._way: _Way | None = None
        self._way_lock = threading.RLock()
        self._end: ShardamError | None = None
        self._pid = os.getpid()

    @property
    def peer(self) -> str:
        """The shard's name in messages."""
        return f"shard {self.index} at {self.address}"

    @property
    def embedding(self) -> embedding_pb2_grpc.EmbeddingServiceStub:
        """Training calls."""
        return self._open_way().embedding

    @property
    def rows(self) -> row_pb2_grpc.RowServiceStub:
        """Calls for rows."""
        return self._open_way().rows

    @property
    def tables(self) -> table_pb2_grpc.TableServiceStub:
        """Calls for tables."""
        return self._open_way().tables

    @property
    def checkpoints(self) -> checkpoint_pb2_grpc.CheckpointServiceStub:
        """Calls for checkpoints."""
        return self._open_way().checkpoints

    # -- calls

    def call(
        self, method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]], request: RequestT, timeout_s: float
    ) -> ResponseT:
        """Makes one unary call.

        Args:
            method: picks the stub's method.
            request: the request.
            timeout_s: its deadline.

        Raises:
            ShardUnreachable: no answer; a connection on which nothing has been heard for so long is replaced.
            ShardamError: the shard's reason.
        """
        while True:
            with FORKS.passage():
                way = self._open_way()
                try:
                    return self._call_once(way, method, request, timeout_s)
                except ShardUnreachable:
                    if not way.forked:
                        raise

    def _call_once(
        self, way: _Way, method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]], request: RequestT, timeout_s: float
    ) -> ResponseT:
        started = time.monotonic()
        try:
            answer = call(method(self), request, timeout_s=timeout_s, token=self._token, peer=self.peer)
        except ShardamError as error:  # some are ValueErrors, too
            if isinstance(error, ShardUnreachable) and time.monotonic() - started >= timeout_s:
                self._replace_if_silent(way, started, error)
            raise
        except ValueError as error:  # gRPC's complaint about a closed channel: another thread has replaced it
            raise ShardUnreachable(f"{self.peer}: {error}", metadata={"peer": self.peer}) from error
        way.heard_at = time.monotonic()
        return answer

    # -- the stream

    def stream(self) -> ExchangeStream:
        """Returns the stream, opened if there is none or the last one has ended.

        Raises:
            ShardUnreachable: it could not be opened.
            ShardamError: what ended this client.
        """
        with FORKS.passage(), self._way_lock:
            if self._end is not None:
                raise copy_of(self._end)
            way = self._open_way()
            if way.stream is None or way.stream.ended:
                start = functools.partial(way.exchange, metadata=token_metadata(self._token))
                try:
                    way.stream = ExchangeStream(start, self.peer)
                except (ValueError, RuntimeError) as error:  # the channel is closed, or the interpreter starts no more threads
                    raise ShardUnreachable(f"{self.peer}: {error}", metadata={"peer": self.peer}) from error
            return way.stream

    def give_up(self, request: StreamRequest) -> ShardUnreachable:
        """Waits no longer for an answer; a connection on which nothing came since it was sent is replaced.

        Returns:
            The error that says so.
        """
        error = ShardUnreachable(
            f"{self.peer}: no answer within {request.budget_s:g} s. The address is the one the shard registered; if it is not "
            "reachable from here, start the shard with --advertise HOST:PORT",
            metadata={"peer": self.peer},
        )
        stream = request.stream
        if stream is not None:
            request.dropped = True
            self._replace_if_silent(self._way, request.sent_at or request.queued_at, error, stream)
        return error

    def _replace_if_silent(
        self, way: _Way | None, since: float, error: ShardamError, stream: ExchangeStream | None = None
    ) -> None:
        """Makes a new channel if the old one may be half dead: nothing was heard on it since then."""
        if way is None:
            return
        stream = stream or way.stream
        heard_at = max(way.heard_at, stream.heard_at if stream is not None else 0.0)
        if way is self._way and (stream is None or stream is way.stream) and heard_at < since:
            logger.info("%s is silent, trying a new connection", self.peer)
            self._replace(way, self.address, error)

    # -- where the shard is

    def follow(self, entry: ShardEntry) -> bool:
        """Goes where Redis says the shard is; returns whether that is another address or process than the last time."""
        if entry.address == self.address and entry.incarnation == self._registered:
            return False
        if entry.address != self.address:
            logger.info("%s is now at %s", self.peer, entry.address)
        self._registered = entry.incarnation
        moved = ShardUnreachable(f"{self.peer} is another process now", metadata={"peer": self.peer})
        self._replace(self._way, entry.address, moved)
        return True

    def _open_way(self) -> _Way:
        """Returns the channel, opened if there is none; to be called where FORKS lets pass."""
        with self._way_lock:
            if self._way is None:
                if self._end is not None:
                    raise copy_of(self._end)
                if os.getpid() != self._pid:  # forked by a signal's handler within a call
                    raise ShardUnreachable(f"{self.peer}: this client is the parent's", metadata={"peer": self.peer})
                self._way = _Way(self.address)
                FORKS.add_link(self)
            return self._way

    def _replace(self, way: _Way | None, address: str, error: ShardamError) -> None:
        """Parts with a channel: the next one connects at once, where the old one would wait in gRPC's back-off."""
        with FORKS.passage():
            with self._way_lock:
                if self._way is not way or self._end is not None:
                    return  # another thread has done so meanwhile
                self.address, self._way = address, None
            if way is not None:
                way.close(error)

    def let_go(self) -> _Way | None:
        """Parts with channel and stream before a fork; what waits on the stream fails with fork_error."""
        with self._way_lock:
            way, self._way = self._way, None
        if way is not None:
            way.forked = True
            if way.stream is not None:
                way.stream.end(fork_error(self.peer))
        return way

    # -- who is there

    def adopt(self, answer: embedding_pb2.OpenResponse) -> None:
        """Remembers who answered Open."""
        self.incarnation = answer.header.incarnation
        self.lineage = answer.header.lineage
        self.timeline = answer.header.timeline

    def continues(self, answer: embedding_pb2.OpenResponse) -> bool:
        """True: the state that answered is the one this client knows, with all that it was told is applied."""
        header = answer.header
        known = (self.lineage, self.timeline)
        return (header.lineage, header.timeline) == known and header.last_number >= self.acknowledged

    def lost(self, answer: embedding_pb2.OpenResponse) -> ShardLost:
        """Returns the error that says what is missing from the state that answered."""
        has = answer.header.last_number
        where = "" if answer.header.lineage == self.lineage else ", on another lineage of state"
        return ShardLost(
            f"{self.peer} lost rows: it had acknowledged number {self.acknowledged} of this client and now has {has}{where}. "
            f"Stop it and give it its data folder back; or give that shard's rows up with `shardam forget-shard --index "
            f"{self.index}`, connect again and train again from what you have",
            acknowledged=self.acknowledged,
            has=has,
            metadata={"shard": str(self.index), "address": self.address},
        )

    # -- end

    def break_off(self, error: ShardamError) -> None:
        """Ends the stream for good: this client has ended, and whoever waits is told why."""
        with self._way_lock:
            self._end = self._end or error
            stream = None if self._way is None else self._way.stream
        if stream is not None:
            stream.end(error)

    def close(self, error: ShardamError) -> None:
        """Closes channel and stream for good."""
        self.break_off(error)
        with FORKS.passage():
            with self._way_lock:
                way, self._way = self._way, None
            if way is not None:
                way.close(error)
