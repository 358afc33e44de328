"""Rows that staged parts will create. They count towards the limits before they exist: a decided step must not be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from shardam_kernels import native
from shardam_server.shard.groups.entries import Groups
from shardam_server.shard.records import Int64s
from shardam_server.shard.table import Table


class PendingRows:
    """Rows that the staged parts of one shard will create, by table. Used from the sequencer's thread alone.

    Args:
        groups: has the parts.
        table: finds a table by its id.
    """

    def __init__(self, groups: Groups, table: Callable[[int], Table]) -> None:
        self._groups = groups
        self._table = table
        self._as_of = -1
        self._row_ids: dict[int, native.HashIndex] = {}

    def count(self, change_number: int, more: Iterable[tuple[Table, Int64s]]) -> list[tuple[Table, int]]:
        """Counts, for each table, the rows that staged parts will create and those that a change will create beside them.

        Args:
            change_number: of the last change.
            more: tables, each once, and distinct ids that the change names.
        """
        self._bring_up_to(change_number)
        counts = {self._table(table_id): len(row_ids) for table_id, row_ids in self._row_ids.items()}
        for table, named in more:
            row_ids, pending = table.absent(named), self._row_ids.get(table.table_id)
            known = 0 if pending is None else pending.lookup(row_ids, np.empty(row_ids.size, np.int64))
            counts[table] = counts.get(table, 0) + row_ids.size - known
        return list(counts.items())

    def add(self, tables: Iterable[tuple[Table, Int64s]]) -> None:
        """Takes over a part's distinct ids, before it is staged: `keep` must follow, else all is counted anew."""
        self._as_of = -1
        for table, named in tables:
            row_ids, pending = table.absent(named), self._row_ids.setdefault(table.table_id, native.HashIndex())
            pending.insert(row_ids, np.empty(row_ids.size, np.int64), np.empty(row_ids.size, np.uint8))

    def keep(self, change_number: int) -> None:
        """Notes that what was added is staged, by this change."""
        self._as_of = change_number

    def _bring_up_to(self, change_number: int) -> None:
        """Counts anew unless nothing but parts has come since: rows may have come or gone, and parts been dropped."""
        if self._as_of == change_number:
            return
        self._row_ids.clear()
        for part in self._groups.parts():
            self.add((self._table(table_id), gradient.row_ids) for table_id, gradient in part.tables.items())
        self.keep(change_number)
