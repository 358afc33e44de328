"""When a shard writes a base, and how: begun between two changes, copied and written beside them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from shardam_proto.errors import JournalFailed, ShardamError
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.journal.base_file import write_base
from shardam_server.shard.journal.disk_journal import DiskJournal
from shardam_server.shard.journal.file_names import base_name, list_journal_files
from shardam_server.shard.journal.folder import ShardFolder
from shardam_server.shard.journal.journal_file import CutBackFailed
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.snapshots import Snapshot, estimate_bytes
from shardam_server.shard.state import ShardState

logger = logging.getLogger(__name__)

CHECK_S = 0.2
"""Seconds between two looks at the journal's size: at 1 GB a second it grows by a fifth of its default limit meanwhile."""


@dataclasses.dataclass(frozen=True)
class BaseReport:
    """How a base was written.

    Attributes:
        change_number: the change that it is as of.
        num_rows: rows that it holds.
        size_bytes: size of the file.
        held_s: how long changes waited while it was begun.
        seconds: how long it took in all.
    """

    change_number: int
    num_rows: int
    size_bytes: int
    held_s: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class BaseCopy:
    """A state that is to become a base.

    Attributes:
        state: all of it.
        first_file: the journal file that goes on from it.
        suspensions: how often the journal had been suspended when it was begun.
        started: time.monotonic() when it was begun.
        held_s: how long changes waited.
    """

    state: Snapshot
    first_file: int
    suspensions: int
    started: float
    held_s: float


class BaseFailed(Exception):
    """A base could not be written; what the folder held before still holds."""


