"""A client's standing with all shards of a cluster: who it is, whom it talks to, and when it may no longer go on.

Makes calls, knows nothing of what they mean; numbered changes are in _changes.py, reads in _reads.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import secrets
import threading

import grpc
import redis
from redis.lock import Lock

from shardam._backoff import Backoff, Deadline
from shardam._calls import RequestT, ResponseT, ShardCall
from shardam._link import ShardLink
from shardam._threads import CallThreads
from shardam_proto.channels import call
from shardam_proto.errors import (
    ClientClosed,
    RedisUnreachable,
    ShardamError,
    VersionMismatch,
    WrongCluster,
    make_error,
)
from shardam_proto.limits import CLIENT_ID_BYTES, MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, Keys, read_cluster
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2

logger = logging.getLogger(__name__)

TRIES_PER_TIMEOUT = 4
"""A call waits this part of shard_timeout_s for its answer, so that a lost answer leaves time for three more tries."""

LEAVE_TIMEOUT_S = 2.0
"""Saying goodbye is a courtesy; a shard forgets silent clients by itself."""

_FINAL_CODES = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
"""After these this client can do nothing on the cluster; a new one may."""


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How to reach a cluster.

    Attributes:
        redis_url: URL of the cluster's Redis.
        cluster: the cluster's name.
        token: its token, or None.
        shard_timeout_s: how long a call is tried before it fails.
    """

    redis_url: str
    cluster: str
    token: str | None
    shard_timeout_s: float


