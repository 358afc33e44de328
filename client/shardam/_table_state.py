"""A table's state as a whole: what was written into an empty table, step included, and when it was read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from shardam._parts import RowWrite, assign_change
from shardam._shards import Shards
from shardam._unary_reads import unary_read
from shardam._values import TableStats
from shardam_proto.errors import CheckpointMismatch
from shardam_proto.v1 import table_pb2

if TYPE_CHECKING:
    from shardam.table import Table

DELETED_AT_ONCE = 1_000_000
"""Ids of one delete: 8 MB, well within a message on whichever shard they are."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a table was read: two equal ones, one before and one after, say that no shard changed in between.

    Attributes:
        shards: of each shard its lineage, timeline and change number, and the table's step there.
    """

    shards: tuple[tuple[int, int, int, int], ...]

    @property
    def table_step(self) -> int:
        """The table's step on home."""
        return self.shards[0][3]

    @property
    def steps_agree(self) -> bool:
        """True: all shards have the same step; else a push was on its way."""
        return len({shard[3] for shard in self.shards}) == 1


def moment_of(table: Table) -> Moment:
    """Asks all shards.

    Raises:
        ShardamError: as Table.stats.
    """
    session = table.cluster._ready_to_read()
    request = table_pb2.ListTablesRequest(names=[table.name])

    def ask(shards: Shards) -> Moment:
        calls = [unary_read(session, link, lambda target: target.tables.ListTables, request) for link in shards.links]
        answers = [session.answer(call) for call in calls]
        return Moment(
            tuple(
                (answer.header.lineage, answer.header.timeline, answer.header.change_number, answer.tables[0].table_step)
                for answer in answers
            )
        )

    return session.ask(ask)


def check_replaceable(table: Table, table_step: int | None, *, overwrite: bool, source: str) -> TableStats:
    """Refuses to write over rows unless told to, and a step that would go backwards.

    Args:
        table: it exists.
        table_step: the step that it shall have; None: its own.
        overwrite: rows of the table may be replaced and deleted.
        source: where the new state comes from, for messages.

    Returns:
        The table's state so far.

    Raises:
        CheckpointMismatch: with the remedy; nothing was changed.
    """
    stats = table.stats()
    if not overwrite and (stats.num_rows or stats.table_step):
        raise CheckpointMismatch(
            f"table {table.name!r} has {stats.num_rows} rows and step {stats.table_step}, which {source} would replace; say "
            "overwrite=True, or name another table",
            metadata={"table": table.name},
        )
    if table_step is not None and stats.table_step not in (0, table_step):
        raise CheckpointMismatch(
            f"table {table.name!r} has taken {stats.table_step} steps and {source} has step {table_step}: moments go with "
            "their step, and a table's step is only set where it is 0; name another table, or take the weights alone "
            "(weights_only=True)",
            metadata={"table": table.name},
        )
    return stats


def write_rows(table: Table, write: RowWrite) -> int:
    """Writes rows, numbered, with all that a RowWrite says; the values are checked.

    Returns:
        How many rows were written.

    Raises:
        ShardamError: as Table.assign.
    """
    session, pusher = table.cluster._ready_to_write()
    change = assign_change(table.name, table.info().table_id, write, session.route_map)
    pusher.run(change)
    return sum(answer.num_assigned for answer in change.answers.values())


def delete_others(table: Table, kept: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Deletes the rows of a table that are not among the given ids, which are sorted.

    Returns:
        How many rows were deleted.
    """
    others = [rows.row_ids[~np.isin(rows.row_ids, kept)] for rows in table.scan()]
    ids = np.concatenate(others) if others else np.empty(0, np.int64)
    return sum(table.delete(ids[start : start + DELETED_AT_ONCE]) for start in range(0, ids.size, DELETED_AT_ONCE))
