"""Which state a shard may serve: lineages, and when a shard is LOST (PROTOCOL.md, sections 6 and 9).

A lineage names a state from its first empty start on. Whoever comes back with another one, or with none, would let workers
train on against fresh rows without noticing.
"""

from __future__ import annotations

from collections.abc import Mapping


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


class KnownLineages:
    """The lineages of all shards as one shard has last seen them, kept for a Redis that forgets.

    Args:
        index: the shard's own index; its own lineage is known better by itself.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._seen: dict[int, int] = {}

    def note(self, lineages: Mapping[int, int]) -> None:
        """Remembers what Redis says now."""
        self._seen.update(lineages)

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
