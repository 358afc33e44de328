"""A client's standing with all shards of a cluster: who it is, whom it talks to, and when it may no longer go on.

Makes calls, knows nothing of what they mean; numbered changes are in _changes.py and _lane.py, reads in _reads.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import redis
from redis.lock import Lock

from shardam._backoff import Backoff, Deadline
from shardam._calls import AnswerT, AnyCall, RequestT, ResponseT, ShardCall
from shardam._endings import Standing, as_ending, copy_of, ends_client
from shardam._heartbeat import Heartbeat
from shardam._leaving import leave
from shardam._link import ShardLink
from shardam._membership import Membership, join
from shardam._moving import Moving
from shardam._recovery import recover
from shardam._session_options import SessionOptions
from shardam._shards import Shards, ShardsMoved, open_client
from shardam._threads import CallThreads
from shardam._waiting import ranks_of
from shardam_proto.channels import UnaryCall
from shardam_proto.errors import ClientClosed, ShardamError, ShardUnreachable, make_error
from shardam_proto.limits import CLIENT_ID_BYTES, PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, Keys
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES_PER_TIMEOUT = 4
"""A try waits this part of shard_timeout_s for its answer, so that a lost answer leaves time for three more tries."""

BUDGET_SHARE = 0.8
"""What may have to wait for other members is told this part of the time that its answer is waited for: a shard that still waits
then says so in time, and is not taken for one that is silent."""

READERS_PER_SHARD = 2
"""Two threads' reads go on side by side."""


