"""Where the other shards are, as Redis said last: it may be away while clients are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shardam_proto.errors import RedisUnreachable, ShardNotReady
from shardam_proto.registry import ClusterView, ShardEntry


class PeerDirectory:
    """The last known entries of other shards. Used on the event loop.

    Args:
        read: reads the cluster from Redis; blocking.
    """

    def __init__(self, read: Callable[[], ClusterView]) -> None:
        self._read = read
        self._entries: dict[int, ShardEntry] = {}

    async def refresh(self) -> None:
        """Reads the entries again; those that are missing, or all while Redis is away, stay as they were."""
        try:
            view = await asyncio.to_thread(self._read)
        except RedisUnreachable:
            return  # the renewal of the shard's name has logged it
        self._entries.update(view.shards)

    def entry(self, index: int) -> ShardEntry:
        """Returns a shard's entry.

        Raises:
            ShardNotReady: it has not been registered since this process started.
        """
        entry = self._entries.get(index)
        if entry is None:
            raise ShardNotReady(f"shard {index} is not registered; start it", metadata={"shard": str(index)})
        return entry
