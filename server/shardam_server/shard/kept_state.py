"""What a shard keeps on disk, from the lock on its folder to the last write; without a folder, nothing.

Blocking, but for what is asynchronous. All but `lock`, `status` and `close` belongs on the sequencer's thread, where no change
comes between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from shardam_proto.errors import JournalFailed
from shardam_proto.registry import ClusterEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import JournalStatus, RunChange, StateStore
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords

BASE_CHECK_S = 1.0
"""How often a shard without a state of its own looks whether it has one now."""

MEMORY_ONLY = JournalStatus(shard_pb2.JOURNAL_MODE_OFF, shard_pb2.JOURNAL_STATE_OK, "", 0, None)
"""Status of a shard without a folder."""


class KeptState:
    """A shard's state on disk.

    The store is written to only between `begin` or `resume` and the end: a folder whose state this shard may not serve is left
    as it was found.

    Attributes:
        folder: where it lies; None: memory only.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._store: StateStore | None = None
        self._live = False

    @property
    def current(self) -> Current | None:
        """What the folder holds; None: nothing, or there is none."""
        return None if self._store is None else self._store.current

    @property
    def identity(self) -> str:
        """Names the folder whose lock this process holds; empty: there is none."""
        return "" if self._store is None else self._store.identity

    @property
    def kept_change(self) -> int | None:
        """The last change that a killed process comes back with; None: nothing is kept. From any thread."""
        return self._store.kept_change if self._store is not None and self._live else None

    @property
    def live(self) -> bool:
        """True: changes go to disk."""
        return self._live

    def lock(self, data_dir: Path, cluster: str, index: int, options: JournalOptions) -> None:
        """Takes the shard's folder for this process.

        Raises:
            FolderHeld: another process has it, and may come back to it.
            FolderRefused: it cannot be used, or holds another shard.
            JournalDamaged: it cannot be read as it was written.
            VersionMismatch: another version of shardam wrote it.
        """
        self._store = StateStore.lock(data_dir, cluster, index, options)
        self.folder = self._store.path

    def recover(self, state: ShardState, make_records: MakeRecords) -> None:
        """Reads what the folder holds into an empty state.

        Raises:
            JournalDamaged: it cannot be read as it was written.
        """
        if self._store is not None and self._store.current is not None:
            self._store.recover(state, make_records)

    def begin(self, cluster: ClusterEntry, lineage: int, timeline: int, epoch: int, state: ShardState, plan: str = "") -> None:
        """Starts with a state of a new lineage, as StateStore.begin; what the folder held before is given up.

        Raises:
            JournalFailed: the folder cannot be written; it holds what it held.
        """
        if self._store is not None:
            with self._writing():
                self._store.begin(cluster, lineage, timeline, epoch, state, plan)
            self._live = True

    def give_up(self) -> None:
        """Ends keeping a state that another one will replace; the folder holds it until `begin`."""
        if self._store is not None and self._live:
            self._live = False
            self._store.give_up()

    @contextlib.asynccontextmanager
    async def without_base(self) -> AsyncIterator[None]:
        """Waits for a base that is being written, and has none begun meanwhile; on the event loop."""
        if self._store is None:
            yield
            return
        async with self._store.base_turn:
            yield

    def resume(self, state: ShardState) -> None:
        """Goes on with the state that was recovered.

        Raises:
            JournalFailed: the folder cannot be written.
        """
        if self._store is not None:
            with self._writing():
                self._store.resume(state)
            self._live = True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalFailed(
                f"{self.folder} cannot be written ({error}): make room and let this user write there, or use another --data-dir"
            ) from error

    def note_epoch(self, epoch: int) -> None:
        """Remembers the highest epoch of the route map."""
        if self._store is not None and self._live:
            self._store.note_epoch(epoch)

    async def keep_bases(self, run_change: RunChange) -> None:
        """Writes a base whenever the journal has grown enough, or takes changes again after a full disk; on the event loop.

        Args:
            run_change: runs a function between two changes.
        """
        while not self._live or self._store is None:
            await asyncio.sleep(BASE_CHECK_S)
        await self._store.keep_bases(run_change)

    def status(self) -> JournalStatus:
        """Says how the journal does; any thread."""
        return MEMORY_ONLY if self._store is None else self._store.status()

    def close(self) -> None:
        """Brings everything to disk and gives the folder to others; after the sequencer has ended."""
        if self._store is None:
            return
        if self._live:
            self._live = False
            self._store.close()
        else:
            self._store.release()
