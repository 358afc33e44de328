"""What the process does about its state on disk besides journaling: recover it at the start, write bases while it runs."""

from __future__ import annotations

import asyncio

from shardam_server.settings import ShardSettings
from shardam_server.shard.context import ShardContext
from shardam_server.shard.journal.options import JournalOptions

LOOK_S = 1.0
"""How often a shard that keeps nothing, or is LOST, looks whether it keeps its state by now; its first base is far off then."""


async def recover(shard: ShardContext, settings: ShardSettings) -> None:
    """Takes the shard's folder, if it has one, and reads the state that is in it.

    Raises:
        FolderHeld: another process has the folder.
        FolderRefused, JournalDamaged, VersionMismatch: it cannot be read as it was written.
    """
    if settings.data_dir is None:
        return
    shard.kept.lock(settings.data_dir, settings.cluster, settings.index, JournalOptions.from_settings(settings))
    shard.waiting_for = f"the state in {shard.kept.folder} to be replayed"
    await shard.sequencer.change(lambda: shard.kept.recover(shard.state, shard.device.make_records))


async def keep_bases(shard: ShardContext) -> None:
    """Has the store write a base whenever one is due, until it is cancelled; what it cannot do shows in the status."""
    while not shard.kept.live:
        await asyncio.sleep(LOOK_S)
    await shard.kept.keep_bases(shard.sequencer.change)
