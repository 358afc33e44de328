"""What one shard has yet to be told of a client's changes, in the order of their numbers, and the thread that keeps it going.

Several are sent without waiting; answers may come in any order. Whatever goes wrong, everything from the first one without an
answer on is sent again in order, and the shard answers repeats as before (PROTOCOL.md, section 4). What a shard is told of a
change next is the change's to say: its turn.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from shardam._backoff import Backoff
from shardam._calls import count_times
from shardam._changes import AnyChange, Turn
from shardam._forks import is_fork_error
from shardam._link import ShardLink
from shardam._recovery import recover
from shardam._session import BUDGET_SHARE, Session
from shardam._stream import Reply, StreamRequest
from shardam_proto.errors import ShardamError, ShardUnreachable, make_error
from shardam_proto.v1 import embedding_pb2

logger = logging.getLogger(__name__)


LONGEST_ARRIVE_S = 10.0
"""Home says at least this often whom a step waits for, however long shard_timeout_s is."""


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A change of which this shard has yet to be told something.

    Attributes:
        change: the change.
        attempt: the try of its turn whose refusal counts; None: to be sent, again or for the first time, if it is its turn.
        tries: all tries of its turn that may still be answered: a late success counts, too.
        furthest: most messages that one try has got through.
        stopped: what this shard is to be told depends on another shard's answer.
    """

    change: AnyChange
    attempt: StreamRequest | None = None
    tries: list[StreamRequest] = dataclasses.field(default_factory=list)
    furthest: int = 0
    stopped: bool = False