class Session:
    """One client id on one cluster, with all its channels, threads and locks; made by open_session.

    Attributes:
        client_id: 16 random bytes.
        timings: where its times are counted.
        cluster_id: the cluster's id.
        shards: the shards of the present route map.
        moving: whether the cluster is on its way to other shards.
        move_lock: held by the thread that opens this client there.
        client_lease_s: silence after which home closes this client; 0: never.
        membership: of its group, once it has joined it; None: async.
        readers: threads for reads side by side.
        redis: the cluster's Redis.
        keys: the cluster's keys there.
        over: set once the client has ended.
    """

    def __init__(self, options: SessionOptions, connection: redis.Redis, keys: Keys) -> None:
        self.options = options
        self.timings = options.timings
        self.client_id = secrets.token_bytes(CLIENT_ID_BYTES)
        self.cluster_id = ""
        self.shards = Shards(RouteMap(1, 1), ())
        self.moving = Moving(options.shard_timeout_s)
        self.move_lock = threading.Lock()
        self.redis_is_away = False
        self.client_lease_s = 0.0
        self.membership: Membership | None = None
        self.readers: CallThreads[object]
        self.redis = connection
        self.keys = keys
        self.over = threading.Event()
        self._pid = os.getpid()
        self._request_ids = itertools.count(1)
        self._failure: ShardamError | None = None
        self._failure_was_raised = False
        self._listeners: list[Callable[[], None]] = []
        self._move_listeners: list[Callable[[Shards, int], None]] = []
        self._opening: tuple[ShardLink, ...] = ()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def in_this_process(self) -> bool:
        """False after a fork: channels and threads stayed in the parent."""
        return os.getpid() == self._pid

    @property
    def route_map(self) -> RouteMap:
        """Bucket to shard."""
        return self.shards.route_map

    @property
    def links(self) -> tuple[ShardLink, ...]:
        """The shards, by index."""
        return self.shards.links

    @property
    def failure(self) -> ShardamError | None:
        """What ended this client, if it has ended."""
        return self._failure

    @property
    def ended(self) -> bool:
        """True: every call raises what ended this client."""
        return self._failure is not None

    @property
    def failure_was_raised(self) -> bool:
        """True: a caller has been told what ended this client."""
        return self._failure_was_raised

    @property
    def try_s(self) -> float:
        """How long one try of a call waits for its answer."""
        return self.options.shard_timeout_s / TRIES_PER_TIMEOUT

    def check(self) -> None:
        """Raises if this client may not go on.

        Raises:
            ClientClosed: it was closed, or this is a forked process, where the cluster object opens a client of its own.
            ShardamError: what ended it, ShardLost among others.
        """
        if not self.in_this_process:
            raise ClientClosed(
                f"this was begun before the fork, by process {self._pid}, and cannot go on in process {os.getpid()}; begin it "
                "again there"
            )
        failure = self._failure
        if failure is not None:
            self._failure_was_raised = True
            raise copy_of(failure)

    # -- calls

    def answer(self, request: AnyCall[AnswerT], first: Callable[[], AnswerT] | None = None) -> AnswerT:
        """Calls a shard until it answers: what may succeed later is tried again with back-off until shard_timeout_s.

        Args:
            request: the call.
            first: waits for the first try, which is under way; None: it is made now.

        Raises:
            ShardUnreachable: no answer in that time.
            ShardLost: the shard lost state that this client knows.
            ShardsMoved: the client has gone on to other shards.
            ShardamError: the shard's reason.
        """
        deadline, backoff = Deadline(self.options.shard_timeout_s), Backoff()
        if request.step and self.membership is not None and not self.membership.options.is_sync:
            self.membership.wait.begin()
        while True:
            self.check()
            if request.link.epoch != self.shards.epoch:
                raise ShardsMoved
            incarnation = request.link.incarnation
            try:
                if first is not None:
                    under_way, first, incarnation = first, None, request.header.incarnation
                    return under_way()
                return self.try_once(request, min(deadline.remaining_s, self.try_s))
            except ShardamError as error:
                self.check()
                if self._waits_for_members(request.step, error):
                    deadline = Deadline(self.options.shard_timeout_s)
                    continue
                prospect = recover(self, request.link, error, incarnation)
            if prospect.patient:
                deadline = Deadline(self.options.shard_timeout_s)
            backoff.wait(deadline, self.over, hurry=prospect.hurry)
            if deadline.passed:
                self.check()
                problem = prospect.problem
                suffix = f" (tried {backoff.num_waits} times in {deadline.after_s:g} s)"
                raise make_error(problem.reason, problem.message + suffix, problem.metadata)

    def ask(self, question: Callable[[Shards], T]) -> T:
        """Asks the shards; if the client goes on to other shards meanwhile, asks those from the beginning.

        Raises:
            ShardamError: what the question raises.
        """
        while True:
            try:
                return question(self.shards)
            except ShardsMoved:
                continue

    def ask_home(self, method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]], message: RequestT) -> ResponseT:
        """Calls the home shard until it answers.

        Raises:
            ShardamError: as answer.
        """
        return self.ask(lambda shards: self.answer(ShardCall(shards.links[0], method, message)))

    def try_once(self, request: AnyCall[AnswerT], timeout_s: float) -> AnswerT:
        """Calls a shard once, with a header of its own.

        Raises:
            ShardamError: as ShardLink.call or ShardLink.pull.
        """
        self.fill_header(request, timeout_s)
        return request.make(timeout_s)

    def fill_header(self, request: AnyCall[object], timeout_s: float) -> None:
        """Gives a call the header of its next try."""
        budget_s = timeout_s * BUDGET_SHARE if request.step else timeout_s
        request.header.CopyFrom(self.header(request.link, 0, budget_s, request.step))

    def _waits_for_members(self, step: int, error: ShardamError) -> bool:
        """True: a shard has kept a read for its whole budget because members of a bounded group are too far behind."""
        membership = self.membership
        if not step or membership is None or membership.options.is_sync or "budget_s" not in error.metadata:
            return False
        membership.wait.note(step, ranks_of(error.metadata, "missing_ranks"), ranks_of(error.metadata, "absent_ranks"))
        return True

    def header(self, link: ShardLink, number: int, budget_s: float, step: int = 0) -> common_pb2.RequestHeader:
        """Returns the header of a new request to a shard.

        Args:
            link: the shard.
            number: number of a change; 0: none.
            budget_s: how long its answer is waited for.
            step: step of this client's group; 0: none, and no rank.
        """
        return common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=self.cluster_id,
            timeline=link.timeline,
            epoch=link.epoch,
            incarnation=link.incarnation,
            client_id=self.client_id,
            number=number,
            step=step,
            rank=self.membership.options.rank if step and self.membership is not None else 0,
            request_id=self.next_request_id(),
            budget_s=budget_s,
        )

    def next_request_id(self) -> int:
        """Returns the id of a new message."""
        return next(self._request_ids)

    def given_rows_lease(self, table_id: int, lease_s: float) -> Lock:
        """Returns the lease, not yet taken, of the client that writes a table's given rows."""
        return Lock(self.redis, self.keys.given_rows(table_id), timeout=lease_s, thread_local=False)

    # -- beginning

    def start(self, view: ClusterView, deadline: Deadline) -> None:
        """Opens this client on all shards of a ready cluster.

        Raises:
            ShardamError: the first shard's reason; nothing is kept open.
        """
        if view.entry is None or view.route_map is None:
            raise AssertionError("the cluster is not ready")
        self.cluster_id = view.entry.cluster_id
        entries = [view.shards[index] for index in range(view.route_map.num_shards)]
        links = tuple(ShardLink(entry, self.options.token, view.route_map.epoch) for entry in entries)
        self.shards = Shards(view.route_map, links)
        try:
            for link in self.links:
                answer = open_client(self, link, max(0.1, deadline.remaining_s / TRIES_PER_TIMEOUT))
                link.adopt(answer)
                if link.index == 0:
                    self.client_lease_s = answer.client_lease_s
        except BaseException:
            for link in self.links:
                link.close(_closed_error())
            raise
        self.readers = CallThreads(READERS_PER_SHARD * len(self.links), "shardam-read")
        if self.client_lease_s:
            self.keep(threading.Thread(target=Heartbeat(self).run, name="shardam-heartbeat", daemon=True))

    def keep(self, thread: threading.Thread) -> None:
        """Starts a thread that ends by itself once the client has ended; close waits for it."""
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def join(self, deadline: Deadline) -> None:
        """Joins the group that the options name, if they do.

        Raises:
            ShardamError: as join; the client is not closed.
        """
        if self.options.group is not None:
            self.membership = join(self, self.options.group, deadline)

    # -- to other shards

    def when_moved(self, listener: Callable[[Shards, int], None]) -> None:
        """Has a function called, from any thread, with other shards and the last number that is closed on all of them."""
        self._move_listeners.append(listener)

    @contextlib.contextmanager
    def opening(self, links: tuple[ShardLink, ...]) -> Iterator[None]:
        """Has links that are being opened end with this client."""
        with self._lock:
            self._opening = links
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._opening = ()

    def move_to(self, shards: Shards, last_number: int) -> None:
        """Goes on with the shards of another route map, on all of which this client is open.

        Raises:
            ShardamError: the client has ended meanwhile.
        """
        with self._lock:
            former = self.shards
            if self._failure is None:
                self.shards = shards
        self.check()
        logger.info("client %s goes on with %d shards, after number %d", self.client_id.hex(), len(shards.links), last_number)
        self.readers.grow(READERS_PER_SHARD * len(shards.links))
        for listener in self._move_listeners:
            listener(shards, last_number)
        for link in former.links:
            link.close(ShardUnreachable(f"{link.peer} is no shard of the cluster any more", metadata={"peer": link.peer}))

    # -- end

    def when_ended(self, listener: Callable[[], None]) -> None:
        """Has a function called, from any thread, when this client ends."""
        self._listeners.append(listener)

    def fail(self, error: ShardamError) -> None:
        """Ends this client: from now on every call raises this error, and whoever waits is woken. The first one stays."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            links = (*self.links, *self._opening)
        logger.warning("client %s ends: %s: %s", self.client_id.hex(), error.reason, error.message)
        self.over.set()
        for link in links:
            link.break_off(error)
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def end_with(self, error: ShardamError) -> ShardamError:
        """Ends this client and returns the error, to be raised."""
        self.fail(error)
        return copy_of(error)

    def end_of(self, link: ShardLink, error: ShardamError) -> ShardamError:
        """Ends this client because of a shard's answer and returns the error, with the remedy, to be raised."""
        place = None if self.membership is None else self.membership.options
        return self.end_with(as_ending(error, link.peer, Standing(link.acknowledged, self.client_lease_s, place)))

    def is_ended_by(self, error: ShardamError) -> bool:
        """True: after this error of a shard this client can neither read nor write any more."""
        return ends_client(error, is_member=self.membership is not None)

    def close(self) -> None:
        """Leaves the cluster, closes the channels and ends the threads; later calls raise ClientClosed."""
        with self._lock:
            failed = self._failure is not None
            self._failure = self._failure or _closed_error()
            links = (*self.links, *self._opening)
        self.over.set()
        if not failed and self.links:
            leave(self)
        for link in links:
            link.close(self._failure)
        self._tell_listeners()
        self.readers.close()
        for thread in self._threads:
            thread.join()
        self.redis.close()


def _closed_error() -> ClientClosed:
    return ClientClosed("this cluster object is closed; connect again")
