"""Reads that see this client's own changes.

A change that is under way is not waited for before the read leaves: the read follows it on the shards' streams and is carried
out after it (PROTOCOL.md, section 3), which saves the way of the change's answer. What each shard answers says up to which
number it has closed this client's changes; a read that came too early, because a stream broke in between, is made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardam._arrays import Float32s
from shardam._pull_plan import Wanted
from shardam._reads import Versions, read_changed, read_weights
from shardam._session import Session
from shardam.cluster import Cluster
from shardam_proto.errors import ShardamError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def read_own_weights(cluster: Cluster, wanted: Wanted, *, training: bool) -> list[Float32s]:
    """Reads weights as read_weights does, after every change that this client has queued; returns once these have ended.

    Raises:
        ShardamError: as read_weights; or an earlier queued change failed.
    """
    return _read_own(cluster, training, lambda session, behind: read_weights(session, wanted, training=training, behind=behind))


def read_own_changed(cluster: Cluster, wanted: Wanted, versions: Versions, rows: Sequence[Float32s], *, training: bool) -> int:
    """Brings rows up to date as read_changed does, after every change that this client has queued.

    Raises:
        ShardamError: as read_own_weights.
    """
    return _read_own(
        cluster,
        training,
        lambda session, behind: read_changed(session, wanted, versions, rows, training=training, behind=behind),
    )


def _read_own(cluster: Cluster, training: bool, read: Callable[[Session, int], T]) -> T:
    """Runs a read behind the changes that are under way, or else once these have ended.

    Args:
        cluster: the cluster.
        training: as for Cluster._ready_to_read.
        read: reads from a client what a change of it, given by its number, is in; it may be run twice.
    """
    number = cluster._pusher.last_on_its_way()
    if number:
        try:
            result = read(cluster._session, number)
        except ShardamError as error:  # it may be due to the change, whose own error comes first
            logger.debug("a read behind change %d is made again once that has ended: %s", number, error)
        else:
            cluster._ready_to_read(training=training)
            return result
    return read(cluster._ready_to_read(training=training), 0)
