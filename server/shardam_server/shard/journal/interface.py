"""What the shard's state asks of a journal, and the journal that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardam_proto.v1 import journal_pb2

Arrays = Sequence[npt.NDArray[np.generic]]
"""The arrays of a record, in the order of its message's fields; contiguous."""


class Journal(Protocol):
    """Takes every change before it is applied. Used from the sequencer's thread alone, but for `durable`.

    Attributes:
        keeps_changes: False: what a change's record says beside its number is nobody's concern, and need not be made.
    """

    keeps_changes: bool

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        """Writes one change.

        Raises:
            JournalFull: no space, and changes are to be refused then; nothing has been written.
            JournalFailed: the journal takes no more changes.
        """
        ...

    def retract(self) -> None:
        """Takes the last appended change back, because it could not be applied and memory is as it was.

        Raises:
            JournalFailed: it could not be taken back; the journal takes no more changes.
        """
        ...

    def fail(self, why: str) -> str:
        """Takes no more changes, because the last appended one may be in memory in part; it stays for a replay.

        Args:
            why: what happened.

        Returns:
            That, and what becomes of the state and is to be done.
        """
        ...

    async def durable(self) -> None:
        """Waits until every change appended so far is as safe as the journal's mode promises. On the event loop.

        Raises:
            JournalFailed: it cannot be made so; the changes must not be acknowledged.
        """
        ...


class NoJournal:
    """Keeps nothing: rows live in memory only."""

    keeps_changes: bool = False

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        """Does nothing."""

    def retract(self) -> None:
        """Does nothing."""

    def fail(self, why: str) -> str:
        """Says what is left: nothing."""
        return (
            f"{why}; nothing is read or changed any more, and no file has the rows: the shard ends, and is LOST when it is "
            "started again"
        )

    async def durable(self) -> None:
        """Promises nothing."""
