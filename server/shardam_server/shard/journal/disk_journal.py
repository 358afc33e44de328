"""The journal on the disk: appends changes, and decides what happens when that cannot be done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardam_proto.errors import JournalFailed, JournalFull
from shardam_proto.v1 import journal_pb2, shard_pb2
from shardam_server.shard.journal.file_operations import is_disk_full
from shardam_server.shard.journal.frames import encode_frame
from shardam_server.shard.journal.group_commit import GroupCommit
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.journal.journal_file import CutBackFailed, JournalFile
from shardam_server.shard.journal.options import JournalOptions

logger = logging.getLogger(__name__)

START_AGAIN = "start the shard again: it comes back with every change that was acknowledged"

STOP_IT = (
    "what was acknowledged without the journal is in memory only: make space and stop the shard with SIGTERM, and it writes a "
    "base; if it is killed, that is lost, and it starts with --truncate-journal only"
)

TRUNCATE = (
    "what was acknowledged without the journal is lost: start the shard with --truncate-journal, and it comes back as of the "
    "last change in its files"
)


class DiskJournal:
    """A shard's journal (PROTOCOL.md, section 7).

    `append`, `retract` and `fail` run on the sequencer's thread, `durable` on the event loop, the rest on any thread.

    Args:
        options: how changes are kept.
        file: where they go at first.
        sequence: sequence number of the first one.
        older_bytes: bytes of the files before it since the base.
        kept_change: the last change that the files hold already.
        mark_incomplete: notes on the disk that the files lag behind the state; raises OSError.
        is_complete: returns whether they do not.
        discard: closes and removes a file that is of no use.

    Attributes:
        state: whether it takes changes.
        problem: what is wrong with it and what to do; empty: nothing.
        kept_change: the last change known to be as safe as the mode promises, so that a killed process comes back with it. It
            stands still while changes go on without the journal.
    """

    keeps_changes: bool = True

    def __init__(
        self,
        options: JournalOptions,
        file: JournalFile,
        *,
        sequence: int,
        older_bytes: int,
        kept_change: int,
        mark_incomplete: Callable[[], None],
        is_complete: Callable[[], bool],
        discard: Callable[[JournalFile], None],
    ) -> None:
        self._options = options
        self._mark_incomplete = mark_incomplete
        self._is_complete = is_complete
        self._discard = discard
        self._lock = threading.Lock()
        self._file = file
        self._sequence = sequence
        self._older_bytes = older_bytes
        self._keeps = options.mode != "off"
        self._last_start: int | None = None
        self._unfounded = False  # the file goes on from a state that no file holds yet
        self._suspensions = 0
        self._last_change = kept_change
        self.kept_change = kept_change
        self._failure = ""
        self._half_applied = False
        self.state: shard_pb2.JournalState.ValueType = shard_pb2.JOURNAL_STATE_OK
        self.problem = ""
        self._commit = GroupCommit(self._sync, self._fail_sync) if options.mode == "fsync" else None

    # -- Journal

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        """Writes one change, or drops it while the journal is suspended or off.

        Raises:
            JournalFull: no space, and changes are to be refused then; nothing has been written.
            JournalFailed: it could not be written; nothing has been written, or the journal takes no more changes.
        """
        with self._lock:
            self._check()
            self._last_start = None
            if not self._keeps:
                return
            start = self._file.size_bytes
            try:
                self._file.write(encode_frame(self._sequence, record.SerializeToString(), arrays))
            except CutBackFailed as error:
                raise self._fail(str(error)) from error
            except OSError as error:
                self._react(error)
                return
            self._sequence += 1
            self._last_start = start
            self._last_change = record.change_number
            if self._commit is None:
                self._note_kept(record.change_number)
            if self.state == shard_pb2.JOURNAL_STATE_FULL:
                logger.info("the journal's disk has space again: changes are taken again")
                self.state, self.problem = shard_pb2.JOURNAL_STATE_OK, ""
        self._note_write()

    def retract(self) -> None:
        """Cuts the last appended change off again, unless it was dropped meanwhile with a base that could not be written.

        Raises:
            JournalFailed: it could not be cut off; the journal takes no more changes.
        """
        with self._lock:
            if self._last_start is None:
                return
            try:
                self._file.cut(self._last_start)
            except CutBackFailed as error:
                raise self._fail(str(error)) from error
            self._sequence -= 1
            self._last_start = None
            self._last_change -= 1
            self.kept_change = min(self.kept_change, self._last_change)
        self._note_write()

    def fail(self, why: str) -> str:
        """Takes no more changes, because the last appended one may be in memory in part; it stays for a replay."""
        with self._lock:
            self._half_applied = True
            self._set_failed(why)
            return self.problem

    async def durable(self) -> None:
        """Waits, in mode fsync, until every change appended so far is on the disk.

        Raises:
            JournalFailed: it may not be.
        """
        if self._commit is not None:
            await self._commit.wait()

    # -- the store's part

    @property
    def size_bytes(self) -> int:
        """Bytes of the files since the base."""
        return self._older_bytes + self._file.size_bytes

    @property
    def sequence(self) -> int:
        """Sequence number of the next frame."""
        return self._sequence

    @property
    def suspensions(self) -> int:
        """How often it has stopped keeping changes; a base that was begun before the last time cannot end that."""
        return self._suspensions

    def switch(self, file: JournalFile) -> None:
        """Goes on in a new file whose header is written; on the sequencer's thread.

        A failed journal does so only for a base that holds what no file has, and takes no changes after it either.

        Raises:
            JournalFailed: what the old file holds may not be on the disk; or it failed before, and no base is of use.
        """
        with self._lock:
            rescues = self.state == shard_pb2.JOURNAL_STATE_FAILED and not self._half_applied and not self._is_complete()
            if not rescues:
                self._check()
            if self._commit is not None and not rescues:
                try:
                    self._file.sync()
                except OSError as error:
                    raise self._fail(self._describe_sync(error)) from error
            self._file.close()
            self._older_bytes += self._file.size_bytes
            self._file = file
            self._sequence += 1
            self._last_start = None
            if rescues or self.state == shard_pb2.JOURNAL_STATE_SUSPENDED:
                self._unfounded = True
                self._keeps = True

    def found(self, suspensions: int, commit: Callable[[], None]) -> bool:
        """Makes a base that was written the ground of the present file; changes wait meanwhile.

        Args:
            suspensions: what it was when the base was copied.
            commit: names the base in CURRENT; raises OSError.

        Returns:
            False: changes have been dropped since, so the base was not committed.
        """
        with self._lock:
            if suspensions != self._suspensions:
                return False
            commit()
            self._older_bytes = 0
            self._unfounded = False
            if self.state == shard_pb2.JOURNAL_STATE_SUSPENDED:
                logger.warning("the journal goes on: a new base holds every change that was made without it")
                self.state, self.problem = shard_pb2.JOURNAL_STATE_OK, ""
            elif self.state == shard_pb2.JOURNAL_STATE_FAILED:
                self.problem = self._describe_failure()  # another remedy holds now
            return True

    def abandon(self, suspensions: int) -> None:
        """Gives up what was appended since a base was begun that could not be written, if only that gave it a ground."""
        with self._lock:
            if suspensions == self._suspensions and self._unfounded:
                self._drop_unfounded()
                self._suspensions += 1

    def end(self) -> None:
        """Makes everything durable, in mode fsync, and closes the file."""
        if self._commit is not None:
            self._commit.end()
        with self._lock:
            self._keeps = False
            self._file.close()

    # -- failures; the lock is held

    def _check(self) -> None:
        if self.state == shard_pb2.JOURNAL_STATE_FAILED:
            raise JournalFailed(self.problem)

    def _react(self, error: OSError) -> None:
        """Reacts to a write that failed and left no trace: returns if changes go on without a journal.

        Raises:
            JournalFull, JournalFailed: the change is refused.
        """
        path = self._file.path
        if not is_disk_full(error):
            raise JournalFailed(
                f"{path} could not be written ({error.strerror}); nothing was changed, the next change tries again"
            )
        if self._options.on_full == "refuse":
            self.state = shard_pb2.JOURNAL_STATE_FULL
            self.problem = f"the disk of {path} is full and changes are refused; make space, the next change tries again"
            raise JournalFull(self.problem)
        try:
            self._mark_incomplete()
        except OSError as failure:
            raise self._fail(f"the disk of {path} is full, and that could not be noted ({failure})") from failure
        if self._unfounded:
            self._drop_unfounded()
        self._keeps = False
        self._suspensions += 1
        if self.state != shard_pb2.JOURNAL_STATE_SUSPENDED:
            self.problem = (
                f"the disk of {path} is full: changes are acknowledged without the journal and lost if the shard is killed; "
                "make space for a new base, and the journal goes on by itself"
            )
            self.state = shard_pb2.JOURNAL_STATE_SUSPENDED
            logger.error("DEGRADED: %s", self.problem)

    def _note_kept(self, change_number: int) -> None:
        if not self._unfounded:
            self.kept_change = max(self.kept_change, change_number)

    def _drop_unfounded(self) -> None:
        self._keeps = False
        self._unfounded = False
        self._last_change = self.kept_change
        self._last_start = None  # the file that it counts in is gone
        self._discard(self._file)
        self._file.size_bytes = 0

    def _fail(self, why: str) -> JournalFailed:
        if self.state != shard_pb2.JOURNAL_STATE_FAILED:
            self._set_failed(why)
        return JournalFailed(self.problem)

    def _set_failed(self, why: str) -> None:
        self._failure = why
        self.state, self.problem = shard_pb2.JOURNAL_STATE_FAILED, self._describe_failure()
        logger.error("the journal failed: %s", self.problem)

    def _describe_failure(self) -> str:
        """Says what happened and what is to be done, which depends on where the changes are that were acknowledged."""
        if self._half_applied:
            return f"{self._failure}; nothing is read or changed any more: {START_AGAIN if self._is_complete() else TRUNCATE}"
        return f"{self._failure}; no more changes are taken: {START_AGAIN if self._is_complete() else STOP_IT}"

    # -- fsync

    def _note_write(self) -> None:
        if self._commit is not None:
            self._commit.note_write()

    def _sync(self) -> None:
        with self._lock:
            written = self._last_change
        self._file.sync()
        with self._lock:
            if written <= self._last_change:  # else it was taken back meanwhile
                self._note_kept(written)

    def _fail_sync(self, error: Exception) -> str:
        with self._lock:
            return str(self._fail(self._describe_sync(error)))

    def _describe_sync(self, error: Exception) -> str:
        return f"{self._file.path} may not be on the disk ({error})"
