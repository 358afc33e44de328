"""Who wants to see rows of a table before a change touches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shardam_server.shard.records import Int64s


class RowWatcher(Protocol):
    """Learns of rows before a change touches them; under the table's lock for writing."""

    @property
    def ended(self) -> bool:
        """It need not be told of anything any more."""
        ...

    def before(self, row_ids: Int64s, slots: Int64s) -> Callable[[], None]:
        """Looks at distinct rows that are about to be changed.

        Returns:
            What is called when they are: not before, and not at all if the change fails.

        Raises:
            MemoryError: there is no room for what it notes; the change is refused.
        """
        ...


class RowWatchers:
    """The watchers of one table. Used on the sequencer's thread, whose changes they are told of."""

    def __init__(self) -> None:
        self._watchers: list[RowWatcher] = []

    def __bool__(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watchers)

    def add(self, watcher: RowWatcher) -> None:
        """Has a watcher told of rows until it has ended."""
        self._watchers.append(watcher)

    def before(self, row_ids: Int64s, slots: Int64s) -> list[Callable[[], None]]:
        """Tells all of rows that are about to be changed; returns what to call when they are.

        Raises:
            MemoryError: as RowWatcher.before.
        """
        self._watchers = [watcher for watcher in self._watchers if not watcher.ended]
        return [watcher.before(row_ids, slots) for watcher in self._watchers]