class Session:
    """One client id on one cluster; made by open_session."""

    def __init__(self, options: SessionOptions, connection: redis.Redis, keys: Keys) -> None:
        self.options = options
        self.client_id = secrets.token_bytes(CLIENT_ID_BYTES)
        self.cluster_id = ""
        self.route_map = RouteMap(1, 1)
        self.links: list[ShardLink] = []
        self.readers: CallThreads[object]
        self.writers: CallThreads[object]
        self._connection = connection
        self._keys = keys
        self._pid = os.getpid()
        self._request_ids = itertools.count(1)
        self._failure: ShardamError | None = None
        self._failure_was_raised = False
        self._lock = threading.Lock()

    @property
    def in_this_process(self) -> bool:
        """False after a fork: channels and threads stayed in the parent."""
        return os.getpid() == self._pid

    @property
    def ended(self) -> bool:
        """True: every call raises what ended this client."""
        return self._failure is not None

    @property
    def failure_was_raised(self) -> bool:
        """True: a caller has been told what ended this client."""
        return self._failure_was_raised

    def check(self) -> None:
        """Raises if this client may not go on.

        Raises:
            ClientClosed: it was closed, or this is a forked process.
            ShardamError: what ended it, ShardLost among others.
        """
        if not self.in_this_process:
            raise ClientClosed(
                f"this cluster object belongs to process {self._pid} and does not work after a fork (this is process "
                f"{os.getpid()}); call shardam.connect in the new process, or start workers with the spawn method"
            )
        failure = self._failure
        if failure is not None:
            self._failure_was_raised = True
            raise make_error(failure.reason, failure.message, failure.metadata)

    def fail(self, error: ShardamError) -> None:
        """Ends this client: from now on every call raises this error. The first one stays."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                logger.warning("client %s ends: %s: %s", self.client_id.hex(), error.reason, error.message)

    # -- calls

    def answer(self, request: ShardCall[RequestT, ResponseT]) -> ResponseT:
        """Calls a shard until it answers: what may succeed later is tried again with back-off until shard_timeout_s.

        Raises:
            ShardUnreachable: no answer in that time; for a numbered change the outcome is unknown.
            ShardLost: the shard lost state that this client knows.
            ShardamError: the shard's reason.
        """
        deadline, backoff = Deadline(self.options.shard_timeout_s), Backoff()
        while True:
            self.check()
            incarnation = request.link.incarnation
            try:
                return self._call_once(request, min(deadline.remaining_s, deadline.after_s / TRIES_PER_TIMEOUT))
            except ShardamError as error:
                problem = error
            try:
                self._recover(request.link, problem, incarnation)
            except ShardamError as error:
                if not error.rule.retryable:
                    raise
                problem = error
            backoff.wait(deadline)
            if deadline.passed:
                suffix = f" (tried {backoff.num_waits} times in {deadline.after_s:g} s)"
                raise make_error(problem.reason, problem.message + suffix, problem.metadata)

    def _call_once(self, request: ShardCall[RequestT, ResponseT], timeout_s: float) -> ResponseT:
        link = request.link
        request.message.header.CopyFrom(self._header(link, request.number, timeout_s))
        try:
            return call(request.method(link), request.message, timeout_s=timeout_s, token=self.options.token, peer=link.peer)
        except ValueError:
            self.check()  # gRPC's complaint about a closed channel: another thread has closed this client
            raise

    def _header(self, link: ShardLink, number: int, budget_s: float) -> common_pb2.RequestHeader:
        return common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=self.cluster_id,
            timeline=link.timeline,
            epoch=self.route_map.epoch,
            incarnation=link.incarnation,
            client_id=self.client_id,
            number=number,
            request_id=next(self._request_ids),
            budget_s=budget_s,
        )

    # -- coming back

    def _recover(self, link: ShardLink, error: ShardamError, incarnation: int) -> None:
        """Does what an error asks for before the next try, or raises it if no further try can help."""
        if ends_client(error):
            self.fail(error)
        if not error.rule.retryable:
            raise error
        logger.info("%s: %s, trying again: %s", link.peer, error.reason, error.message)
        match error.reason:
            case "NEW_INCARNATION" | "SEQUENCE_GAP":
                self._open_again(link, incarnation)
            case "STALE_ROUTE":
                self._refresh(link)
            case "SHARD_UNREACHABLE":
                self._refresh(link)

    def _refresh(self, link: ShardLink) -> None:
        """Reads the shard's address and the map's epoch again. Redis may be away: then the known ones stay."""
        try:
            view = read_cluster(self._connection, self._keys)
        except RedisUnreachable as error:
            logger.warning("%s; keeping the known addresses", error)
            return
        if view.entry is not None and view.entry.cluster_id != self.cluster_id:
            lost = WrongCluster(
                f"cluster {self._keys.cluster!r} is another one now (id {view.entry.cluster_id}, this client knows "
                f"{self.cluster_id}); connect again"
            )
            self.fail(lost)
            raise lost
        if view.route_map is not None and view.route_map.epoch > self.route_map.epoch:
            self._adopt_route_map(view.route_map)
        entry = view.shards.get(link.index)
        with link.lock:
            if entry is not None and entry.address != link.address:
                logger.info("%s is now at %s", link.peer, entry.address)
                link.move(entry.address)

    def _adopt_route_map(self, route_map: RouteMap) -> None:
        if route_map.num_shards != self.route_map.num_shards:
            moved = WrongCluster(
                f"the cluster has {route_map.num_shards} shards now, this client knows {self.route_map.num_shards}; connect "
                "again"
            )
            self.fail(moved)
            raise moved
        self.route_map = route_map

    def _open_again(self, link: ShardLink, incarnation: int) -> None:
        with link.lock:
            if link.incarnation != incarnation:
                return  # another thread has opened it meanwhile
            answer = self.open(link, self.options.shard_timeout_s / TRIES_PER_TIMEOUT)
            if link.continues(answer):
                link.adopt(answer)
                return
        lost = link.lost(answer)
        self.fail(lost)
        raise lost

    def open(self, link: ShardLink, timeout_s: float) -> embedding_pb2.OpenResponse:
        """Registers this client on a shard, once; the request fits any incarnation.

        Raises:
            WrongCluster: the process at the address serves another cluster.
            ShardamError: the shard's reason.
        """
        header = common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=self.cluster_id,
            client_id=self.client_id,
            request_id=next(self._request_ids),
            budget_s=timeout_s,
        )
        request = embedding_pb2.OpenRequest(
            header=header, min_protocol_version=MIN_PROTOCOL_VERSION, max_protocol_version=PROTOCOL_VERSION
        )
        answer: embedding_pb2.OpenResponse = call(
            link.embedding.Open, request, timeout_s=timeout_s, token=self.options.token, peer=link.peer
        )
        if answer.cluster_id != self.cluster_id or answer.header.shard != link.index:
            raise WrongCluster(
                f"{link.peer} says it is shard {answer.header.shard} of cluster id {answer.cluster_id}, expected shard "
                f"{link.index} of {self.cluster_id}; two processes may share the address"
            )
        if not MIN_PROTOCOL_VERSION <= answer.protocol_version <= PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{link.peer} wants protocol version {answer.protocol_version}, this client speaks {MIN_PROTOCOL_VERSION} to "
                f"{PROTOCOL_VERSION}; use matching shardam packages"
            )
        return answer

    def given_rows_lease(self, table_id: int, lease_s: float) -> Lock:
        """Returns the lease, not yet taken, of the client that writes a table's given rows."""
        return Lock(self._connection, self._keys.given_rows(table_id), timeout=lease_s, thread_local=False)

    # -- beginning and end

    def start(self, view: ClusterView, deadline: Deadline) -> None:
        """Opens this client on all shards of a ready cluster.

        Raises:
            ShardamError: the first shard's reason; nothing is kept open.
        """
        if view.entry is None or view.route_map is None:
            raise AssertionError("the cluster is not ready")
        self.cluster_id = view.entry.cluster_id
        self.route_map = view.route_map
        self.links = [ShardLink(index, view.shards[index].address) for index in range(view.route_map.num_shards)]
        try:
            for link in self.links:
                link.adopt(self.open(link, max(0.1, deadline.remaining_s / TRIES_PER_TIMEOUT)))
        except BaseException:
            self._close_links()
            raise
        num_shards = len(self.links)
        self.writers = CallThreads(num_shards, "shardam-change")  # all parts of a number leave at once
        self.readers = CallThreads(2 * num_shards, "shardam-read")  # two threads' pulls side by side

    def close(self) -> None:
        """Leaves all shards and closes the channels; later calls raise ClientClosed."""
        with self._lock:
            ended = self._failure is not None
            self._failure = self._failure or ClientClosed("this cluster object is closed; connect again")
        for link in () if ended else self.links:
            request = embedding_pb2.LeaveRequest(header=self._header(link, 0, LEAVE_TIMEOUT_S))
            try:
                call(link.embedding.Leave, request, timeout_s=LEAVE_TIMEOUT_S, token=self.options.token, peer=link.peer)
            except ShardamError as error:
                logger.info("%s could not be told that this client leaves: %s", link.peer, error)
        self.writers.close()
        self.readers.close()
        self._close_links()
        self._connection.close()

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
        self.links = []


def ends_client(error: ShardamError) -> bool:
    """True: after this error the client can neither read nor write any more."""
    return error.rule.code in _FINAL_CODES
