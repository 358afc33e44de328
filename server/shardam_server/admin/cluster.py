"""The admin API's view of the cluster: read from Redis at most once a second, kept when Redis is gone.

Says who is registered where; whether a shard answers is shard_calls.py's to find out.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from shardam_proto.errors import RedisUnreachable, ShardNotReady
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.routing import RouteMap

logger = logging.getLogger(__name__)

MAX_AGE_S = 1.0
"""A view older than this is read again, so that Redis gets one read a second whatever the number of requests."""


@dataclasses.dataclass(frozen=True)
class Formed:
    """A cluster that can route rows.

    Attributes:
        entry: the cluster.
        route_map: bucket to shard.
        shards: registered shards by index; some may be missing.
    """

    entry: ClusterEntry
    route_map: RouteMap
    shards: dict[int, ShardEntry]


class ClusterReader:
    """Keeps the last view and reads it again when it is old.

    Args:
        read: reads the view; raises RedisUnreachable.
        cluster: the cluster's name, for messages.
        clock: monotonic seconds.
    """

    def __init__(self, read: Callable[[], ClusterView], cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.cluster = cluster
        self._read = read
        self._clock = clock
        self._reading = threading.Lock()
        self._view: ClusterView | None = None
        self._error: RedisUnreachable | None = None
        self._read_at = -MAX_AGE_S

    @property
    def redis_error(self) -> RedisUnreachable | None:
        """Why the last read failed, or None if it succeeded."""
        return self._error

    def view(self) -> ClusterView:
        """Returns a view that is at most about a second old, or the last known one while Redis does not answer.

        Raises:
            RedisUnreachable: Redis has not answered once since this process started.
        """
        if self._clock() - self._read_at < MAX_AGE_S:
            return self._last_known()
        # While another thread reads, the last known view will do; a stopped Redis then holds up one request, not all.
        if not self._reading.acquire(blocking=self._view is None):
            return self._last_known()
        try:
            if self._clock() - self._read_at >= MAX_AGE_S:
                self._read_now()
        finally:
            self._reading.release()
        return self._last_known()

    def refresh(self, since: float) -> ClusterView:
        """Returns a view read after `since` (a time of `clock`), as after a failed call.

        Raises:
            RedisUnreachable: Redis has not answered once since this process started.
        """
        with self._reading:
            if self._read_at < since:
                self._read_now()
        return self._last_known()

    def formed(self) -> Formed:
        """Returns the view of a cluster that has a route map.

        Raises:
            RedisUnreachable: as `view`.
            ShardNotReady: the cluster has not formed yet; the message says what is missing.
        """
        return self.require_formed(self.view())

    def require_formed(self, view: ClusterView) -> Formed:
        """Checks that a view has a route map.

        Raises:
            ShardNotReady: it has none; the message says what is missing.
        """
        if view.entry is None or view.route_map is None:
            raise ShardNotReady(
                f"cluster {self.cluster!r} is not formed yet: {'; '.join(waiting_for(view, self.cluster))}",
                metadata={"cluster": self.cluster},
            )
        return Formed(view.entry, view.route_map, view.shards)

    def now(self) -> float:
        """The time of this reader's clock."""
        return self._clock()

    def _last_known(self) -> ClusterView:
        view = self._view
        if view is None:
            assert self._error is not None  # only a failed read leaves no view
            raise self._error
        return view

    def _read_now(self) -> None:
        try:
            view = self._read()
        except RedisUnreachable as error:
            if self._error is None:
                logger.warning("%s; the last known view of the cluster stays in use", error.message)
            self._error = error
        else:
            if self._error is not None:
                logger.info("Redis answers again")
            for change in describe_changes(self._view, view):
                logger.info("cluster %s: %s", self.cluster, change)
            self._error = None
            self._view = view
        self._read_at = self._clock()  # after the read: one that timed out is not tried again at once


def waiting_for(view: ClusterView, cluster: str) -> list[str]:
    """Says what a cluster still needs before all of it can serve, as far as Redis knows; empty if nothing."""
    if view.entry is None:
        return [
            f"no shard of cluster {cluster!r} has registered; start `shardam up`, or `shardam shard` with --cluster {cluster}"
        ]
    missing = [index for index in range(view.entry.num_shards) if index not in view.shards]
    needs = [f"shard {index} is not registered" for index in missing]
    needs += [f"shard {index} is registered but not ready" for index, shard in sorted(view.shards.items()) if not shard.ready]
    if view.route_map is None and not needs:
        needs.append("the route map is not made yet")
    return needs


def describe_changes(old: ClusterView | None, new: ClusterView) -> list[str]:
    """Says in words what differs between two views, for the log."""
    changes = []
    old_entry = old.entry if old else None
    if new.entry != old_entry:
        changes.append("not created yet" if new.entry is None else f"id {new.entry.cluster_id}, {new.entry.num_shards} shards")
    old_map = old.route_map if old else None
    if new.route_map is not None and new.route_map != old_map:
        changes.append(f"route map with epoch {new.route_map.epoch}")
    old_shards = old.shards if old else {}
    for index in sorted(old_shards.keys() | new.shards.keys()):
        before, after = old_shards.get(index), new.shards.get(index)
        if before == after:
            continue
        if after is None:
            changes.append(f"shard {index} is no longer registered")
        else:
            state = "ready" if after.ready else "not ready"
            changes.append(f"shard {index} is {state} at {after.address}, incarnation {after.incarnation}")
    return changes
