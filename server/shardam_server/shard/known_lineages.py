"""Which state a shard may serve: lineages, and when a shard is LOST (PROTOCOL.md, sections 6 and 9).

A lineage names a state from its first empty start on. Whoever comes back with another one, or with none, would let workers
train on against fresh rows without noticing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self


def is_lost(own: int | None, known: int | None, *, cluster_formed: bool) -> bool:
    """Says whether a starting shard lacks the state that its cluster knows for it.

    Args:
        own: lineage of the state that it has recovered; None: it has none.
        known: lineage that the cluster knows for its index, if any.
        cluster_formed: the route map was made before this shard registered, so another life of it has served. A Redis that was
            emptied may have forgotten the lineages, but every shard with a folder brings the map back.
    """
    if own is None:
        return known is not None or cluster_formed
    return known is not None and known != own


class HighMark(NamedTuple):
    """How far a shard's state is known to have come, on its disk.

    Attributes:
        lineage: lineage of the state.
        change_number: the highest change number that its owner has told.
    """

    lineage: int
    change_number: int

    def to_text(self) -> str:
        """Returns the value stored in Redis."""
        return f"{self.lineage}:{self.change_number}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads the value stored in Redis.

        Raises:
            ValueError: it is not of this form.
        """
        lineage, change_number = text.split(":")
        return cls(int(lineage), int(change_number))

    def is_above(self, lineage: int, change_number: int) -> bool:
        """True: a state lacks changes that the cluster has seen of it: an older copy of its folder, or one that was cut."""
        return lineage == self.lineage and change_number < self.change_number


class KnownLineages:
    """The lineages and high marks of all shards as one shard has last seen them, kept for a Redis that forgets.

    Args:
        index: the shard's own index; its own lineage is known better by itself.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._seen: dict[int, int] = {}
        self._marks: dict[int, HighMark] = {}

    def note(self, lineages: Mapping[int, int], marks: Mapping[int, HighMark]) -> None:
        """Remembers what Redis says now."""
        self._seen.update(lineages)
        self._marks.update(marks)

    def marks_missing_from(self, marks: Mapping[int, HighMark]) -> dict[int, HighMark]:
        """Returns the high marks of other shards that Redis does not know any more."""
        return {index: mark for index, mark in self._marks.items() if index not in marks and index != self._index}

    def missing_from(self, lineages: Mapping[int, int], *, without_own: bool) -> dict[int, int]:
        """Returns what Redis does not know any more.

        Args:
            lineages: what Redis says now.
            without_own: leave this shard's own lineage out, because it states that itself.
        """
        return {
            index: lineage
            for index, lineage in self._seen.items()
            if index not in lineages and not (without_own and index == self._index)
        }
