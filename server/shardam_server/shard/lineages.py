"""Which shards have started empty while clients were known, so that nobody closes these clients' numbers there.

Such a shard took over the table steps of its peers, and with them the steps of every number that these clients had pushed:
closing the numbers there would count the steps twice.
"""

from __future__ import annotations

from collections.abc import Iterable


class SeenLineages:
    """Lineages of other shards as home has seen them, and what their changes mean for clients."""

    def __init__(self) -> None:
        self._lineages: dict[int, int] = {}
        self._given_up: dict[int, set[bytes]] = {}

    def note(self, index: int, lineage: int) -> bool:
        """Notes a shard's lineage; returns whether it had another one before."""
        before = self._lineages.get(index, lineage)
        self._lineages[index] = lineage
        return before != lineage

    def give_up(self, index: int, client_ids: Iterable[bytes]) -> None:
        """Notes the clients that were known when a shard started empty."""
        self._given_up.setdefault(index, set()).update(client_ids)

    def has_given_up(self, index: int, client_id: bytes) -> bool:
        """True: the shard started empty after this client had opened."""
        return client_id in self._given_up.get(index, ())

    def forget(self, client_id: bytes) -> None:
        """Forgets a client that is closed on all shards."""
        for client_ids in self._given_up.values():
            client_ids.discard(client_id)