class Lane:
    """The numbered changes of one client on their way to one shard.

    Args:
        session: the client.
        link: the shard.
        lock: guards all lanes of the client, and their changes.
        noted: called with the lock held after a change's outcome on this shard is known.
    """

    def __init__(self, session: Session, link: ShardLink, lock: threading.RLock, noted: Callable[[AnyChange], None]) -> None:
        self._session = session
        self._link = link
        self._noted = noted
        self._wake = threading.Condition(lock)
        self._waiting: dict[int, _Waiting] = {}
        self._problem: tuple[ShardamError, int] | None = None
        self._last_problem: ShardamError | None = None
        self._backoff = Backoff()
        self._moved_at = time.monotonic()
        self._closed = False
        session.keep(threading.Thread(target=self._run, name=f"shardam-lane-{link.index}", daemon=True))

    # -- what the change log asks, with the lock held

    @property
    def has_sent_all(self) -> bool:
        """True: what is sent to the shard now comes there behind every change, unless the stream breaks."""
        tries = [waiting.attempt for waiting in self._waiting.values()]
        return all(attempt is not None and attempt.stream is not None for attempt in tries)

    def add(self, change: AnyChange) -> None:
        """Takes the next number."""
        if not self._waiting:
            self._moved_at = time.monotonic()
        self._waiting[change.number] = _Waiting(change)
        self._wake.notify()

    def go_on(self) -> None:
        """Looks again at the number that it waits at: another shard's answer may have made it this one's turn, or its end."""
        head = next(iter(self._waiting.values()), None)
        if head is None or not head.stopped:
            return
        if head.change.is_over(self._link.index):
            del self._waiting[head.change.number]
        elif self._stops_at(head.change):
            return
        head.stopped = False
        self._moved_at = time.monotonic()  # it stood still because of another shard
        self._wake.notify()

    def close(self) -> None:
        """Sends nothing more."""
        self._closed = True
        self._waiting.clear()
        self._wake.notify()

    def stalled_since(self) -> float | None:
        """Returns time.monotonic() when this shard last did something for this client; None: nothing is expected of it."""
        head = next(iter(self._waiting.values()), None)
        if head is None or self._stops_at(head.change):
            return None
        if head.attempt is not None and head.attempt.num_sent > head.furthest:
            head.furthest = head.attempt.num_sent
            self._moved_at = time.monotonic()  # a part in many chunks may take its time
        return max(self._moved_at, self._session.moving.seen_at)

    def stall(self, before: str) -> ShardamError:
        """Returns the error that says for how long this shard has done nothing, and why; its message begins with `before`."""
        problem = self._last_problem or ShardUnreachable(
            f"{self._link.peer}: no answer yet", metadata={"peer": self._link.peer}
        )
        tried_s = time.monotonic() - self._moved_at
        message = f"{before}{problem.message} (tried {self._backoff.num_waits + 1} times in {tried_s:.3g} s)"
        return make_error(problem.reason, message, problem.metadata)

    # -- the thread

    @property
    def _over(self) -> bool:
        return self._closed or self._session.ended

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # the thread's edge: a client without one of its lanes cannot go on
            logger.exception("the lane of %s failed", self._link.peer)
            self._session.fail(ShardamError(f"{self._link.peer}: this client failed: {error!r}"))

    def _step(self) -> bool:
        """Waits until there is something to do, and does it; False: there never will be."""
        with self._wake:
            self._wait_for_work()
            if self._over:
                return False
            problem, self._problem = self._problem, None
            overdue = None if problem is not None else self._overdue()
            attempts = [] if problem is not None or overdue is not None else self._new_attempts()
        if problem is not None:
            self._come_back(*problem)
        elif overdue is not None:
            self._give_up(overdue)
        else:
            self._send(attempts)
        return True

    def _wait_for_work(self) -> None:
        while not (self._over or self._problem is not None or self._can_send()):
            due_at = min((sent.overdue_at for sent in self._attempts()), default=None)
            if due_at is not None and due_at <= time.monotonic():
                return
            self._wake.wait(None if due_at is None else due_at - time.monotonic())

    def _attempts(self) -> list[StreamRequest]:
        return [waiting.attempt for waiting in self._waiting.values() if waiting.attempt is not None]

    def _overdue(self) -> _Waiting | None:
        now = time.monotonic()
        for waiting in self._waiting.values():
            if waiting.attempt is not None and waiting.attempt.overdue_at <= now:
                return waiting
        return None

    def _stops_at(self, change: AnyChange) -> bool:
        """True: what the shard is to be told of it is not known yet."""
        return change.turn(self._link.index) is None

    def _can_send(self) -> bool:
        for waiting in self._waiting.values():
            if self._stops_at(waiting.change):
                return False
            if waiting.attempt is None:
                return True
        return False

    # -- sending

    def _new_attempts(self) -> list[StreamRequest]:
        """Makes a try of all that is to be sent, in order, up to a number that waits for another shard's answer."""
        attempts = []
        for waiting in self._waiting.values():
            turn = waiting.change.turn(self._link.index)
            if turn is None:
                break
            if waiting.attempt is None:
                waiting.attempt = self._new_attempt(waiting, turn)
                waiting.tries.append(waiting.attempt)
                attempts.append(waiting.attempt)
        return attempts

    def _new_attempt(self, waiting: _Waiting, turn: Turn) -> StreamRequest:
        change, shard, try_s = waiting.change, self._link.index, self._session.try_s
        budget_s = try_s * BUDGET_SHARE if change.step else try_s
        if turn is Turn.ARRIVE:
            budget_s = min(budget_s, LONGEST_ARRIVE_S)
        header = self._session.header(self._link, change.number, budget_s, change.step)
        chunk_bytes = self._session.options.chunk_bytes

        def settled(reply: Reply) -> None:
            self._on_reply(waiting, attempt, turn, reply)

        attempt = StreamRequest(
            header.request_id, lambda: change.messages(shard, turn, header, chunk_bytes), try_s, header.incarnation, settled
        )
        return attempt

    def _send(self, attempts: list[StreamRequest]) -> None:
        try:
            stream = self._link.stream()
        except ShardamError as error:
            for attempt in attempts:
                attempt.settle(error)
            return
        for attempt in attempts:
            stream.send(attempt)

    def _give_up(self, waiting: _Waiting) -> None:
        """Counts a try as unknown. Its number is sent again with all that follow."""
        attempt = waiting.attempt
        if attempt is None:
            return
        error = self._link.give_up(attempt)
        with self._wake:
            if waiting.attempt is attempt:
                self._send_again_from(waiting.change.number, error, attempt.incarnation)

    # -- answers, from the stream's thread

    def _on_reply(self, waiting: _Waiting, attempt: StreamRequest, turn: Turn, reply: Reply) -> None:
        with self._wake:
            change = waiting.change
            if self._over or self._waiting.get(change.number) is not waiting or attempt not in waiting.tries:
                return
            waiting.tries.remove(attempt)
            if isinstance(reply, ShardamError):
                if waiting.attempt is attempt:
                    self._failed(waiting, attempt, reply)
            elif turn is change.turn(self._link.index):
                if reply.HasField("push"):
                    count_times(self._session.timings, attempt, reply.push.header)
                self._done(waiting, reply)

    def _done(self, waiting: _Waiting, response: embedding_pb2.ExchangeResponse) -> None:
        change = waiting.change
        waiting.attempt = None
        self._forget_tries(waiting)
        if change.take(self._link.index, response):
            self._link.acknowledged = max(self._link.acknowledged, change.number)
        if change.is_decided:
            self._link.closed = max(self._link.closed, change.number)
        self._backoff, self._last_problem = Backoff(), None
        self._moved_at = time.monotonic()
        self._go_on_after(waiting)

    def _forget_tries(self, waiting: _Waiting) -> None:
        tries, waiting.tries = waiting.tries, []
        for attempt in tries:
            attempt.abandon()

    def _go_on_after(self, waiting: _Waiting) -> None:
        """Sees what follows from an answer, here and on the other lanes."""
        change = waiting.change
        if change.is_over(self._link.index):
            del self._waiting[change.number]
        else:
            waiting.stopped = self._stops_at(change)
        self._wake.notify()
        self._noted(change)

    def _failed(self, waiting: _Waiting, attempt: StreamRequest, error: ShardamError) -> None:
        change, shard = waiting.change, self._link.index
        if self._session.is_ended_by(error):
            self._session.end_of(self._link, error)
        elif error.rule.retryable or error.reason == "WRONG_CLUSTER":
            self._send_again_from(change.number, error, attempt.incarnation)
        elif change.turn(shard) is not Turn.PART:
            self._session.fail(error)  # the number stays open there: this client's numbers no longer agree
        else:
            self._take_back_from(change.number)
            self._forget_tries(waiting)
            change.refuse(shard, error)
            self._go_on_after(waiting)

    def _take_back_from(self, number: int) -> None:
        """Notes that the shard has not taken this number and those that follow, as far as is known."""
        for waiting in self._waiting.values():
            if waiting.change.number >= number and waiting.attempt is not None:
                waiting.attempt.dropped = True
                waiting.attempt = None

    def _send_again_from(self, number: int, error: ShardamError, incarnation: int) -> None:
        self._take_back_from(number)
        self._problem = error, incarnation
        self._wake.notify()

    # -- coming back

    def _come_back(self, error: ShardamError, incarnation: int) -> None:
        """Does what a problem asks for, and waits before the next try."""
        if is_fork_error(error):
            return
        hurry = False
        if not self._is_mere_gap(error):
            try:
                prospect = recover(self._session, self._link, error, incarnation)
                error, hurry = prospect.problem, prospect.hurry
            except ShardamError as problem:
                error = problem
        with self._wake:
            if not self._backoff.num_waits:
                logger.info("%s: %s, trying again: %s", self._link.peer, error.reason, error.message)
            self._last_problem = error
            # At most try_s: whoever waits for shard_timeout_s sees several tries.
            wait_s = min(self._backoff.next_s(hurry=hurry), self._session.try_s)
            self._wake.wait_for(lambda: self._over, wait_s)

    def _is_mere_gap(self, error: ShardamError) -> bool:
        """True: the shard has all that it has acknowledged, and only waits for a number before."""
        return error.reason == "SEQUENCE_GAP" and int(error.metadata.get("last", 0)) >= self._link.acknowledged
