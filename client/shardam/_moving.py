"""Going on with a cluster that has been moved to another number of shards (PROTOCOL.md, section 8).

The shards of the new route map know this client and its numbers as of the cut: it opens itself on all of them, and what is not
closed there is split anew. Until all of them serve, waiting for them is no fault of theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from shardam._link import ShardLink
from shardam._shards import Shards, open_client
from shardam_proto.errors import ClusterRestored, ShardamError, ShardNotReady
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import checkpoint_pb2, common_pb2, job_pb2

if TYPE_CHECKING:
    from shardam._session import Session

logger = logging.getLogger(__name__)

RESHARD_TIMEOUTS = 10
"""A move may take so many times shard_timeout_s: it writes and reads all rows, where other calls wait for one answer."""

ASK_S = 1.0
"""Home is asked this often whether it moves the cluster, and has so long to answer: it is asked only where a shard has been
silent for far longer."""

_GOES_ON = frozenset({job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_RUNNING})

RESHARDING = "resharding"
"""Metadata key of what a shard answers while the cluster is moved to other shards."""


class Moving:
    """How long this client has seen the cluster on its way to other shards. Thread-safe.

    Args:
        shard_timeout_s: a pause between two signs that is longer ends the move, whatever became of it.

    Attributes:
        seen_at: time.monotonic() of the last sign that counts; time before it is nobody's fault.
    """

    def __init__(self, shard_timeout_s: float) -> None:
        self.seen_at = 0.0
        self._timeout_s = shard_timeout_s
        self._since = self._last = self._asked = -float("inf")
        self._lock = threading.Lock()

    def note(self) -> bool:
        """Notes a sign; returns whether it is a reason to be patient: not once the move has taken too long."""
        with self._lock:
            now = time.monotonic()
            if now - self._last > self._timeout_s:
                logger.info("the cluster is moved to other shards; waiting for them")
                self._since = now
            self._last = now
            patient = now - self._since <= RESHARD_TIMEOUTS * self._timeout_s
            if patient:
                self.seen_at = now
            return patient

    def may_ask(self) -> bool:
        """Says, once in ASK_S, that it is time to ask home whether the cluster is moved."""
        with self._lock:
            now = time.monotonic()
            due = now - self._asked >= ASK_S
            if due:
                self._asked = now
            return due


def is_reason_to_wait(session: Session, error: ShardamError) -> bool:
    """True: what a shard answered, or did not, comes of a move of the cluster to other shards that has not taken too long.

    Until it is decided shards hold changes back and say nothing, so that home is asked about a silent one.
    """
    if RESHARDING not in error.metadata and not (error.reason == "SHARD_UNREACHABLE" and _home_moves(session)):
        return False
    return session.moving.note()


def _home_moves(session: Session) -> bool:
    if not session.moving.may_ask():
        return False
    home = session.links[0]
    header = common_pb2.RequestHeader(protocol_version=PROTOCOL_VERSION, cluster_id=session.cluster_id)
    try:
        answer = home.call(
            lambda link: link.checkpoints.ListJobs, checkpoint_pb2.ListJobsRequest(header=header), min(session.try_s, ASK_S)
        )
    except ShardamError as error:
        logger.debug("home does not say whether it moves the cluster: %s", error)
        return False
    return any(job.kind == job_pb2.JOB_KIND_RESHARD and job.state in _GOES_ON for job in answer.jobs)


def move(session: Session, view: ClusterView, route_map: RouteMap) -> ShardamError | None:
    """Goes on with the shards of a newer route map, if all of them serve; one thread at a time.

    Returns:
        What is missing yet, or None: the client has moved.

    Raises:
        ShardLost: the new shards lack what the former ones had acknowledged; the client has ended.
        ClusterRestored: the cluster was restored meanwhile; the client has ended.
    """
    if not session.move_lock.acquire(blocking=False):
        return ShardNotReady(f"the cluster is moved to {route_map.num_shards} shards; another thread opens this client there")
    try:
        if route_map.epoch <= session.route_map.epoch:
            return None
        absent = [index for index in range(route_map.num_shards) if index not in view.shards or not view.shards[index].ready]
        if absent:
            return ShardNotReady(
                f"the cluster is moved to {route_map.num_shards} shards, and of these shards {', '.join(map(str, absent))} are "
                "not ready yet"
            )
        entries = [view.shards[index] for index in range(route_map.num_shards)]
        links = tuple(ShardLink(entry, session.options.token, route_map.epoch) for entry in entries)
        try:
            with session.opening(links):
                last_number = _open_on_all(session, links)
                session.move_to(Shards(route_map, links), last_number)
        except ShardamError as error:
            for link in links:
                link.close(error)
            if session.ended:
                raise
            return error
        return None
    finally:
        session.move_lock.release()


def _open_on_all(session: Session, links: tuple[ShardLink, ...]) -> int:
    """Opens the client on the new shards; returns its last number there."""
    former = session.shards
    closed = max(link.closed for link in former.links)
    answers = []
    for link in links:
        try:
            answer = open_client(session, link, session.try_s)
        except ShardamError as error:
            if session.is_ended_by(error):
                raise session.end_of(link, error) from None
            raise
        session.moving.note()
        if answer.header.timeline > former.links[0].timeline:
            raise session.end_with(restored(link, answer.header.timeline))
        if answer.header.epoch != link.epoch:
            raise ShardNotReady(f"{link.peer} still has route epoch {answer.header.epoch}, not {link.epoch}")
        link.adopt(answer)
        answers.append(answer)
    last_number = min(answer.header.last_number for answer in answers)
    for link, answer in zip(links, answers, strict=True):
        link.acknowledged = link.closed = max(closed, last_number)
        if answer.header.last_number != last_number or not link.continues(answer):
            raise session.end_with(link.lost(answer))
    return last_number


def restored(link: ShardLink, timeline: int) -> ClusterRestored:
    """Returns what ends a client of a former timeline."""
    return ClusterRestored(
        f"{link.peer} is on timeline {timeline}: the cluster was restored from a checkpoint; connect again, and train on from "
        "what that reads"
    )
