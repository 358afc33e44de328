"""Reads of tables beside their changes: one that finds a table being written does not hold up those of other tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from shardam_server.shard.context import ShardContext
from shardam_server.shard.locks import ReadWriteLock
from shardam_server.shard.table import Table, read_locks

T = TypeVar("T")


async def read_tables(shard: ShardContext, tables: Sequence[Table], action: Callable[[], T]) -> T:
    """Runs a read while its tables are held, so that it sees each between whole changes.

    Only one change is applied at a time, so reads that wait for it wait together, on threads of their own.

    Raises:
        QueueFull: too many reads wait.
        JournalFailed: memory may hold a change in part.
        ShardamError: what action raises.
    """

    def wait_and_read() -> T:
        with read_locks(tables):
            shard.state.check_whole()  # with the locks: the change before may have ended so
            return action()

    at_once = await shard.sequencer.read(lambda: read_at_once(shard, tables, action))
    return at_once[0] if at_once else await shard.sequencer.wait_and_read(wait_and_read)


def read_at_once(shard: ShardContext, tables: Sequence[Table], action: Callable[[], T]) -> list[T]:
    """Runs a read while its tables are held; empty: a change of one of them is in the way, and nothing was read.

    Raises:
        JournalFailed: memory may hold a change in part.
        ShardamError: what action raises.
    """
    held: list[ReadWriteLock] = []
    try:
        for table in tables if len(tables) == 1 else {table.table_id: table for table in tables}.values():
            if not table.lock.enter_at_once():
                return []
            held.append(table.lock)
        shard.state.check_whole()  # with the locks: the change before may have ended so
        return [action()]
    finally:
        for lock in held:
            lock.leave()
