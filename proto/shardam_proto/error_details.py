"""How an error travels with a failed call: as google.rpc.Status with one ErrorInfo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from shardam_proto.errors import ShardamError, make_error

DOMAIN = "shardam"
"""`domain` of every google.rpc.ErrorInfo that shardam sends."""

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key of google.rpc.Status, fixed by gRPC's richer error model."""


def pack_status(error: ShardamError) -> bytes:
    """Encodes an error as google.rpc.Status with one ErrorInfo, the value of `DETAILS_KEY` in trailing metadata."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=error.rule.code.value[0], message=error.message, details=[detail])
    encoded: bytes = status.SerializeToString()
    return encoded


def unpack_error(rpc_error: grpc.RpcError) -> ShardamError | None:
    """Returns the shardam error that a failed call carries, or None if it failed below shardam (network, deadline).

    Args:
        rpc_error: as raised by a blocking stub or by grpc.aio.
    """
    trailers = cast("Iterable[tuple[str, bytes]]", rpc_error.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return make_error(info.reason, status.message, dict(info.metadata))
    return None
