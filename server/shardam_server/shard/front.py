"""What every RPC of a shard passes through: token, errors by the table, metrics, one log line on failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, cast

import grpc
import grpc.aio

from shardam_proto.channels import TOKEN_KEY
from shardam_proto.errors import DETAILS_KEY, BadToken, ShardamError, pack_status
from shardam_proto.v1 import common_pb2
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.tokens import bearer_matches

logger = logging.getLogger(__name__)

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Health needs no token (DESIGN.md, section 2)."""


class Message(Protocol):
    """A protobuf message, as far as the front needs it."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Returns the encoded size in bytes."""
        ...


Request = TypeVar("Request")
Response = TypeVar("Response")
AnyContext = grpc.aio.ServicerContext[Message, Message]
UnaryHandler = Callable[[Message, AnyContext], Awaitable[Message]]


class ShardFront(grpc.aio.ServerInterceptor):
    """Wraps every unary handler.

    Args:
        metrics: counters to feed.
        token: the cluster's token, or None for none.
    """

    def __init__(self, metrics: ShardMetrics, token: str | None) -> None:
        self._metrics = metrics
        self._token = token

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
        if handler.unary_unary is None:
            return handler  # reflection's stream: no shardam messages
        inner = cast(UnaryHandler, handler.unary_unary)

        async def call(request: Message, context: AnyContext) -> Message:
            return await self._call(method, inner, request, context)

        return _with_behavior(handler, call)

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
        except ShardamError as error:
            self._metrics.count_error(error.reason)
            logger.debug("%s refused: %s: %s", method, error.reason, error.message, extra={"request_id": _request_id(request)})
            return await _abort(context, error)
        except Exception as error:
            self._metrics.count_error("INTERNAL")
            request_id = _request_id(request)
            logger.exception("%s failed", method, extra={"request_id": request_id})
            message = (
                f"shard failed in {method} ({type(error).__name__}); its log has the details under request id {request_id}"
            )
            return await _abort(context, ShardamError(message))
        self._metrics.sent_bytes.inc(response.ByteSize())
        self._metrics.observe(method.rpartition("/")[2], time.perf_counter() - start)
        return response


def _with_behavior(
    handler: grpc.RpcMethodHandler[Request, Response], behavior: Callable[..., Awaitable[Message]]
) -> grpc.RpcMethodHandler[Request, Response]:
    """Returns the handler with another behaviour and the same messages."""
    make = grpc.unary_unary_rpc_method_handler if handler.unary_unary else grpc.stream_stream_rpc_method_handler
    return make(
        cast(Callable[..., Response], behavior),  # the stubs know only blocking handlers
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _request_id(request: Message) -> int:
    header = getattr(request, "header", None)
    return header.request_id if isinstance(header, common_pb2.RequestHeader) else 0


async def _abort(context: AnyContext, error: ShardamError) -> Message:
    trailers = ((DETAILS_KEY, pack_status(error)),)
    await context.abort(error.rule.code, error.message, trailing_metadata=trailers)
    raise AssertionError("abort returned")  # abort always raises
