"""Folders of shards that the cluster has no more, because it has moved to fewer."""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
from pathlib import Path

from shardam_proto.errors import ShardamError
from shardam_proto.routing import RouteMap
from shardam_server.shard.journal.file_names import CURRENT, LOCK, read_current

logger = logging.getLogger(__name__)

_SHARD_FOLDER = re.compile(r"shard-(\d{1,4})")


def remove_left_folders(data_dir: Path, cluster_name: str, cluster_id: str, route_map: RouteMap) -> list[Path]:
    """Removes folders whose rows other shards have taken over, once those serve. Blocking.

    What cannot be read, is held by a process, belongs to another cluster, or is not from before the map stays.

    Args:
        data_dir: the data folder.
        cluster_name: name of the cluster.
        cluster_id: its id.
        route_map: its map.

    Returns:
        What was removed.
    """
    removed = []
    for folder in sorted((data_dir / cluster_name).glob("shard-*")):
        match = _SHARD_FOLDER.fullmatch(folder.name)
        if match is None or int(match[1]) < route_map.num_shards:
            continue
        try:
            if _remove(folder, cluster_id, route_map.epoch):
                logger.info("%s is gone: its rows have moved to %d shards", folder, route_map.num_shards)
                removed.append(folder)
        except (OSError, ShardamError) as error:
            logger.warning("%s is not needed any more, and could not be removed: %s", folder, error)
    return removed


def _remove(folder: Path, cluster_id: str, epoch: int) -> bool:
    """Removes a folder that is from before an epoch and that nobody holds; CURRENT goes first: a crash leaves no state."""
    current = read_current(folder)
    if current is None or current.cluster.cluster_id != cluster_id or current.epoch >= epoch:
        return False
    with (folder / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        (folder / CURRENT).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return True
