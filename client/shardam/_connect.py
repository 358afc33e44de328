"""connect: from what a program says to an open client."""

from __future__ import annotations

import math
import os

from shardam._discovery import open_session
from shardam._group import GroupRequest, group_options
from shardam._session_options import SessionOptions
from shardam.cluster import TOKEN_VARIABLE, Cluster
from shardam_proto.errors import BadOption
from shardam_proto.schema import check_name

URL_VARIABLE = "SHARDAM_REDIS_URL"


def connect(
    url: str | None = None,
    *,
    cluster: str = "default",
    token: str | None = None,
    mode: str = "async",
    group: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    reduce: str = "mean",
    shard_timeout_s: float = 60.0,
) -> Cluster:
    """Connects to a cluster; waits until its map is made and all its shards are ready.

    In sync and bounded mode the workers of a group count their steps together, and each says its rank and their number; under
    torchrun that, and how often the worker was restarted (TORCHELASTIC_RESTART_COUNT), comes from the environment. A group
    begins once all ranks are there. A worker that joins later takes part from the next step on.

    Args:
        url: the cluster's Redis, redis://[:password@]host:port/db; None: $SHARDAM_REDIS_URL.
        cluster: the cluster's name.
        token: the cluster's token; None: $SHARDAM_TOKEN, if set.
        mode: "async": every push is applied on arrival. "sync": the gradients of all members are merged and applied once, on
            all shards or on none, and a training pull sees every step before. "bounded:N": as async, and a training pull waits
            while any member is more than N steps behind.
        group: the group's name; None: "workers".
        rank: this worker's, 0 to world_size - 1; None: $RANK.
        world_size: number of ranks; None: $WORLD_SIZE.
        reduce: sync: "mean" divides the sum of the members' gradients by their number, "sum" does not.
        shard_timeout_s: how long to wait for the cluster, and later for a shard's answer to one call. Waiting for other members
            of the group does not count.

    Raises:
        BadOption: no URL, an unknown mode, a rank or world size that is missing or wrong, an argument of groups in async, or a
            time-out that is not a number > 0; nothing was sent.
        RedisUnreachable: no Redis at the URL within shard_timeout_s.
        ShardNotReady: the cluster was not ready in that time; the message says what was missing.
        ShardUnreachable: a registered shard did not answer.
        BadToken: the token is missing or wrong.
        GroupMismatch: the rank is taken by a live worker, or the members have agreed on something else.
    """
    redis_url = url or os.environ.get(URL_VARIABLE)
    if not redis_url:
        raise BadOption(
            f"no Redis URL: pass url= to shardam.connect or set {URL_VARIABLE} (shardam up prints it); "
            "shardam.LocalCluster() starts a cluster of its own"
        )
    options = group_options(GroupRequest(mode, group, rank, world_size, reduce), os.environ)
    if isinstance(shard_timeout_s, bool) or not isinstance(shard_timeout_s, (int, float)) or not 0 < shard_timeout_s < math.inf:
        raise BadOption(f"shard_timeout_s must be a finite number of seconds > 0, got {shard_timeout_s!r}")
    check_name(cluster, "cluster name")
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    return Cluster(open_session(SessionOptions(redis_url, cluster, token, float(shard_timeout_s), options)))
