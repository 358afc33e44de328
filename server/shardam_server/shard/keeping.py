"""What the process does at its start about its state on disk."""

from __future__ import annotations

from shardam_server.settings import ShardSettings
from shardam_server.shard.context import ShardContext
from shardam_server.shard.journal.options import JournalOptions


async def recover(shard: ShardContext, settings: ShardSettings) -> None:
    """Takes the shard's folder, if it has one, and reads the state that is in it.

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
    await shard.sequencer.change(lambda: shard.kept.recover(shard.state, shard.device.make_records))
