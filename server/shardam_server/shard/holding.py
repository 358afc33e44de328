"""Holds a shard's changes back while home cuts the state of all shards (PROTOCOL.md, section 8).

While held, changes are taken in and not applied, but for those that home lets pass: up to the numbers that another shard has
applied already. A hold ends when home releases it, or by itself. A final one, under which the state moves to other shards, may
also end with the process: then what it held back is never applied here.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from shardam_proto.errors import ShardamError, ShardNotReady, StaleState
from shardam_proto.v1 import common_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Mark(NamedTuple):
    """Which client's which number a change is."""

    client_id: bytes
    number: int


def mark_of(header: common_pb2.RequestHeader) -> Mark:
    """Returns the number that a numbered change came with."""
    return Mark(header.client_id, header.number)


class _Kept(NamedTuple):
    mark: Mark | None
    start: Callable[[], None]
    refuse: Callable[[ShardamError], None]
    num_bytes: int


class Holding:
    """The gate before a shard's sequencer. Used on the event loop.

    Args:
        count_held: told of bytes that are held back from now on; below zero: that are not any more.

    Attributes:
        hold_id: the present hold; zero: none.
        held_bytes: bytes of changes that are held back.
        is_final: the state moves to other shards under the present hold.
    """

    def __init__(self, count_held: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.hold_id = 0
        self.held_bytes = 0
        self.is_final = False
        self._sealed = False
        self._refusal: ShardamError | None = None
        self._targets: Mapping[bytes, int] = {}
        self._kept: collections.deque[_Kept] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None
        self._when_expired: Callable[[int], None] = lambda hold_id: None
        self._count_held = count_held

    @property
    def held(self) -> bool:
        """True: changes are held back."""
        return self.hold_id != 0

    def hold(self, hold_id: int, hold_s: float, when_expired: Callable[[int], None] | None = None) -> None:
        """Begins a hold, or lengthens it; one of another id is ended first.

        Args:
            hold_id: its id, not zero.
            hold_s: when it ends by itself, in seconds from now.
            when_expired: called then instead of releasing; it releases, sooner or later. None: the hold is not final.

        Raises:
            ShardNotReady: there is a final hold of another id, which only Redis can end.
        """
        if self.hold_id not in (0, hold_id):
            if self.is_final:
                raise ShardNotReady("this shard is held because its rows may be moving to other shards; try again")
            logger.info("a new hold replaces one that was not released")
            self.release(self.hold_id)
        self.hold_id = hold_id
        self.is_final = when_expired is not None
        self._when_expired = when_expired or self._expire
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(hold_s, lambda: self._when_expired(hold_id))

    def check(self, hold_id: int) -> None:
        """Refuses to go on with a hold that has ended.

        Raises:
            StaleState: it has (HOLD_EXPIRED).
        """
        if self.hold_id != hold_id:
            raise StaleState("the hold of this shard's changes has ended; cut again", reason="HOLD_EXPIRED")

    def advance(self, targets: Mapping[bytes, int]) -> None:
        """Lets changes pass up to numbers, by client; those that are held already start now."""
        self._targets = {**self._targets, **targets}
        waiting, self._kept = self._kept, collections.deque()
        for kept in waiting:
            if self._passes(kept.mark):
                self._start(kept)
            else:
                self._kept.append(kept)

    def release(self, hold_id: int) -> None:
        """Ends a hold: what was held back starts, in the order in which it came. One that is not held is passed over."""
        if self.hold_id != hold_id:
            return
        self.hold_id, self._targets, self.is_final, self._sealed = 0, {}, False, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._kept:
            self._start(self._kept.popleft())

    def end(self) -> None:
        """Ends the present hold, because this process drains: what is held back starts; but under a final hold others may have
        the state already, so that it is refused.
        """
        if self.is_final:
            self.refuse(ShardNotReady("this shard ends while its rows may be moving to other shards; try again"))
        else:
            self.release(self.hold_id)

    def refuse(self, error: ShardamError) -> None:
        """Refuses what is held back, and all that would be, because this process ends and others may have the state already."""
        self._refusal = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._kept:
            kept = self._kept.popleft()
            self._count(-kept.num_bytes)
            kept.refuse(error)

    def run(self, start: Callable[[], asyncio.Future[T]], mark: Mark | None, num_bytes: int) -> asyncio.Future[T]:
        """Starts a change now, or once it may.

        Args:
            start: puts it into the sequencer's order.
            mark: its number; None: it has none, and waits for the release.
            num_bytes: what it holds in memory.

        The future raises the error of `refuse`.
        """
        if self._refusal is not None:
            return _refused(self._refusal)
        if not self.held or self._passes(mark):
            return start()
        outer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._kept.append(_Kept(mark, lambda: _chain(start(), outer), lambda error: _refuse(outer, error), num_bytes))
        self._count(num_bytes)
        return outer

    def seal(self) -> None:
        """Lets nothing pass any more until the release: the state is cut, and other shards may go on from the cut."""
        self._sealed = True

    def run_now(self, start: Callable[[], asyncio.Future[T]], num_bytes: int) -> asyncio.Future[T]:
        """Starts what a hold does not stop, unless the hold is sealed; then as run."""
        return self.run(start, None, num_bytes) if self._sealed else start()

    def _passes(self, mark: Mark | None) -> bool:
        return not self._sealed and mark is not None and mark.number <= self._targets.get(mark.client_id, 0)

    def _start(self, kept: _Kept) -> None:
        self._count(-kept.num_bytes)
        kept.start()

    def _count(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._count_held(num_bytes)

    def _expire(self, hold_id: int) -> None:
        logger.warning("a hold ran out before it was released: changes go on")
        self.release(hold_id)


def _chain(inner: asyncio.Future[T], outer: asyncio.Future[T]) -> None:
    """Has one future end as another does."""

    def end(done: asyncio.Future[T]) -> None:
        if outer.cancelled():
            return
        if done.cancelled():
            outer.cancel()
            return
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(error)
            outer.exception()  # counts as seen: whoever asked for the change may be gone

    inner.add_done_callback(end)


def _refuse(future: asyncio.Future[T], error: ShardamError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # counts as seen: whoever asked for the change may be gone


def _refused(error: ShardamError) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    _refuse(future, error)
    return future
