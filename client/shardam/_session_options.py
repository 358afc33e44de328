"""How a client is to reach its cluster."""

from __future__ import annotations

import dataclasses

from shardam._chunk_setting import chunk_bytes
from shardam._group import GroupOptions
from shardam._timings import Timings


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How to reach a cluster.

    Raises:
        BadOption: as chunk_bytes.

    Attributes:
        redis_url: URL of the cluster's Redis.
        cluster: the cluster's name.
        token: its token, or None.
        shard_timeout_s: how long a call is tried before it fails.
        group: the client's place in a group; None: async.
        chunk_bytes: bytes of ids and rows in one message, both ways.
        timings: where its times are counted, from one client to the next that takes its place.
    """

    redis_url: str
    cluster: str
    token: str | None
    shard_timeout_s: float
    group: GroupOptions | None = None
    chunk_bytes: int = dataclasses.field(default_factory=chunk_bytes)
    timings: Timings = dataclasses.field(default_factory=Timings, compare=False, repr=False)
