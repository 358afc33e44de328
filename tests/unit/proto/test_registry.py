"""What Redis says of a cluster, and how a failed read is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import Keys, read_cluster


class FailingRedis:
    """A connection whose every read fails."""

    def __init__(self, error: redis.RedisError) -> None:
        self.error = error

    def mget(self, *keys: str | Sequence[str]) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (redis.AuthenticationError("WRONGPASS"), r"refused the credentials \(WRONGPASS\): put the right ones into its URL"),
        (redis.ConnectionError("refused"), r"did not answer \(refused\): check the URL"),
    ],
)
def test_wrong_credentials_and_a_silent_redis_have_remedies_of_their_own(error: redis.RedisError, message: str) -> None:
    with pytest.raises(RedisUnreachable, match=message):
        read_cluster(FailingRedis(error), Keys("c"))  # type: ignore[arg-type]  # as much of Redis as is asked
