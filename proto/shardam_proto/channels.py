"""gRPC channels to shards: one set of options, the token, and the translation of failed calls into shardam's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

import grpc

from shardam_proto.error_details import unpack_error
from shardam_proto.errors import BadToken, MessageTooLarge, ShardamError, ShardUnreachable, VersionMismatch
from shardam_proto.limits import CHANNEL_OPTIONS
from shardam_proto.scheduling import starting_batch_threads

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)

TOKEN_KEY = "authorization"
"""Metadata key that carries `Bearer TOKEN`."""

Metadata = tuple[tuple[str, str], ...]


class UnaryCall(Protocol[Request, Response]):
    """A blocking stub method."""

    def __call__(self, request: Request, *, timeout: float | None = None, metadata: Metadata | None = None) -> Response:
        """Calls and waits."""
        ...


def open_channel(address: str, extra_options: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """Opens a channel of its own (no shared subchannel, so that a failed one can be replaced)."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), *extra_options]
    with starting_batch_threads():
        return grpc.insecure_channel(address, options=options)


def check_token(token: str) -> str:
    """Returns the token if it can travel in a header; the message never shows it.

    Raises:
        BadToken: it is empty or holds anything but visible ASCII.
    """
    if not isinstance(token, str):
        raise BadToken(f"a token is a string, got {type(token).__name__}; hand in text")
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        strip = "; this one starts or ends with white space, strip it" if token != token.strip() else ""
        raise BadToken(f"a token is one or more visible ASCII characters without spaces{strip}")
    return token


def token_metadata(token: str | None) -> Metadata:
    """Returns the call metadata for a token.

    Raises:
        BadToken: as check_token.
    """
    return () if token is None else ((TOKEN_KEY, f"Bearer {check_token(token)}"),)


def call(method: UnaryCall[Request, Response], request: Request, *, timeout_s: float, token: str | None, peer: str) -> Response:
    """Calls a shard once and raises shardam's error if it fails.

    Args:
        method: a stub method.
        request: its request.
        timeout_s: deadline of the call.
        token: the cluster's token, or None.
        peer: what the message names, e.g. "shard 0 at 127.0.0.1:7070".

    Raises:
        ShardamError: the reason that the shard gave.
        ShardUnreachable: no answer within timeout_s.
    """
    try:
        return method(request, timeout=timeout_s, metadata=token_metadata(token))
    except grpc.RpcError as error:
        raise translate(error, peer) from error


def translate(error: grpc.RpcError, peer: str) -> ShardamError:
    """Returns the shardam error that a failed call means."""
    known = unpack_error(error)
    if known is not None:
        return known
    code: grpc.StatusCode = error.code()
    details: str = error.details() or ""
    message = f"{peer}: {code.name}: {details}"
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return ShardUnreachable(
                f"{message}. The address is the one the shard registered; if it is not reachable from here, start the shard "
                "with --advertise HOST:PORT",
                metadata={"peer": peer},
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageTooLarge(message, metadata={"peer": peer})
        case grpc.StatusCode.UNAUTHENTICATED:
            return BadToken(message, metadata={"peer": peer})
        case grpc.StatusCode.UNIMPLEMENTED:
            return VersionMismatch(
                f"{peer} does not know this call ({details}): it runs another version of shardam; start it with this one's",
                metadata={"peer": peer},
            )
        case _:
            return ShardamError(message, metadata={"peer": peer})
