"""The way of a command to the shards of a running cluster: Redis says where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from shardam_proto.registry import Keys, connect_redis, read_cluster
from shardam_server.admin.cluster import ClusterReader
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.command_errors import CommandError
from shardam_server.settings import MemberSettings

HOME = 0
"""Index of the shard that makes checkpoints and runs jobs."""

REQUEST_ID = 0
"""A command has no request id of its own: none."""


@contextlib.contextmanager
def open_calls(settings: MemberSettings, shard_timeout_s: float) -> Iterator[ShardCalls]:
    """Opens the way to the shards, for the time of a command.

    Args:
        settings: where Redis is, which cluster, which token.
        shard_timeout_s: deadline of a call.

    Raises:
        RedisUnreachable: Redis does not answer.
        CommandError: there is no such cluster, or Redis holds something else under its keys.
    """
    connection = connect_redis(settings.redis, settings.redis_timeout_s)
    keys = Keys(settings.cluster)
    reader = ClusterReader(lambda: read_cluster(connection, keys), settings.cluster)
    calls = ShardCalls(reader, settings.plain_token, shard_timeout_s, token_refused=None)
    try:
        _check_cluster(connection, keys)
        yield calls
    finally:
        calls.close()
        connection.close()


def _check_cluster(connection: redis.Redis, keys: Keys) -> None:
    try:
        entry = read_cluster(connection, keys).entry
    except ValueError as error:
        raise CommandError(f"cluster {keys.cluster!r} in Redis cannot be read: {error}") from error
    if entry is None:
        raise CommandError(f"cluster {keys.cluster!r} does not exist in this Redis: name another with --cluster")
