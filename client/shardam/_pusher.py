"""One client's queue of changes, so that an optimizer's step need not wait for the wire, and its errors reach a caller once."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from shardam._change_log import ChangeLog
from shardam._changes import AnyChange
from shardam._endings import copy_of
from shardam._session import Session
from shardam_proto.errors import ClientClosed, ShardamError, make_error

logger = logging.getLogger(__name__)

MAX_QUEUED = 32
"""Changes that wait at most; a caller that is faster waits with the next one instead of filling memory."""

MAX_KEPT_BYTES = 512 * 2**20
"""Bytes of changes without an outcome at most, as much as one largest part; one change is taken whatever it has."""

NOT_SENT = "an earlier change still has no answer, so this one was not sent: "


class Pusher:
    """One client's changes, in order. Thread-safe.

    Args:
        session: the client.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._log = ChangeLog(session, self._on_answer)
        self._changed = threading.Condition(self._log.lock)
        self._queue: collections.deque[AnyChange] = collections.deque()
        self._open: dict[int, AnyChange] = {}
        self._waited_for: set[int] = set()
        self._num_submitted = 0
        self._num_finished = 0
        self._bytes: dict[int, int] = {}
        self._errors: collections.deque[ShardamError] = collections.deque()
        self._reported_at = 0.0
        self._closed = False
        session.when_ended(self._on_session_end)

    def run(self, change: AnyChange) -> None:
        """Sends a change after all queued ones and waits until every shard has applied it.

        Raises:
            ShardUnreachable: a shard did nothing for shard_timeout_s; the change is kept and sent on, unless the message says
                that it was not sent.
            ShardamError: the change's own error, or that of an earlier queued one.
        """
        self.raise_error()
        with self._changed:
            self._wait(lambda: self._has_room(change) and not self._is_stalled(), NOT_SENT)
            ticket = self._submit(change)
            self._waited_for.add(ticket)
            try:
                self._wait(lambda: ticket not in self._open)
            except ShardamError as error:
                if change in self._queue:
                    self._queue.remove(change)
                    self._finish(ticket)
                    raise make_error(error.reason, NOT_SENT + error.message, error.metadata) from error
                raise
            finally:
                self._waited_for.discard(ticket)
                if ticket in self._open:  # it is sent on, while the caller has its arrays back
                    change.keep_copy()
        refusal = change.refusal()
        if refusal is not None:
            raise refusal

    def submit(self, change: AnyChange) -> None:
        """Queues a change; its error is raised by the next call that asks.

        Raises:
            ShardUnreachable: the queue is full and a shard did nothing for shard_timeout_s; this change is not queued.
            ShardamError: an earlier queued change failed; this one is not queued.
        """
        self.raise_error()
        with self._changed:
            self._wait(lambda: self._has_room(change), NOT_SENT)
            self._submit(change)

    def flush(self, *, for_members: bool = True) -> None:
        """Waits until everything queued so far has been applied.

        Args:
            for_members: False: not for other members of a sync group: only until every shard has this client's part of the step
                and nothing is left to do but to wait for theirs; what is queued behind waits for them, too.

        Raises:
            ShardUnreachable: a shard did nothing for shard_timeout_s; what is queued is kept and sent on.
            ShardamError: a queued change failed.
        """
        self._session.check()
        with self._changed:
            last = self._num_submitted

            def done() -> bool:
                applied = not self._open or next(iter(self._open)) > last
                return applied or (not for_members and self._log.waits_for_members)

            self._wait(done)
        self.raise_error()

    def last_on_its_way(self) -> int:
        """Returns the number of the last change that has no outcome yet, if a read that leaves now comes to every shard behind
        all of them; 0: nothing is under way, or a read has to wait until it has ended.
        """
        with self._changed:
            return 0 if not self._open or self._queue else self._log.last_on_its_way()

    def wait_for_queued(self) -> None:
        """Waits until what is queued so far has ended, well or not, for shard_timeout_s at most; whoever asks next is told."""
        with self._changed:
            last = self._num_submitted

            def ended() -> bool:
                return self._closed or self._session.ended or not self._open or next(iter(self._open)) > last

            self._changed.wait_for(ended, self._session.options.shard_timeout_s)

    def finish(self, *, for_members: bool = True) -> None:
        """Waits for what is queued, at the end; an error that no caller has seen yet is raised.

        Args:
            for_members: as flush.

        Raises:
            ShardamError: a queued change failed.
        """
        if not self._session.ended:
            self.flush(for_members=for_members)
            return
        with self._changed:
            error = self._errors.popleft() if self._errors else None
        if error is not None and not self._session.failure_was_raised:
            raise error

    def raise_error(self) -> None:
        """Raises the oldest error of a queued change, once; likewise that a shard has done nothing for shard_timeout_s.

        Raises:
            ShardamError: that error, or what ended this client.
        """
        self._session.check()
        with self._changed:
            if self._errors:
                raise self._errors.popleft()
            if not self._is_stalled():
                self._raise_stall(since=0.0, before="")

    def close(self) -> None:
        """Sends nothing more. What is queued or without an answer is dropped: flush first."""
        with self._changed:
            self._closed = True
            self._drop()
            self._log.close()

    # -- with the lock held

    def _submit(self, change: AnyChange) -> int:
        self._num_submitted += 1
        self._open[self._num_submitted] = change
        self._bytes[self._num_submitted] = change.num_bytes
        self._queue.append(change)
        self._fill()
        return self._num_submitted

    def _fill(self) -> None:
        while self._queue and self._log.has_room:
            self._log.enter(self._queue.popleft())

    def _has_room(self, change: AnyChange) -> bool:
        fits = sum(self._bytes.values()) + change.num_bytes <= MAX_KEPT_BYTES or not self._open
        return fits and len(self._queue) < MAX_QUEUED

    def _finish(self, ticket: int) -> None:
        del self._open[ticket], self._bytes[ticket]
        self._num_finished += 1
        self._changed.notify_all()

    def _on_answer(self, change: AnyChange) -> None:
        """Called by the log, with the lock held."""
        if not change.settled:
            if change.waits_for_members:
                self._changed.notify_all()
            return
        ticket = next(ticket for ticket, other in self._open.items() if other is change)
        refusal = change.refusal()
        if refusal is not None and ticket not in self._waited_for:
            logger.warning("a queued change failed: %s", refusal)
            self._errors.append(refusal)
        self._finish(ticket)
        self._fill()

    def _on_session_end(self) -> None:
        with self._changed:
            failure = self._session.failure
            if failure is not None and any(ticket not in self._waited_for for ticket in self._open):
                self._errors.append(copy_of(failure))
            self._drop()
            self._log.close()

    def _drop(self) -> None:
        self._queue.clear()
        for ticket in list(self._open):
            self._finish(ticket)
        self._changed.notify_all()

    # -- waiting

    def _wait(self, done: Callable[[], bool], before: str = "") -> None:
        """Waits for a fact.

        Raises:
            ClientClosed: the client was closed meanwhile.
            ShardamError: what ended it, or that a shard has done nothing for shard_timeout_s.
        """
        since = time.monotonic() if self._is_stalled() else 0.0  # what was said before is tried for as long once more
        while True:
            self._session.check()
            if self._closed:
                raise ClientClosed("this cluster object was closed meanwhile; connect again")
            if done():
                return
            self._changed.wait(self._raise_stall(since, before))

    def _is_stalled(self) -> bool:
        """True: a caller has been told that a shard does nothing, and it has done nothing since."""
        stall = self._log.oldest_stall()
        return stall is not None and stall[0] <= self._reported_at

    def _raise_stall(self, since: float, before: str) -> float:
        """Raises if a shard has done nothing for shard_timeout_s; returns how long it still has.

        Args:
            since: time.monotonic() from which that counts at the earliest.
            before: what the message begins with.
        """
        timeout_s = self._session.options.shard_timeout_s
        stall = self._log.oldest_stall()
        if stall is None:
            return timeout_s
        left_s = max(stall[0], since) + timeout_s - time.monotonic()
        if left_s <= 0:
            self._reported_at = time.monotonic()
            error = stall[1].stall(before)
            logger.warning("%s", error.message)
            raise error
        return left_s
