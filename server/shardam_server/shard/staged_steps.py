"""One step on each of several tables, staged on all of them or on none."""

from __future__ import annotations

from collections.abc import Sequence

from shardam_server.shard.table import PreparedUpdate, StagedTableStep, Table


def stage_all(updates: Sequence[tuple[Table, PreparedUpdate]], change_number: int) -> list[tuple[Table, StagedTableStep]]:
    """Brings all parts to the device before the first is applied, so that none or all are.

    Raises:
        OutOfMemory: the device has no room; no table has changed.
    """
    staged: list[tuple[Table, StagedTableStep]] = []
    try:
        for table, update in updates:
            staged.append((table, table.stage(update, change_number)))
    except BaseException:
        discard_all(staged)
        raise
    return staged


def discard_all(staged: Sequence[tuple[Table, StagedTableStep]]) -> None:
    """Takes staged steps back."""
    for table, step in staged:
        table.discard(step)
