"""What the process does about its state on disk besides journaling: recover it at the start, write bases while it runs."""

from __future__ import annotations

import asyncio
import logging

from shardam_proto.errors import ShardamError
from shardam_server.settings import ShardSettings
from shardam_server.shard.context import ShardContext
from shardam_server.shard.journal.store import StoreOptions

logger = logging.getLogger(__name__)

BASE_CHECK_S = 1.0
"""How often the store is asked whether a base is due; a journal grows by less than its limit in that time."""


async def recover(shard: ShardContext, settings: ShardSettings) -> None:
    """Takes the shard's folder, if it has one, and reads the state that is in it.

    Raises:
        FolderHeld: another process has the folder.
        JournalDamaged: it cannot be read as it was written.
    """
    if settings.data_dir is None:
        return
    options = StoreOptions(
        mode=settings.journal_mode,
        on_full=settings.on_journal_full,
        limit_bytes=settings.journal_limit_mib * 2**20,
        truncate=settings.truncate_journal,
    )
    shard.kept.lock(settings.data_dir, settings.cluster, settings.index, options)
    shard.waiting_for = f"the state in {shard.kept.folder} to be replayed"
    await shard.sequencer.change(lambda: shard.kept.recover(shard.state, shard.device.make_records))


async def keep_bases(shard: ShardContext) -> None:
    """Has the store write a base whenever one is due, for ever; what it cannot do shows in the status."""
    problem = ""
    while True:
        await asyncio.sleep(BASE_CHECK_S)
        try:
            await shard.sequencer.change(lambda: shard.kept.write_base_if_due(shard.state))
            problem = ""
        except ShardamError as error:
            if error.message != problem:
                logger.error("cannot write a base: %s", error.message)
            problem = error.message
