"""How a shard keeps its state."""

from __future__ import annotations

import dataclasses
from typing import Literal

from shardam_server.settings import StateSettings
from shardam_server.shard.journal.file_operations import FileOperations

RETRY_S = 5.0
"""Seconds between two tries to write a base that could not be written, or a journal that is suspended: often enough that
space is noticed while an operator watches, seldom enough that copying the state costs nothing."""

SPARE_BYTES = 64 * 2**20
"""Space that must be free beside a new base before one is tried: else the journal would be full again at the next push."""

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class JournalOptions:
    """How a shard keeps its state.

    Attributes:
        mode: off, write or fsync (StateSettings.journal_mode).
        on_full: when the disk is full: suspend the journal, or refuse changes.
        limit_bytes: size of the journal at which a base is written, unless the last base is larger: then at that size.
        truncate: start from a damaged or incomplete state as far as it can be read.
        retry_s: seconds between two tries to write a base.
        spare_bytes: space that must be free beside a new base.
        operations: the file system.
    """

    mode: Literal["off", "write", "fsync"] = "write"
    on_full: Literal["suspend", "refuse"] = "suspend"
    limit_bytes: int = 1024 * MIB
    truncate: bool = False
    retry_s: float = RETRY_S
    spare_bytes: int = SPARE_BYTES
    operations: FileOperations = dataclasses.field(default_factory=FileOperations)

    @classmethod
    def from_settings(cls, settings: StateSettings) -> JournalOptions:
        """Reads them from a process's settings."""
        return cls(
            mode=settings.journal_mode,
            on_full=settings.on_journal_full,
            limit_bytes=settings.journal_limit_mib * MIB,
            truncate=settings.truncate_journal,
        )
