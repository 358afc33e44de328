"""Reads of tables beside their changes: one that finds a table being written does not hold up those of other tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shardam_server.shard.context import ShardContext
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

    def read_at_once() -> list[T]:
        with _try_read_locks(tables) as held:
            return [read()] if held else []

    def wait_and_read() -> T:
        with read_locks(tables):
            return read()

    def read() -> T:
        shard.state.check_whole()  # with the locks: the change before may have ended so
        return action()

    at_once = await shard.sequencer.read(read_at_once)
    return at_once[0] if at_once else await shard.sequencer.wait_and_read(wait_and_read)


@contextlib.contextmanager
def _try_read_locks(tables: Sequence[Table]) -> Iterator[bool]:
    """Holds all tables for reading and yields True, or yields False and holds none."""
    with contextlib.ExitStack() as stack:
        yield all(stack.enter_context(table.lock.try_read()) for table in {table.table_id: table for table in tables}.values())
