"""A request on its way to one shard, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shardam._link import ShardLink
from shardam_proto.channels import UnaryCall
from shardam_proto.v1 import common_pb2


class Request(Protocol):
    """A request message: all begin with a header."""

    @property
    def header(self) -> common_pb2.RequestHeader:
        """The header, filled in when the message is sent."""
        ...


RequestT = TypeVar("RequestT", bound=Request)
ResponseT = TypeVar("ResponseT")


@dataclasses.dataclass(frozen=True)
class ShardCall(Generic[RequestT, ResponseT]):
    """A request for one shard.

    Attributes:
        link: the shard.
        method: picks the stub's method; the stub changes when the shard moves.
        message: the request without its header.
        number: number of the change; 0: a read.
    """

    link: ShardLink
    method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]]
    message: RequestT
    number: int = 0
