"""Finding a cluster through Redis: waits until its map is made and all its shards are ready, and says what is missing."""

from __future__ import annotations

import logging

import redis

from shardam._backoff import Backoff, Deadline
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam_proto.channels import check_token
from shardam_proto.errors import RedisUnreachable, ShardamError, ShardLost, ShardNotReady
from shardam_proto.registry import ClusterView, Keys, connect_redis, display_url, lost_shard_problem, read_cluster

logger = logging.getLogger(__name__)


def wait_for_cluster(connection: redis.Redis, keys: Keys, where: str, deadline: Deadline) -> ClusterView:
    """Returns the cluster once every shard of its map is registered and ready.

    Args:
        connection: the cluster's Redis.
        keys: the cluster's keys.
        where: the Redis URL without its password, for messages.
        deadline: until when to wait.

    Raises:
        RedisUnreachable: Redis did not answer until the deadline.
        ShardLost: a shard lacks the rows that the cluster knows it had; the message names the remedy.
        ShardNotReady: the message says what was missing at the deadline.
    """
    backoff = Backoff()
    while True:
        missing: ShardamError
        try:
            view = read_cluster(connection, keys)
        except RedisUnreachable as error:
            missing = RedisUnreachable(
                f"no cluster was found at {where} within {deadline.after_s:g} s: {error.message} (shardam up starts one and "
                "prints its URL)"
            )
        else:
            for index, shard in view.shards.items():
                if shard.lost:  # waiting brings nothing back
                    raise ShardLost(lost_shard_problem(index), metadata={"shard": str(index)})
            absent = describe_missing(view, keys.cluster)
            if absent is None:
                return view
            missing = ShardNotReady(
                f"cluster {keys.cluster!r} at {where} is not ready after {deadline.after_s:g} s: {absent}",
                metadata={"cluster": keys.cluster},
            )
        if deadline.passed:
            raise missing
        backoff.wait(deadline)


def describe_missing(view: ClusterView, cluster: str) -> str | None:
    """Returns what keeps a cluster from serving, or None if nothing does."""
    if view.entry is None:
        return f"Redis knows no cluster of this name; start it with shardam up --cluster {cluster}, or pass cluster="
    absent = [index for index in range(view.entry.num_shards) if index not in view.shards]
    if absent:
        return f"of {view.entry.num_shards} shards these are not registered: {_listed(absent)}"
    if view.route_map is None:
        return "all shards are registered, the route map is not made yet"
    waiting = [index for index, shard in sorted(view.shards.items()) if not shard.ready]
    if waiting:
        return f"these shards are registered but not ready: {_listed(waiting)}"
    return None


def _listed(indexes: list[int]) -> str:
    shown = ", ".join(str(index) for index in indexes[:8])
    return f"{shown}, ... ({len(indexes)} in all)" if len(indexes) > 8 else shown


def open_session(options: SessionOptions) -> Session:
    """Waits for a cluster, opens a new client on all of its shards, and joins the group that the options name.

    Raises:
        BadOption: the cluster's name is outside the alphabet.
        BadToken: the token is none that any shard could have, and nothing was asked; or a shard refused it.
        RedisUnreachable: no Redis at the URL.
        ShardNotReady: the cluster was not ready within shard_timeout_s; the message says what was missing.
        ShardUnreachable: a shard did not answer in that time.
        GroupMismatch: the rank is taken by a live worker, or the members have agreed on something else.
    """
    if options.token is not None:
        check_token(options.token)
    deadline, backoff = Deadline(options.shard_timeout_s), Backoff()
    keys = Keys(options.cluster)
    connection = connect_redis(options.redis_url)
    try:
        while True:
            view = wait_for_cluster(connection, keys, display_url(options.redis_url), deadline)
            session = Session(options, connection, keys)
            try:
                session.start(view, deadline)
            except ShardamError as error:
                if not error.rule.retryable or deadline.passed:
                    raise
                logger.info("trying again to connect: %s", error)
            else:
                break
            backoff.wait(deadline)
        try:
            session.join(Deadline(options.shard_timeout_s))  # a rank whose holder is gone takes a lease to get free
        except BaseException:
            session.close()
            raise
        return session
    except BaseException:
        connection.close()
        raise
