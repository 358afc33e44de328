"""What the process does at its start about its state on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shardam_proto.errors import JournalDamaged, RedisUnreachable
from shardam_server.settings import ShardSettings
from shardam_server.shard.context import ShardContext
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.registration import Registration
from shardam_server.shard.state import ShardState

logger = logging.getLogger(__name__)


async def recover(
    shard: ShardContext, settings: ShardSettings, registration: Registration, make_state: Callable[[], ShardState]
) -> None:
    """Takes the shard's folder, if it has one, and reads the state that is in it.

    One that cannot be read is passed over where the cluster goes on from a checkpoint instead: it is of no use any more.

    Args:
        shard: the shard.
        settings: its settings.
        registration: its entries in Redis.
        make_state: makes an empty state.

    Raises:
        FolderHeld: another process has the folder.
        FolderRefused: it cannot be used, or holds another shard.
        JournalDamaged: it cannot be read as it was written.
        VersionMismatch: another version of shardam wrote it.
    """
    if settings.data_dir is None:
        return
    shard.kept.lock(settings.data_dir, settings.cluster, settings.index, JournalOptions.from_settings(settings))
    shard.waiting_for = f"the state in {shard.kept.folder} to be replayed"
    try:
        await shard.sequencer.change(lambda: shard.kept.recover(shard.state, shard.device.make_records))
    except JournalDamaged as error:
        if not await _is_replaced(shard, registration):
            raise
        logger.warning("%s. The cluster goes on from a checkpoint, so that this is not needed", error.message)
        shard.state = make_state()


async def _is_replaced(shard: ShardContext, registration: Registration) -> bool:
    """Whether a plan has the shard load its whole state from a checkpoint, as far as Redis says now."""
    current = shard.kept.current
    try:
        shared = await asyncio.to_thread(registration.read_shared)
    except RedisUnreachable:
        return False
    plan = shared.plan
    if current is None or plan is None or plan.keep or not plan.is_ahead_of(current.timeline, current.epoch):
        return False
    same = shared.cluster is not None and shared.cluster.cluster_id == current.cluster.cluster_id
    return same and shared.lineages.get(shard.identity.index) in (None, current.lineage)
