"""What every RPC of a shard passes through: token, errors by the table, metrics, one log line on failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from shardam_proto.channels import TOKEN_KEY
from shardam_proto.error_details import DETAILS_KEY, pack_status
from shardam_proto.errors import BadOption, BadToken, ShardamError
from shardam_proto.v1 import common_pb2
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.turns import Turns
from shardam_server.tokens import bearer_matches

logger = logging.getLogger(__name__)

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Health needs no token (DESIGN.md, section 2)."""


SHARDAM_PREFIX = "/shardam."
"""Methods of shardam's own services."""

RAW_STREAMS = frozenset({"/shardam.v1.EmbeddingService/Exchange"})
"""Streams whose handlers take and give messages as bytes: protobuf would copy the rows in them."""


class Message(Protocol):
    """A protobuf message, as far as the front needs it."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Returns the encoded size in bytes."""
        ...


Request = TypeVar("Request")
Response = TypeVar("Response")
AnyContext = grpc.aio.ServicerContext[Message, Message]
UnaryHandler = Callable[[Message, AnyContext], Awaitable[Message]]
StreamHandler = Callable[[object, AnyContext], Awaitable[None]]


class ShardFront(grpc.aio.ServerInterceptor):
    """Wraps every handler of shardam's services.

    Args:
        metrics: counters to feed.
        token: the cluster's token, or None for none.
    """

    def __init__(self, metrics: ShardMetrics, token: str | None) -> None:
        self._metrics = metrics
        self._token = token
        self._turns = Turns()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        """Returns the wrapped handler, or one that refuses the token."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(HEALTH_PREFIX):
            return handler
        if not self._allows(handler_call_details):
            return self._refusing(handler)
        if handler.stream_stream is not None:
            return self._streaming(method, handler)
        inner = cast(UnaryHandler, handler.unary_unary)

        async def call(request: Message | DecodeError, context: AnyContext) -> Message:
            if isinstance(request, DecodeError):
                error = BadOption(f"{method} got what is no request of its own: {request}; use matching shardam packages")
                return await _abort(context, explain(error, method, 0, self._metrics))
            return await self._call(method, inner, request, context)

        return grpc.unary_unary_rpc_method_handler(
            cast(Callable[..., Response], call),
            request_deserializer=_caught(handler.request_deserializer),
            response_serializer=_unless_encoded(handler.response_serializer),
        )

    def _streaming(
        self, method: str, handler: grpc.RpcMethodHandler[Request, Response]
    ) -> grpc.RpcMethodHandler[Request, Response]:
        """Wraps a stream, whose messages are measured where they are read and written."""
        if not method.startswith(SHARDAM_PREFIX):
            return handler  # reflection's stream: no shardam messages
        inner = cast(StreamHandler, handler.stream_stream)

        async def stream(requests: object, context: AnyContext) -> None:
            try:
                await inner(requests, context)
            except (Exception, asyncio.CancelledError) as failure:
                if is_cancelled(failure):
                    raise
                await _abort(context, explain(failure, method, 0, self._metrics))

        if method in RAW_STREAMS:
            return grpc.stream_stream_rpc_method_handler(cast(Callable[..., Iterator[Response]], stream))
        return _with_behavior(handler, stream)

    def _allows(self, details: grpc.HandlerCallDetails) -> bool:
        if self._token is None:
            return True
        sent = [value for key, value in details.invocation_metadata or () if key == TOKEN_KEY]
        return len(sent) == 1 and bearer_matches(sent[0], self._token)

    def _refusing(self, handler: grpc.RpcMethodHandler[Request, Response]) -> grpc.RpcMethodHandler[Request, Response]:
        error = BadToken(
            "this cluster needs a token: set SHARDAM_TOKEN (or pass token=) to the one its shards were started with"
        )

        async def refuse(_: object, context: AnyContext) -> Message:
            self._metrics.count_error(error.reason)
            return await _abort(context, error)

        return _with_behavior(handler, refuse)

    async def _call(self, method: str, inner: UnaryHandler, request: Message, context: AnyContext) -> Message:
        start = time.perf_counter()
        self._metrics.received_bytes.inc(request.ByteSize())
        try:
            response = await inner(request, context)
            await self._turns.take(encoded_size(response))
        except (Exception, asyncio.CancelledError) as failure:
            if is_cancelled(failure):
                raise
            return await _abort(context, explain(failure, method, _request_id(request), self._metrics))
        self._metrics.sent_bytes.inc(encoded_size(response))
        self._metrics.observe(method.rpartition("/")[2], time.perf_counter() - start)
        return response


def _caught(decode: Callable[[bytes], Request] | None) -> Callable[[bytes], Request] | None:
    """Returns a decoder that hands its error on as the message; raised there, it would be a status without a reason."""
    if decode is None:
        return None

    def decode_or_not(data: bytes) -> Request:
        try:
            return decode(data)
        except DecodeError as error:
            return cast(Request, error)

    return decode_or_not


def _unless_encoded(encode: Callable[[Response], bytes] | None) -> Callable[[Response], bytes]:
    """Returns an encoder that passes on what a handler has encoded itself."""

    def encode_or_pass(message: Response) -> bytes:
        if isinstance(message, bytes) or encode is None:
            return cast(bytes, message)
        return encode(message)

    return encode_or_pass


def encoded_size(message: Message | bytes) -> int:
    """Returns the bytes that a message has on the wire."""
    return len(message) if isinstance(message, bytes) else message.ByteSize()


def is_cancelled(failure: BaseException) -> bool:
    """Whether a failure is the end of the running task itself, because its caller has gone; then nobody is to be told."""
    task = asyncio.current_task()
    return isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def explain(failure: BaseException, method: str, request_id: int, metrics: ShardMetrics) -> ShardamError:
    """Counts and logs what went wrong with a request, and returns what its sender is told."""
    if isinstance(failure, ShardamError):
        metrics.count_error(failure.reason)
        logger.debug("%s refused: %s: %s", method, failure.reason, failure.message, extra={"request_id": request_id})
        return failure
    metrics.count_error("INTERNAL")
    logger.error("%s failed", method, exc_info=failure, extra={"request_id": request_id})
    return ShardamError(
        f"shard failed in {method} ({type(failure).__name__}); its log has the details under request id {request_id}"
    )


def _with_behavior(
    handler: grpc.RpcMethodHandler[Request, Response], behavior: Callable[..., Awaitable[Message | None]]
) -> grpc.RpcMethodHandler[Request, Response]:
    """Returns the handler with another behaviour and the same messages."""
    make = grpc.unary_unary_rpc_method_handler if handler.unary_unary else grpc.stream_stream_rpc_method_handler
    return make(
        cast(Callable[..., Response], behavior),  # the stubs know only blocking handlers
        request_deserializer=handler.request_deserializer,
        response_serializer=_unless_encoded(handler.response_serializer),
    )


def _request_id(request: Message) -> int:
    header = getattr(request, "header", None)
    return header.request_id if isinstance(header, common_pb2.RequestHeader) else 0


async def _abort(context: AnyContext, error: ShardamError) -> Message:
    trailers = ((DETAILS_KEY, pack_status(error)),)
    await context.abort(error.rule.code, error.message, trailing_metadata=trailers)
    raise AssertionError("abort returned")  # abort always raises
