"""A client's membership of a group: how it joins on home, and which step it works on (PROTOCOL.md, section 5)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from shardam._backoff import Backoff, Deadline
from shardam._calls import ShardCall
from shardam._changes import AnyChange
from shardam._group import GroupOptions
from shardam._recovery import recover
from shardam._waiting import StepWait
from shardam_proto.errors import GroupMismatch, ShardamError, make_error
from shardam_proto.v1 import embedding_pb2

if TYPE_CHECKING:
    from shardam._session import Session

logger = logging.getLogger(__name__)


class Membership:
    """The steps of a member; changed with the lock of its changes held.

    Args:
        options: its place in the group.
        first_step: the first step that it takes part in.

    Attributes:
        step: sync: the step that it works on, one after the last that was decided with it; bounded: its clock after the next
            push.
        wait: how long its step has waited for other members.
    """

    def __init__(self, options: GroupOptions, first_step: int) -> None:
        self.options = options
        self.step = first_step
        self.wait = StepWait(options)

    def enter(self, change: AnyChange) -> None:
        """Gives a change its step when it gets its number.

        In a sync group a change of rows waits for the step before, as a contribution does. In a bounded one it counts for
        nobody's clock.
        """
        if self.options.is_sync:
            change.step = self.step
        elif change.contributes:
            change.step = self.step
            self.step += 1

    def settle(self, change: AnyChange) -> None:
        """Goes on to the next step once one has ended, in whatever way."""
        if self.options.is_sync and change.contributes:
            self.step = change.step + 1


def step_of_read(session: Session, *, training: bool = False) -> int:
    """Returns the step that a read of a client carries; 0: it waits for nothing.

    In a sync group every read carries one: the step before is decided, and this client knows it, but it was home that said so,
    and another shard may have yet to be told. A read waits there for home alone, never for other members. In a bounded group
    only a read of training waits, and for members.
    """
    membership = session.membership
    return membership.step if membership is not None and (training or membership.options.is_sync) else 0


def join(session: Session, options: GroupOptions, deadline: Deadline) -> Membership:
    """Joins a group on home, which tells every shard.

    What may succeed later is tried again until the deadline; a rank that is taken, too, as long as its holder seems to be gone:
    home has not heard of it since the first try.

    Raises:
        GroupMismatch: the rank is taken, or the members have agreed on something else.
        ShardamError: home's reason, or why it did not answer in time.
    """
    backoff = Backoff()
    message = embedding_pb2.JoinGroupRequest(
        group=options.name, terms=options.terms(), rank=options.rank, restart_count=options.restart_count
    )
    refused_since: float | None = None
    while True:
        session.check()
        home = session.links[0]
        request = ShardCall(home, lambda link: link.embedding.JoinGroup, message)
        incarnation, sent_at, hurry = home.incarnation, time.monotonic(), False
        try:
            answer = session.try_once(request, max(0.1, min(deadline.remaining_s, session.try_s)))
        except GroupMismatch as error:
            if "silence_s" not in error.metadata:
                raise
            if refused_since is None:
                logger.warning("%s cannot join yet, trying again for %.0f s: %s", options, deadline.remaining_s, error)
                refused_since = time.monotonic()
            elif float(error.metadata["silence_s"]) < sent_at - refused_since:
                raise  # whoever is in the way lives
            problem: ShardamError = error
        except ShardamError as error:
            session.check()
            prospect = recover(session, home, error, incarnation)
            problem, hurry = prospect.problem, prospect.hurry
        else:
            logger.info("joined as %s, from step %d on", options, answer.first_step)
            return Membership(options, answer.first_step)
        backoff.wait(deadline, session.over, hurry=hurry)
        if deadline.passed:
            session.check()
            suffix = f" (tried {backoff.num_waits} times in {deadline.after_s:g} s)"
            raise make_error(problem.reason, problem.message + suffix, problem.metadata)
