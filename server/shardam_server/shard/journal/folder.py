"""A shard's folder while this process writes it.

Whatever a crash interrupts leaves a folder that recovers: a new file is whole before CURRENT names it, CURRENT is replaced by
a rename, and old files go last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from pathlib import Path

from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.file_names import (
    CURRENT,
    INCOMPLETE,
    file_header,
    journal_name,
    list_journal_files,
    list_unneeded,
)
from shardam_server.shard.journal.file_operations import FileOperations
from shardam_server.shard.journal.frames import JOURNAL_MAGIC, encode_frame, encode_preamble
from shardam_server.shard.journal.journal_file import CutBackFailed, JournalFile

logger = logging.getLogger(__name__)


class ShardFolder:
    """The files of one shard, and CURRENT, which says what they are. From any thread.

    Args:
        path: the folder.
        current: what it holds; None: nothing.
        operations: the file system.
    """

    def __init__(self, path: Path, current: Current | None, operations: FileOperations) -> None:
        self.path = path
        self.operations = operations
        self._current = current
        self._lock = threading.RLock()

    @property
    def current(self) -> Current | None:
        """What the folder holds; None: nothing."""
        return self._current

    def require_current(self) -> Current:
        """Returns what the folder holds, which must be something."""
        if self._current is None:
            raise RuntimeError(f"{self.path} holds no state yet")
        return self._current

    # -- files

    def create_file(self, name: str) -> JournalFile:
        """Opens an empty file that CURRENT does not name.

        Raises:
            OSError: it cannot be made.
        """
        path = self.path / name
        return JournalFile(path, self.operations.create(path), 0, self.operations)

    def create_journal(self, current: Current, number: int, sequence: int, change_number: int) -> JournalFile:
        """Makes a journal file with its header, on the disk, or none.

        Args:
            current: the state that it belongs to.
            number: its number.
            sequence: sequence number of its header.
            change_number: change number before its first record.

        Raises:
            OSError: it could not be made.
        """
        path = self.path / journal_name(number)
        file = self.create_file(f"{path.name}.tmp")
        try:
            header = file_header(current, number, change_number).SerializeToString()
            file.write([encode_preamble(JOURNAL_MAGIC), *encode_frame(sequence, header)])
            file.sync()
            self.operations.rename(file.path, path)
            file.path = path
            self.operations.sync_folder(self.path)
        except (OSError, CutBackFailed) as error:
            self.discard(file)
            raise _as_os_error(error) from error
        return file

    def open_journal(self, number: int, size_bytes: int) -> JournalFile:
        """Opens a journal file to go on at a size; what lies beyond is cut off.

        Raises:
            OSError: it cannot be opened or cut.
        """
        path = self.path / journal_name(number)
        file = JournalFile(path, self.operations.open(path), size_bytes, self.operations)
        try:
            file.cut(size_bytes)
        except CutBackFailed as error:
            file.close()
            raise _as_os_error(error) from error
        return file

    def sync_journals(self) -> None:
        """Waits until the journal files are on the disk, where nobody has waited for that before; says so where it fails."""
        try:
            first = self.require_current().first_file
            for number, path in list_journal_files(self.path).items():
                if number < first:
                    continue
                descriptor = self.operations.open(path)
                try:
                    self.operations.sync(descriptor)
                finally:
                    self.operations.close(descriptor)
        except OSError as error:
            logger.error("%s may not be on the disk (%s): a power loss may cost changes", self.path, error)

    def discard(self, file: JournalFile) -> None:
        """Closes and removes a file that CURRENT does not name; one that cannot be removed is passed over at recovery."""
        file.close()
        with contextlib.suppress(OSError):
            self.operations.remove(file.path)

    def remove_unneeded(self) -> None:
        """Removes files that CURRENT does not need; those that cannot be removed stay until the next time."""
        with self._lock:
            try:
                unneeded = list_unneeded(self.path, self.require_current())
            except OSError as error:
                logger.warning("%s cannot be listed, so files that are not needed any more stay: %s", self.path, error)
                return
            for path in unneeded:
                try:
                    self.operations.remove(path)
                except OSError as error:
                    logger.warning("%s is not needed any more, and could not be removed: %s", path, error)

    # -- CURRENT

    def put_current(self, current: Current) -> bool:
        """Replaces CURRENT (or CURRENT.incomplete) as a whole.

        Returns:
            Whether it is on the disk. False: it may be gone after a power loss, and what it replaced back.

        Raises:
            OSError: it is as it was.
        """
        with self._lock:
            file = self.create_file(f"{CURRENT}.tmp")
            try:
                file.write([current.to_json().encode()])
                file.sync()
                self.operations.rename(file.path, self.path / (CURRENT if current.complete else INCOMPLETE))
            except (OSError, CutBackFailed) as error:
                self.discard(file)
                raise _as_os_error(error) from error
            file.close()
            self._current = current
            try:
                self.operations.sync_folder(self.path)
            except OSError as error:
                logger.warning("%s may not be on the disk: %s", self.path / CURRENT, error)
                return False
            return True

    def name_base(self, base: str, first_file: int) -> bool:
        """Has CURRENT name a new base that covers everything before a journal file; returns and raises as put_current."""
        with self._lock:
            return self.put_current(
                dataclasses.replace(self.require_current(), base=base, first_file=first_file, complete=True)
            )

    def note_epoch(self, epoch: int) -> None:
        """Keeps the highest route epoch.

        Raises:
            OSError: it could not be written; it goes with whatever is written next.
        """
        with self._lock:
            current = self.require_current()
            if epoch > current.epoch:
                self._current = dataclasses.replace(current, epoch=epoch)
                self.put_current(self._current)

    def mark(self, *, complete: bool) -> None:
        """Renames CURRENT to say whether the files hold all of the state.

        Raises:
            OSError: it may not say so.
        """
        with self._lock:
            current = self.require_current()
            if current.complete == complete:
                return
            old, new = (INCOMPLETE, CURRENT) if complete else (CURRENT, INCOMPLETE)
            self.operations.rename(self.path / old, self.path / new)
            self._current = dataclasses.replace(current, complete=complete)
            self.operations.sync_folder(self.path)


def _as_os_error(error: OSError | CutBackFailed) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))
