"""Reads by unary calls: of a member of a sync group behind the steps that it knows to be decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic

from shardam._calls import RequestT, ResponseT, StreamCall
from shardam._link import ShardLink
from shardam._membership import step_of_read
from shardam._pull_plan import PullQuestion, ShardRead
from shardam._session import Session
from shardam_proto.channels import UnaryCall
from shardam_proto.v1 import common_pb2

__all__ = ["UnaryRead", "unary_read"]


@dataclasses.dataclass(frozen=True)
class UnaryRead(Generic[RequestT, ResponseT]):
    """A unary call that reads; made by unary_read.

    Attributes:
        link: the shard.
        session: the client.
        method: picks the stub's method.
        message: the request without its header.
        step: of the client's group, if the shard may have yet to be told of the step before.
    """

    link: ShardLink
    session: Session
    method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]]
    message: RequestT
    step: int

    @property
    def header(self) -> common_pb2.RequestHeader:
        """The request's header."""
        return self.message.header

    def make(self, timeout_s: float) -> ResponseT:
        """Makes the call once, after a pull of nothing where it has to wait: only on a stream a shard lets a read wait.

        Each has the whole time-out, and both are for the same incarnation: a shard that is restarted in between, and may have
        to be told again, refuses the call.

        Raises:
            ShardamError: as StreamCall.make or ShardLink.call.
        """
        if self.step:
            nothing = PullQuestion(ShardRead(self.link), chunk_bytes=0)
            waiting = StreamCall(self.link, nothing, self.step, self.session.timings)
            waiting.header.CopyFrom(self.header)
            waiting.make(timeout_s)
        return self.link.call(self.method, self.message, timeout_s)


def unary_read(
    session: Session, link: ShardLink, method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]], message: RequestT
) -> UnaryRead[RequestT, ResponseT]:
    """Returns a read of what this client knows to be there, for Session.answer.

    Args:
        session: the client.
        link: the shard.
        method: picks the stub's method.
        message: the request without its header.
    """
    return UnaryRead(link, session, method, message, step_of_read(session))
