"""A shard's whole state as of one change, read while later changes go on: for a base, and for a checkpoint."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.groups.entries import StagedPart
from shardam_server.shard.journal.base_records import (
    BaseRecord,
    client_record,
    end_record,
    group_message,
    part_record,
    rows_record,
    table_message,
)
from shardam_server.shard.pre_images import LEAST_PRE_IMAGE_BYTES, ROWS_SHARE, PreImageRoom, TableCut, row_bytes
from shardam_server.shard.state import ShardState

PAGE_BYTES = 2**20
"""Bytes of rows that are copied under a table's lock at a time, in well under a millisecond: a push waits no longer for it. It
is also what reading one record back holds in memory, and large beside a record's own cost."""


class SnapshotFailed(ShardamError):
    """A snapshot does not give all rows as of its change; what was made of it so far is of no use."""


def estimate_bytes(state: ShardState) -> int:
    """Returns about how large a base of a state would be; from any thread."""
    rows = sum(table.num_rows * row_bytes(table.spec.dim) for table in state.tables())
    return rows + sum(part.num_bytes for part in state.groups.parts())


class Snapshot:
    """All of a state as of its last change.

    Made on the sequencer's thread, which takes no time; read once, from another thread, while changes go on; always to be
    closed, since changes may have to wait for whoever reads it.

    Args:
        state: the state.
        limit_bytes: pre-images that are kept before changes wait; None: as fits the size of the tables.

    Attributes:
        change_number: the change that it is as of.
        tables: its tables, with rows, steps and counters.
        clients: its clients, the oldest first.
        groups: its groups.
        parts: parts that wait for a decision; their arrays are never written to.
        num_rows: rows over all tables.
        size_bytes: about how large a base of it is.
    """

    def __init__(self, state: ShardState, limit_bytes: int | None = None) -> None:
        tables = state.tables()
        self.change_number = state.change_number
        self.tables: list[common_pb2.TableInfo] = [table_message(table) for table in tables]
        # What a number's outcome is never changes; which numbers are kept does.
        self.clients: list[tuple[bytes, ClientEntry]] = [
            (client_id, dataclasses.replace(entry, outcomes=dict(entry.outcomes))) for client_id, entry in state.clients
        ]
        self.groups: list[journal_pb2.StoredGroup] = [group_message(entry) for entry in state.groups]
        self.parts: list[StagedPart] = state.groups.parts()
        self.num_rows = sum(info.num_rows for info in self.tables)
        self.size_bytes = estimate_bytes(state)
        self._state = state
        if limit_bytes is None:
            record_bytes = sum(table.storage.record_bytes for table in tables)
            limit_bytes = max(LEAST_PRE_IMAGE_BYTES, record_bytes // ROWS_SHARE)
        self._room = PreImageRoom(limit_bytes)
        self._cuts = [TableCut(table, self.change_number, self._room) for table in tables]
        self._max_rows = {table.table_id: max(1, PAGE_BYTES // row_bytes(table.spec.dim)) for table in tables}
        state.snapshots.add(self._room)
        # A call that makes one may be cancelled before it hands it over; what nobody holds, nobody closes.
        weakref.finalize(self, self._room.close).atexit = False

    @property
    def pre_image_bytes(self) -> int:
        """Bytes of rows that are kept as they were."""
        return self._room.kept_bytes

    @property
    def closed(self) -> bool:
        """True: it cannot be read any more."""
        return self._room.closed

    def close(self) -> None:
        """Ends it, and lets changes go on that wait; from any thread, any number of times."""
        self._room.close()
        for cut in self._cuts:
            cut.drop()

    def records(self, *, parts: bool) -> Iterator[BaseRecord]:
        """Yields the records of a base file, each with its arrays; closes the snapshot at the end.

        Tables come first, then rows of all of them, in no particular order.

        Args:
            parts: with parts that wait for a decision.

        Raises:
            SnapshotFailed: it was closed, or its rows are not all there.
            JournalFailed: the state came to hold a change in part.
            MemoryError: there is no room for a page of rows.
        """
        try:
            for info in self.tables:
                yield journal_pb2.BaseRecord(table=info), []
            yield from self._row_records()
            for client_id, entry in self.clients:
                yield client_record(client_id, entry)
            for group in self.groups:
                yield journal_pb2.BaseRecord(group=group), []
            for part in self.parts if parts else []:
                yield part_record(part)
            yield end_record(self.num_rows, len(self.clients))
        finally:
            self.close()

    def _row_records(self) -> Iterator[BaseRecord]:
        num_copied = dict.fromkeys(self._max_rows, 0)
        for record, arrays in self._all_rows():
            num_copied[record.rows.table_id] += record.rows.num_rows
            yield record, arrays
        wrong = [cut for cut in self._cuts if cut.num_rows != num_copied[cut.table_id]]
        if wrong:
            raise SnapshotFailed(
                f"the copy of change {self.change_number} has {num_copied[wrong[0].table_id]} rows of table "
                f"{wrong[0].table_id}, which had {wrong[0].num_rows}; this is a defect of shardam, please report it"
            )

    def _all_rows(self) -> Iterator[BaseRecord]:
        for cut in self._cuts:
            self._check()
            for rows in cut.pages(self._max_rows[cut.table_id]):
                self._check()
                if rows.row_ids.size:
                    yield rows_record(cut.table_id, rows)
                yield from self._kept_rows()
        yield from self._kept_rows()
        self._check()

    def _kept_rows(self) -> Iterator[BaseRecord]:
        for cut in self._cuts:
            for rows in cut.take_kept(self._max_rows[cut.table_id]):
                yield rows_record(cut.table_id, rows)

    def _check(self) -> None:
        self._state.check_whole()
        if self.closed:
            raise SnapshotFailed(f"the snapshot of change {self.change_number} was given up before it was copied")
