"""A request on its way to one shard, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shardam._link import ShardLink
from shardam_proto.channels import UnaryCall
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
        """Step of the client's group that it waits for; 0: it waits for no member."""
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
        """0: no unary call waits for members."""
        return 0

    def make(self, timeout_s: float) -> ResponseT:
        """Makes the call once; raises as ShardLink.call."""
        return self.link.call(self.method, self.message, timeout_s)


@dataclasses.dataclass(frozen=True)
class PullCall:
    """A pull over the shard's stream.

    Attributes:
        link: the shard.
        message: the request without its header.
        step: of the client's group, if it is a pull of training.
    """

    link: ShardLink
    message: embedding_pb2.PullRequest
    step: int = 0

    @property
    def header(self) -> common_pb2.RequestHeader:
        """The request's header."""
        return self.message.header

    def make(self, timeout_s: float) -> embedding_pb2.PullResponse:
        """Asks once; raises as ShardLink.pull."""
        return self.link.pull(self.message, timeout_s)
