"""What a fork asks of a client: gRPC at rest while the process is copied, and nothing of the parent's used by the child.

A thread that is inside gRPC at that moment leaves locks in the child that nobody will release, and gRPC's own threads are not
copied: parent or child crashes or hangs. So calls wait at a gate, streams end, channels close and their threads are waited for;
afterwards the parent opens what it needs again and sends what has no answer once more, under the same numbers. In the child,
whatever belongs to a process begins anew. subprocess does not come here: it copies nothing, unless it has a preexec_fn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from shardam._backoff import Deadline
from shardam._grpc_threads import GrpcThreads
from shardam_proto.errors import ShardamError, ShardUnreachable

logger = logging.getLogger(__name__)

REST_TIMEOUT_S = 5.0
"""Bringing gRPC to rest takes milliseconds; after a thousand times that the fork goes ahead all the same."""

_FORKED = "forked"
"""Metadata key of the error that ends what is under way: the outcome is unknown, and nothing is wrong with the shard."""


def fork_error(peer: str) -> ShardUnreachable:
    """Returns what requests to a shard end with when this process forks; they are to be sent again at once."""
    return ShardUnreachable(f"{peer}: this process has forked meanwhile", metadata={"peer": peer, _FORKED: "true"})


def is_fork_error(error: ShardamError) -> bool:
    """True: a fork has broken the call off."""
    return _FORKED in error.metadata


class Way(Protocol):
    """A channel with its stubs."""

    def close_channel(self) -> None:
        """Closes the channel; unary calls on it fail."""
        ...


class Link(Protocol):
    """The way to a shard, or to be opened when it is needed."""

    def let_go(self) -> Way | None:
        """Parts with channel and stream; what waits on the stream fails with fork_error."""
        ...


class Stream(Protocol):
    """A call with threads of its own and of gRPC's."""

    def cancel(self) -> None:
        """Ends the call."""
        ...

    def wait_for_threads(self, deadline: Deadline) -> bool:
        """Waits until its threads have ended; False: some have not at the deadline."""
        ...


class Heir(Protocol):
    """What a forked child has a copy of and cannot use as it is: locks that another thread may hold, threads, connections."""

    def _begin_anew(self) -> object:
        """Drops, in the child, what is the parent's; it is returned, so that nothing finalizes it."""
        ...


class _Depth(threading.local):
    """How many passages the thread is in."""

    value = 0


class Forks:
    """The gate of this process, and what is to be done before and after it forks. Thread-safe.

    A thread is inside from before it calls gRPC until it has what it called for. Threads inside never wait at the gate.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depth = _Depth()
        self._num_forks = 0
        self._inside: set[int | threading.Thread] = set()
        self._is_hooked = self._is_hooked_in_child = False
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._heirs: weakref.WeakSet[Heir] = weakref.WeakSet()
        self._left_behind: list[object] = []
        self._grpc_threads = GrpcThreads()

    # -- what takes part

    def add_link(self, link: Link) -> None:
        """Has a link, which has opened a channel, let go before a fork."""
        with self._changed:
            self._links.add(link)
            if not self._is_hooked:
                self._is_hooked = True  # only now, since gRPC may have hooks of its own: the last ones made run first
                os.register_at_fork(before=self._before, after_in_parent=self._after_in_parent)

    def add_stream(self, stream: Stream) -> None:
        """Has a stream's threads waited for before a fork."""
        with self._changed:
            self._streams.add(stream)

    def add_heir(self, heir: Heir) -> None:
        """Has something begin anew in forked children, as long as it lives."""
        with self._changed:
            self._heirs.add(heir)
            if not self._is_hooked_in_child:
                self._is_hooked_in_child = True
                os.register_at_fork(after_in_child=self._after_in_child)

    # -- the gate

    @contextlib.contextmanager
    def passage(self) -> Iterator[None]:
        """Waits while the process forks; the thread is inside until the context ends."""
        with self._changed:
            if not self._depth.value:
                self._changed.wait_for(lambda: not self._num_forks)
                self._inside.add(threading.get_ident())
            self._depth.value += 1
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def passage_if_open(self) -> Iterator[bool]:
        """Yields False where passage would wait."""
        with self._changed:
            enters = self._depth.value > 0 or not self._num_forks
            if enters:
                if not self._depth.value:
                    self._inside.add(threading.get_ident())
                self._depth.value += 1
        try:
            yield enters
        finally:
            if enters:
                self._leave()

    def start_inside(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Starts a daemon thread that is inside from its first moment to its last; to be called inside.

        Raises:
            RuntimeError: the interpreter starts no more threads.
        """

        def run_inside() -> None:
            self._depth.value = 1
            try:
                run()
            finally:
                self._take_out(thread)

        thread = threading.Thread(target=run_inside, name=name, daemon=True)
        with self._changed:
            self._inside.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._take_out(thread)
            raise
        return thread

    def _leave(self) -> None:
        with self._changed:
            if not self._depth.value:
                return  # it went in before a fork, in the parent
            self._depth.value -= 1
            if not self._depth.value:
                self._take_out(threading.get_ident())

    def _take_out(self, who: int | threading.Thread) -> None:
        with self._changed:
            self._inside.discard(who)
            self._changed.notify_all()

    # -- the hooks

    def _before(self) -> None:
        deadline = Deadline(REST_TIMEOUT_S)
        with self._changed:
            self._num_forks += 1
        at_rest = True
        while at_rest and self._bring_to_rest(deadline):
            at_rest = not deadline.passed
        if not (at_rest and self._grpc_threads.wait_until_gone(deadline)):
            logger.warning("gRPC is not at rest after %g s, forking all the same: the new process may hang", REST_TIMEOUT_S)

    def _bring_to_rest(self, deadline: Deadline) -> bool:
        """Ends what is under way; True: look again, a thread that was inside may have opened something meanwhile."""
        with self._changed:
            links = list(self._links)
        ways = [way for link in links if (way := link.let_go()) is not None]
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        ended = [stream for stream in streams if stream.wait_for_threads(deadline)]
        with self._changed:
            self._streams.difference_update(ended)
        if len(ended) == len(streams):  # else closing a channel could wait for ever
            for way in ways:
                way.close_channel()
        own = {threading.get_ident()}  # a signal's handler may fork within a call
        with self._changed:
            at_rest = self._changed.wait_for(lambda: self._inside <= own, deadline.remaining_s)
        return bool(ways or streams or not at_rest)

    def _after_in_parent(self) -> None:
        with self._changed:
            self._num_forks = max(0, self._num_forks - 1)  # a fork may have begun before there were hooks
            self._changed.notify_all()

    def _after_in_child(self) -> None:
        heirs = list(self._heirs)
        self._changed, self._depth = threading.Condition(), _Depth()
        self._num_forks, self._inside = 0, set()
        self._links, self._streams, self._heirs = weakref.WeakSet(), weakref.WeakSet(), weakref.WeakSet(heirs)
        self._grpc_threads = GrpcThreads()
        for heir in heirs:
            self._left_behind.append(heir._begin_anew())


FORKS = Forks()
"""The one of this process."""
