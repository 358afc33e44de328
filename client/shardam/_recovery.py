"""What a client does between two tries of a call: find the shard again, open itself there again, or end.

PROTOCOL.md, sections 4 and 6.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from shardam._link import ShardLink
from shardam._moving import is_reason_to_wait, move, restored
from shardam._shards import open_client
from shardam_proto.errors import RedisUnreachable, ShardamError, ShardNotReady, ShardUnreachable, WrongCluster
from shardam_proto.registry import read_cluster

if TYPE_CHECKING:
    from shardam._session import Session

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prospect:
    """What the next try of a call may come to.

    Attributes:
        problem: the problem as it stands now, should no further try help.
        hurry: another process serves the shard than the one that the call was meant for: the next try need not wait.
        patient: the cluster is on its way to other shards: the time until now does not count.
    """

    problem: ShardamError
    hurry: bool = False
    patient: bool = False


def recover(session: Session, link: ShardLink, error: ShardamError, incarnation: int) -> Prospect:
    """Does what an error asks for before the next try; called once a try, so Redis is asked no more often than there are waits.

    Args:
        session: the client.
        link: the shard.
        error: what a call to it came to.
        incarnation: the incarnation that the call was meant for.

    Raises:
        ShardamError: no further try can help; if it ends the client, the client has ended.
    """
    logger.debug("%s: %s: %s", link.peer, error.reason, error.message)
    if link.epoch != session.shards.epoch:
        return Prospect(error, hurry=True)  # another thread has moved the client meanwhile
    match error.reason:
        case "NEW_INCARNATION" | "SEQUENCE_GAP":
            return _reopen(session, link, error, incarnation)
        case "STALE_ROUTE" | "SHARD_UNREACHABLE" | "NOT_READY":  # one that is not ready may have been replaced, and not know it
            return _refresh(session, link, error, incarnation)
        case "WRONG_CLUSTER":
            return _stranger(session, link, error, incarnation)
    return Prospect(_if_retryable(session, link, error))


def _if_retryable(session: Session, link: ShardLink, error: ShardamError) -> ShardamError:
    """Returns an error that may pass; ends the client after one that ends it."""
    if session.is_ended_by(error):
        error = session.end_of(link, error)
    if not error.rule.retryable:
        raise error
    return error


def _reopen(session: Session, link: ShardLink, error: ShardamError, incarnation: int) -> Prospect:
    """Opens the client again where the shard has been restarted, or has not the numbers that it should have.

    Raises:
        ShardLost: what this client knows to be applied is not there.
    """
    with link.lock:
        if link.incarnation != incarnation:
            return Prospect(error, hurry=True)  # another thread has opened it meanwhile
        try:
            answer = open_client(session, link, session.try_s)
        except WrongCluster as problem:
            stranger: ShardamError = problem
        except ShardamError as problem:
            return Prospect(_if_retryable(session, link, problem))
        else:
            if answer.header.epoch > link.epoch:
                stranger = ShardNotReady(f"{link.peer} is a shard of route epoch {answer.header.epoch} now")
            elif answer.header.epoch < link.epoch:
                stranger = ShardNotReady(f"{link.peer} still has route epoch {answer.header.epoch}, not {link.epoch}")
            elif answer.header.timeline > link.timeline:
                raise session.end_with(restored(link, answer.header.timeline))
            elif link.continues(answer):
                logger.info("%s has come back as incarnation %d", link.peer, answer.header.incarnation)
                link.adopt(answer)
                return Prospect(error, hurry=link.incarnation != incarnation)
            else:
                raise session.end_with(link.lost(answer))
    return _stranger(session, link, stranger, incarnation)


def _stranger(session: Session, link: ShardLink, error: ShardamError, incarnation: int) -> Prospect:
    """Looks for the shard elsewhere when another process has its address. The right one may register at any moment."""
    problem = ShardUnreachable(f"not the shard that is meant: {error.message}", metadata=error.metadata)
    return _refresh(session, link, problem, incarnation)


def _refresh(session: Session, link: ShardLink, error: ShardamError, incarnation: int) -> Prospect:
    """Reads the shard's address and the route map again. Redis may be away: then the known ones stay.

    The next try is in a hurry if the shard is ready, elsewhere or as another process than the one that was called.

    Raises:
        WrongCluster: the name belongs to another cluster now; the client has ended.
        ShardamError: as move.
    """
    try:
        view = read_cluster(session.redis, session.keys)
    except RedisUnreachable as problem:
        logger.log(logging.DEBUG if session.redis_is_away else logging.WARNING, "%s; keeping the known addresses", problem)
        session.redis_is_away = True
        return Prospect(_if_retryable(session, link, error), patient=is_reason_to_wait(session, error))
    session.redis_is_away = False
    if view.entry is not None and view.entry.cluster_id != session.cluster_id:
        raise session.end_with(
            WrongCluster(
                f"cluster {session.keys.cluster!r} is another one now (id {view.entry.cluster_id}, this client knows "
                f"{session.cluster_id}); connect again"
            )
        )
    if view.route_map is not None and view.route_map.epoch > link.epoch:
        patient = session.moving.note()
        missing = move(session, view, view.route_map)
        return Prospect(missing or error, hurry=missing is None, patient=patient)
    patient = is_reason_to_wait(session, error)
    entry = view.shards.get(link.index)
    if entry is None:
        return Prospect(_if_retryable(session, link, error), patient=patient)
    moved = link.follow(entry)
    hurry = entry.ready and (moved or entry.incarnation != incarnation)
    return Prospect(_if_retryable(session, link, error), hurry, patient)
