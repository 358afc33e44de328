"""A shard's state on its disk: the process's only way to journal and base (PROTOCOL.md, sections 7 and 9).

    store = StateStore.lock(data_dir, cluster, index, JournalOptions.from_settings(settings))
    if store.current is None: store.begin(entry, lineage, timeline, epoch, state)
    else: store.recover(state, make_records); store.resume(state)
    keeping = create_task(store.keep_bases(sequencer.change))
    ...; keeping.cancel(); sequencer.close(); store.close()

`begin` and `resume` put the journal into the state; `give_up` ends it, and `begin` may follow once more. Nothing but LOCK is
written before one of them, so that a process may look at a folder, learn that it must not go on from it, and leave it as it
was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from shardam_proto.registry import ClusterEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.journal.base_file import write_base
from shardam_server.shard.journal.base_writer import CHECK_S, BaseCopy, BaseReport, BaseWriter
from shardam_server.shard.journal.current import UNFINISHED, Current
from shardam_server.shard.journal.disk_journal import DiskJournal
from shardam_server.shard.journal.file_names import CURRENT, base_name, list_journal_files, read_current, shard_folder
from shardam_server.shard.journal.folder import ShardFolder
from shardam_server.shard.journal.folder_lock import FolderLock, FolderRefused
from shardam_server.shard.journal.frames import FileDamaged
from shardam_server.shard.journal.journal_file import CutBackFailed, JournalFile
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.reader import holds_nothing
from shardam_server.shard.journal.recovery import Recovery, recover
from shardam_server.shard.snapshots import Snapshot
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords

logger = logging.getLogger(__name__)

RunChange = Callable[[Callable[[], BaseCopy]], Awaitable[BaseCopy]]
"""Runs a function between two changes, on the sequencer's thread."""

MODES: dict[str, shard_pb2.JournalMode.ValueType] = {
    "off": shard_pb2.JOURNAL_MODE_OFF,
    "write": shard_pb2.JOURNAL_MODE_WRITE,
    "fsync": shard_pb2.JOURNAL_MODE_FSYNC,
}
"""The setting's words as messages have them."""


@dataclasses.dataclass(frozen=True)
class JournalStatus:
    """How a shard's changes are kept.

    Attributes:
        mode: as it was told to.
        state: whether they are.
        problem: what is wrong and what to do; empty: nothing.
        size_bytes: bytes of the journal since its base.
        last_base: how the last base of this process went; None: it has written none.
    """

    mode: shard_pb2.JournalMode.ValueType
    state: shard_pb2.JournalState.ValueType
    problem: str
    size_bytes: int
    last_base: BaseReport | None


