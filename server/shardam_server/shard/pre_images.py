"""Rows as they were at a cut: those that nobody has changed since, and pre-images of those that were.

A copier goes through each table in the order of its index, a page at a time under the table's lock, while changes go on. Before
one touches a row of the cut that the copier has not come to, the row is kept as it is; the copier writes what is kept, too.
What is kept is bounded: beyond, changes wait for the copier.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from shardam_server.shard.records import Int64s
from shardam_server.shard.row_counters import RowCounters
from shardam_server.shard.storage import RowCopies
from shardam_server.shard.table import Table

COUNTER_BYTES = 8 + 4 + 8 + 8
"""Bytes of a row beside its floats: id, row step, last touched step, change number."""

LEAST_PRE_IMAGE_BYTES = 64 * 2**20
"""Pre-images that are kept whatever the size of the tables: as much as the largest push message."""

ROWS_SHARE = 8
"""Beyond that, the pre-images of one snapshot may take this part of the bytes of the rows."""


def row_bytes(dim: int) -> int:
    """Returns the bytes of one row in a base; its weight is float32 there whatever the table's dtype."""
    return COUNTER_BYTES + 3 * 4 * dim


class PreImageRoom:
    """Bounds the pre-images of one snapshot.

    Args:
        limit_bytes: from here on changes wait.

    Attributes:
        kept_bytes: bytes that are kept now.
        closed: the snapshot has ended; nothing is kept any more.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.kept_bytes = 0
        self.closed = False
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()

    def add(self, num_bytes: int) -> None:
        """Counts what is kept from now on; below zero: what is not any more."""
        with self._changed:
            if not self.closed:
                self.kept_bytes += num_bytes
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting, and keeping."""
        with self._changed:
            self.closed = True
            self.kept_bytes = 0
            self._changed.notify_all()

    def is_full(self) -> bool:
        """Returns whether changes have to wait."""
        return not self.closed and self.kept_bytes >= self._limit_bytes

    def wait(self) -> None:
        """Waits until there is room; for a change, before it takes any lock."""
        with self._changed:
            while self.is_full():
                self._changed.wait()


class OpenSnapshots:
    """The snapshots of a state that are being copied. Added to and waited for on the sequencer's thread.

    Attributes:
        waited_s: how long changes have waited for a copier so far.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._rooms: tuple[PreImageRoom, ...] = ()

    def add(self, room: PreImageRoom) -> None:
        """Has changes wait where a new snapshot has no room."""
        self._rooms = (*(known for known in self._rooms if not known.closed), room)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all pre-images; from any thread."""
        return sum(room.kept_bytes for room in self._rooms)

    def wait_for_room(self) -> None:
        """Waits until all snapshots have room."""
        for room in self._rooms:
            if room.is_full():
                began = time.monotonic()
                room.wait()
                self.waited_s += time.monotonic() - began


class TableCut:
    """One table at a cut, and how far its copier is.

    Made on the sequencer's thread; the copier's thread goes through it.

    Args:
        table: the table.
        change_number: the last change of the cut.
        room: of the snapshot.

    Attributes:
        num_rows: rows at the cut.
    """

    def __init__(self, table: Table, change_number: int, room: PreImageRoom) -> None:
        self.num_rows = table.num_rows
        self._table = table
        self._change_number = change_number
        self._room = room
        self._next_key: int | None = 0
        self._kept: collections.deque[RowCopies] = collections.deque()
        self._kept_lock = threading.Lock()
        if self.num_rows:
            table.storage.watchers.add(self)

    @property
    def table_id(self) -> int:
        """The table's id."""
        return self._table.table_id

    @property
    def ended(self) -> bool:
        """No row is to be kept any more: all are copied, or the snapshot has ended."""
        return self._next_key is None or self._room.closed

    # -- changes, under the table's lock for writing

    def before(self, row_ids: Int64s, slots: Int64s) -> Callable[[], None]:
        """Takes a picture of those of these rows that are of the cut and not copied; returns what keeps it.

        Raises:
            MemoryError: there is no room.
        """
        next_key, storage = self._next_key, self._table.storage
        if next_key is None:
            return _nothing
        due = storage.change_numbers(slots) <= np.uint64(self._change_number)
        if next_key:
            due &= storage.scan_keys(row_ids) >= np.uint64(next_key)
        if not due.any():
            return _nothing
        rows = storage.copy_rows(row_ids[due], slots[due])

        def keep() -> None:
            with self._kept_lock:
                if self._room.closed:
                    return
                self._kept.append(rows)
            self._room.add(self._bytes(rows))

        return keep

    # -- the copier

    def pages(self, max_rows: int) -> Iterator[RowCopies]:
        """Yields the rows that are as they were at the cut, up to so many at a time; others are kept, or not of it."""
        while self._next_key is not None:
            with self._table.lock.read():
                rows, self._next_key = self._table.storage.copy_page(self._next_key, max_rows, self._change_number)
            yield rows

    def take_kept(self, max_rows: int) -> Iterator[RowCopies]:
        """Yields the rows that are kept by now, up to so many at a time; each batch counts until the next is asked for."""
        while batch := self._take_batch(max_rows):
            rows = batch[0] if len(batch) == 1 else _joined(batch)
            num_rows = rows.row_ids.size
            for start in range(0, num_rows, max_rows):
                yield rows if num_rows <= max_rows else _part(rows, start, start + max_rows)
            self._room.add(-self._bytes(rows))

    def _take_batch(self, max_rows: int) -> list[RowCopies]:
        """Returns the first that are kept: one, or as many as have so many rows together."""
        with self._kept_lock:
            batch, num_rows = list[RowCopies](), 0
            while self._kept and (not batch or num_rows + self._kept[0].row_ids.size <= max_rows):
                batch.append(self._kept.popleft())
                num_rows += batch[-1].row_ids.size
            return batch

    def drop(self) -> None:
        """Forgets what is kept; the snapshot has ended."""
        with self._kept_lock:
            self._kept.clear()

    def _bytes(self, rows: RowCopies) -> int:
        return rows.row_ids.size * row_bytes(self._table.spec.dim)


def _nothing() -> None:
    """Keeps nothing."""


def _joined(batches: list[RowCopies]) -> RowCopies:
    counters = [rows.counters for rows in batches]
    return RowCopies(
        np.concatenate([rows.row_ids for rows in batches]),
        np.concatenate([rows.weight for rows in batches]),
        np.concatenate([rows.exp_avg for rows in batches]),
        np.concatenate([rows.exp_avg_sq for rows in batches]),
        RowCounters(
            np.concatenate([one.row_step for one in counters]),
            np.concatenate([one.touched_step for one in counters]),
            np.concatenate([one.change_number for one in counters]),
        ),
    )


def _part(rows: RowCopies, start: int, end: int) -> RowCopies:
    counters = rows.counters
    return RowCopies(
        rows.row_ids[start:end],
        rows.weight[start:end],
        rows.exp_avg[start:end],
        rows.exp_avg_sq[start:end],
        RowCounters(counters.row_step[start:end], counters.touched_step[start:end], counters.change_number[start:end]),
    )