class BaseWriter:
    """Writes bases of a state, one at a time.

    Args:
        folder: where to.
        journal: the journal that goes on from a base.
        state: the state.
        options: when.

    Attributes:
        last: how the last one went; None: none yet.
        problem: why the last try failed; empty: it did not.
    """

    def __init__(self, folder: ShardFolder, journal: DiskJournal, state: ShardState, options: JournalOptions) -> None:
        self.last: BaseReport | None = None
        self.problem = ""
        self._folder = folder
        self._journal = journal
        self._state = state
        self._options = options
        self._one_at_a_time = threading.Lock()
        self._next_try = 0.0
        base = folder.require_current().base
        self._base_bytes = 0 if base is None else (folder.path / base).stat().st_size

    def is_needed(self) -> bool:
        """Returns whether a base is to be written now: the journal is too large, or lags behind, and there is room."""
        if self._options.mode == "off" or self._state.half_applied or time.monotonic() < self._next_try:
            return False
        journal = self._journal
        lags = not self._folder.require_current().complete
        # Waiting for a journal as large as the last base keeps the bytes of bases below those of the journal.
        too_large = journal.size_bytes > max(self._options.limit_bytes, self._base_bytes)
        if not lags and (journal.state == shard_pb2.JOURNAL_STATE_FAILED or not too_large):
            return False
        return self._has_room()

    def _has_room(self) -> bool:
        needed = estimate_bytes(self._state) + self._options.spare_bytes
        try:
            free = self._folder.operations.free_bytes(self._folder.path)
        except OSError as error:
            self._note_failure(f"the free space cannot be read: {error}")
            return False
        if free < needed:
            self._note_failure(f"a new base needs {needed} bytes, {free} are free")
            return False
        return True

    def copy(self) -> BaseCopy:
        """Begins a copy of the state and lets the journal go on in a new file; on the sequencer's thread.

        The copy's snapshot is to be closed, as `write` does.

        Raises:
            BaseFailed: there is no room for one of them, or the state is of no use.
        """
        started, folder, journal = time.monotonic(), self._folder, self._journal
        if self._state.half_applied:
            raise BaseFailed("the state in memory has a change in part")
        try:
            number = max(list_journal_files(folder.path), default=0) + 1
            file = folder.create_journal(folder.require_current(), number, journal.sequence, self._state.change_number)
        except OSError as error:
            raise BaseFailed(str(error)) from error
        try:
            journal.switch(file)
        except JournalFailed as error:
            folder.discard(file)
            raise BaseFailed(error.message) from error
        suspensions = journal.suspensions
        try:
            state = Snapshot(self._state)
        except MemoryError as error:
            journal.abandon(suspensions)
            raise BaseFailed("there is no memory for what a copy of the state begins with") from error
        return BaseCopy(state, number, suspensions, started, time.monotonic() - started)

    def write(self, copy: BaseCopy) -> BaseReport:
        """Writes a copy as the new base and removes what it replaces; from any thread.

        Raises:
            BaseFailed: it could not be written.
        """
        with self._one_at_a_time, contextlib.closing(copy.state):
            folder, durable = self._folder, False

            def commit() -> None:
                nonlocal durable
                durable = folder.name_base(file.path.name, copy.first_file)

            try:
                file = folder.create_file(base_name(copy.first_file))
            except OSError as error:
                self._journal.abandon(copy.suspensions)
                raise BaseFailed(str(error)) from error
            try:
                write_base(file, folder.require_current(), copy.state)
                if not self._journal.found(copy.suspensions, commit):
                    raise BaseFailed("the disk became full again meanwhile")
            except (OSError, CutBackFailed, MemoryError, ShardamError, BaseFailed) as error:
                self._journal.abandon(copy.suspensions)
                folder.discard(file)
                raise BaseFailed(str(error) or type(error).__name__) from error
            file.close()
            if durable:
                folder.remove_unneeded()
            seconds = time.monotonic() - copy.started
            self._base_bytes = file.size_bytes
            self.problem = ""
            self.last = BaseReport(copy.state.change_number, copy.state.num_rows, file.size_bytes, copy.held_s, seconds)
            logger.info(
                "wrote a base as of change %d: %d rows, %d bytes, %.2f s; changes waited for %.2f s",
                *dataclasses.astuple(self.last)[:3],
                seconds,
                copy.held_s,
            )
            return self.last

    def finish(self) -> None:
        """Waits for a base that another thread may be writing."""
        with self._one_at_a_time:
            return

    def write_now(self) -> BaseReport | None:
        """Copies and writes on the thread of the caller, who has ended the sequencer; None: it failed, as `problem` says."""
        try:
            return self.write(self.copy())
        except BaseFailed as error:
            self._note_failure(str(error))
            return None

    async def run(self, run_change: Callable[[Callable[[], BaseCopy]], Awaitable[BaseCopy]]) -> BaseReport | None:
        """Writes a base beside changes; None: it failed, as `problem` says, and is tried again later.

        Args:
            run_change: runs a function between two changes, on the sequencer's thread.
        """
        handover = _Handover(self)
        try:
            await run_change(handover.copy)
            return await asyncio.to_thread(handover.write)
        except BaseFailed as error:
            self._note_failure(str(error))
            return None
        finally:
            handover.end()

    def _note_failure(self, why: str) -> None:
        self._next_try = time.monotonic() + self._options.retry_s
        problem = f"no new base could be written: {why}"
        if not self.problem:
            logger.warning("%s; tried again every %g s", problem, self._options.retry_s)
        self.problem = problem


class _Handover:
    """A copy on its way from the sequencer's thread to the thread that writes it, either of which its task may give up.

    Changes may come to wait for a snapshot that is not copied: it is closed, whichever of the threads is the last to know.
    """

    def __init__(self, bases: BaseWriter) -> None:
        self._bases = bases
        self._copy: BaseCopy | None = None
        self._ended = self._writing = False

    def copy(self) -> BaseCopy:
        """Begins the copy."""
        copy = self._copy = self._bases.copy()
        if self._ended:
            copy.state.close()
        return copy

    def write(self) -> BaseReport:
        """Writes it."""
        self._writing = True
        if self._copy is None:
            raise RuntimeError("a base is written after it was copied")
        return self._bases.write(self._copy)

    def end(self) -> None:
        """Closes a copy that nobody writes; one that is being written is finished."""
        self._ended = True
        if self._copy is not None and not self._writing:
            self._copy.state.close()
