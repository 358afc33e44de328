"""A failed call to Redis in words: a server that refuses the credentials runs, and needs another remedy."""

from __future__ import annotations

import redis

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import display_url

START_OR_NAME = "start it, or name another with --redis"
"""What to do about a Redis that does not answer."""


def redis_unreachable(url: str, error: redis.RedisError) -> RedisUnreachable:
    """Returns the error for a call that failed.

    Args:
        url: Redis URL; shown without its password.
        error: why the call failed.
    """
    where = f"Redis at {display_url(url)}"
    if isinstance(error, redis.AuthenticationError):
        return RedisUnreachable(
            f"{where} refused the credentials ({error}): put the right ones into its URL, redis://[user]:password@host:port/db "
            "(--redis or SHARDAM_REDIS_URL)"
        )
    return RedisUnreachable(f"{where} does not answer ({error}): {START_OR_NAME}")