class StateStore:
    """The state of one shard on its disk; made by `lock`, ended by `close`.

    Attributes:
        base_turn: held while `keep_bases` writes a base.
    """

    def __init__(self, lock: FolderLock, folder: ShardFolder, cluster_name: str, index: int, options: JournalOptions) -> None:
        self._lock = lock
        self._folder = folder
        self._cluster_name = cluster_name
        self._index = index
        self._options = options
        self._journal: DiskJournal | None = None
        self._bases: BaseWriter | None = None
        self._recovery: Recovery | None = None
        self.base_turn = asyncio.Lock()

    @classmethod
    def lock(cls, data_dir: Path, cluster_name: str, index: int, options: JournalOptions) -> StateStore:
        """Takes a shard's folder, making it if there is none, and reads what it holds.

        Raises:
            FolderHeld: another process has it.
            FolderRefused: it cannot be used, or holds another shard.
            JournalDamaged: CURRENT is damaged, or missing beside other files.
            VersionMismatch: another version of shardam wrote it.
        """
        path = shard_folder(data_dir, cluster_name, index)
        lock = FolderLock(path)
        try:
            current = read_current(path)
            if current is None and not holds_nothing(path):
                raise FileDamaged(
                    path / CURRENT,
                    0,
                    "the file is missing, and other files of a state are there, which cannot be read without it. Put it back, "
                    "or move the folder away: the shard is then LOST until `shardam forget-shard --index "
                    f"{index}` gives its rows up",
                )
            if current is not None and (current.cluster_name, current.shard) != (cluster_name, index):
                raise FolderRefused(
                    f"{path} holds shard {current.shard} of cluster {current.cluster_name!r}, not shard {index} of "
                    f"{cluster_name!r}; put the folder where it belongs, or use another --data-dir"
                )
        except BaseException:
            lock.release()
            raise
        return cls(lock, ShardFolder(path, current, options.operations), cluster_name, index, options)

    @property
    def path(self) -> Path:
        """The shard's folder."""
        return self._folder.path

    @property
    def identity(self) -> str:
        """Names the folder that is locked; a copy of it has another name."""
        return self._lock.identity

    @property
    def kept_change(self) -> int:
        """The last change that a killed process comes back with; 0 before `begin` or `resume`. From any thread."""
        return 0 if self._journal is None else self._journal.kept_change

    @property
    def current(self) -> Current | None:
        """What the folder holds; None: nothing. The caller compares `cluster.cluster_id` with the cluster that it joins."""
        return self._folder.current

    @property
    def journal(self) -> DiskJournal:
        """Takes the changes, from `begin` or `resume` on."""
        if self._journal is None:
            raise RuntimeError("there is a journal only after begin or resume")
        return self._journal

    # -- start

    def recover(self, state: ShardState, make_records: MakeRecords) -> Recovery:
        """Brings back what the folder holds; takes as long as reading it, and writes nothing.

        Args:
            state: an empty state.
            make_records: makes an empty record store for a table.

        Raises:
            JournalDamaged: it cannot come back as it was acknowledged; the state is of no use then.
            VersionMismatch: another version of shardam wrote it.
            OutOfMemory: this machine has too little room.
        """
        current = self._folder.require_current()
        self._recovery = recover(self.path, current, state, make_records, truncate=self._options.truncate)
        logger.info(
            "came back as of change %d in %.2f s: %d changes after the base, %d bytes",
            self._recovery.change_number,
            self._recovery.seconds,
            self._recovery.num_changes,
            self._recovery.journal_bytes,
        )
        return self._recovery

    def resume(self, state: ShardState) -> None:
        """Goes on from what `recover` put into this state: cuts off what was given up, and appends from there.

        Raises:
            OSError: it cannot be written.
        """
        recovery, folder = self._recovery, self._folder
        if recovery is None:
            raise RuntimeError("resume follows recover")
        if recovery.given_up:
            logger.warning("--truncate-journal: %s", recovery.given_up)
        if recovery.torn_bytes:
            logger.info("cuts off the %d bytes of a change that was never whole", recovery.torn_bytes)
        tail, current = recovery.tail, folder.require_current()
        files = list_journal_files(self.path)
        for number in sorted(files, reverse=True):  # while one is left, the gap before it still says that it was given up
            if number > tail.file_number:
                folder.operations.remove(files[number])
        if tail.file_number == 0:
            file = folder.create_journal(current, current.first_file, tail.sequence, state.change_number)
        else:
            file = folder.open_journal(tail.file_number, tail.size_bytes)
        folder.mark(complete=True)
        older = [path for number, path in files.items() if current.first_file <= number < tail.file_number]
        sequence = tail.sequence if tail.file_number else tail.sequence + 1
        older_bytes = sum(path.stat().st_size for path in older)
        self._go_on(state, file, sequence, older_bytes, kept_change=state.change_number)

    def begin(self, cluster: ClusterEntry, lineage: int, timeline: int, epoch: int, state: ShardState, plan: str = "") -> None:
        """Starts a state of a new lineage; what the folder held before is given up, once the new one is whole.

        Args:
            cluster: the cluster.
            lineage: lineage of the state.
            timeline: timeline of the state.
            epoch: highest route epoch known.
            state: the state; what it holds already becomes its first base.
            plan: the plan that it comes from, as Redis has it; empty: it begins empty.

        Raises:
            OSError: it cannot be written; the folder holds what it held.
        """
        if self._journal is not None:
            raise RuntimeError("a state begins once the former one is given up")
        folder, holds_something = self._folder, state.change_number > 0 or bool(state.tables())
        if holds_something and folder.current is None:
            self._begin_unfinished(cluster)
        number = self._next_number()
        base = base_name(number) if holds_something else None
        current = Current(self._cluster_name, cluster, self._index, lineage, timeline, epoch, base, number, plan=plan)
        file = folder.create_journal(current, number, 0, state.change_number)
        try:
            if base is not None:
                self._write_first_base(base, current, state)
            folder.put_current(current)
        except OSError:
            folder.discard(file)
            raise
        self._go_on(state, file, sequence=1, older_bytes=0, kept_change=state.change_number)

    def _begin_unfinished(self, cluster: ClusterEntry) -> None:
        """Names a state that is still to come; a base without CURRENT would look like a folder that has lost it."""
        number = self._next_number()
        unfinished = Current(self._cluster_name, cluster, self._index, 0, UNFINISHED, 0, base=None, first_file=number)
        self._folder.create_journal(unfinished, number, 0, change_number=0).close()
        self._folder.put_current(unfinished)

    def _next_number(self) -> int:
        return max(list_journal_files(self.path), default=0) + 1

    def _write_first_base(self, name: str, current: Current, state: ShardState) -> None:
        file = self._folder.create_file(name)
        snapshot = Snapshot(state)
        try:
            write_base(file, current, snapshot)
        except (OSError, CutBackFailed) as error:
            self._folder.discard(file)
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        finally:
            snapshot.close()
        file.close()

    def give_up(self) -> None:
        """Ends the journal of a state that another one will replace; the folder holds it as it is, until `begin`."""
        journal, bases = self._journal, self._bases
        if journal is not None and bases is not None:
            bases.finish()
            if self._options.mode == "write":
                self._folder.sync_journals()
            journal.end()
        self._journal = self._bases = None

    def _go_on(self, state: ShardState, file: JournalFile, sequence: int, older_bytes: int, kept_change: int) -> None:
        folder = self._folder
        folder.remove_unneeded()
        self._journal = DiskJournal(
            self._options,
            file,
            sequence=sequence,
            older_bytes=older_bytes,
            kept_change=kept_change,
            mark_incomplete=lambda: folder.mark(complete=False),
            is_complete=lambda: folder.require_current().complete,
            discard=folder.discard,
        )
        self._bases = BaseWriter(folder, self._journal, state, self._options)
        self._mark_if_off()
        state.journal = self._journal

    def _mark_if_off(self) -> None:
        """Without a journal the files lag behind from the first change on, until `close` writes a base."""
        if self._options.mode == "off":
            self._folder.mark(complete=False)

    # -- while it runs

    def note_epoch(self, epoch: int) -> None:
        """Keeps the highest route epoch known; one that cannot be written now goes with the next base.

        Before `begin` or `resume` nothing is kept: `begin` is told the epoch.

        Args:
            epoch: epoch of a route map; a lower one than before is passed over.
        """
        if self._journal is None:
            return
        try:
            self._folder.note_epoch(epoch)
        except OSError as error:
            logger.warning("route epoch %d could not be kept in %s: %s", epoch, self.path, error)

    def status(self) -> JournalStatus:
        """Returns how the journal is; from any thread."""
        mode, journal, bases = MODES[self._options.mode], self._journal, self._bases
        if journal is None or bases is None:
            return JournalStatus(mode, shard_pb2.JOURNAL_STATE_OK, "", 0, None)
        problem = ". ".join(text for text in (journal.problem, bases.problem) if text)
        return JournalStatus(mode, journal.state, problem, journal.size_bytes, bases.last)

    def needs_base(self) -> bool:
        """Returns whether a base is to be written now; from any thread."""
        return self._bases is not None and self._bases.is_needed()

    async def write_base(self, run_change: RunChange) -> BaseReport | None:
        """Writes a base beside changes; None: it failed, as the status says, and is tried again later.

        Args:
            run_change: Sequencer.change, or another way to run between two changes.
        """
        return await self._require_bases().run(run_change)

    async def keep_bases(self, run_change: RunChange) -> None:
        """Writes a base whenever one is needed, until it is cancelled; raises what only a defect raises."""
        while True:
            async with self.base_turn:
                if self.needs_base():
                    await self.write_base(run_change)
            await asyncio.sleep(CHECK_S)

    # -- end

    def close(self) -> None:
        """Makes everything durable and gives the folder back; after the sequencer has ended.

        Where changes are in memory only (the journal is off, suspended, or failed after that) it ends with a base, so that a
        drained shard loses nothing.
        """
        journal, bases = self._journal, self._bases
        if journal is not None and bases is not None:
            bases.finish()
            if not self._folder.require_current().complete and bases.write_now() is None:
                logger.error(
                    "%s: the state ends incomplete, without what was acknowledged since its journal ended", bases.problem
                )
            if self._options.mode == "write":
                self._folder.sync_journals()
            journal.end()
        self.release()

    def release(self) -> None:
        """Gives the folder back as it is; for a process that did not go on from it."""
        self._lock.release()

    def _require_bases(self) -> BaseWriter:
        if self._bases is None:
            raise RuntimeError("bases are written only after begin or resume")
        return self._bases
