"""What shards remembered of clients and groups, as other shards go on from it (PROTOCOL.md, sections 4 and 8).

A cut has equal numbers on all shards. What differs is how much of a number each shard did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from shardam_server.shard.clients import ANY_CONTENT, WINDOW, ClientEntry, Outcome
from shardam_server.shard.groups.entries import GroupEntry


@dataclasses.dataclass(frozen=True)
class Remembered:
    """What one shard that wrote a checkpoint remembered.

    Attributes:
        clients: its clients, the oldest first.
        groups: its groups.
    """

    clients: Sequence[tuple[bytes, ClientEntry]]
    groups: Sequence[GroupEntry]


def merge_clients(remembered: Sequence[Remembered], index: int) -> list[tuple[bytes, ClientEntry]]:
    """Returns the clients of a shard, the oldest first, where the number of shards has changed.

    A number's content was split over other shards than there are now, so whatever comes with it is taken for its repeat. Rows
    that it changed are counted once over all shards: on shard 0.

    Args:
        remembered: of each shard that wrote the checkpoint.
        index: the shard that loads.
    """
    entries: dict[bytes, list[ClientEntry]] = {}
    for one in remembered:
        for client_id, entry in one.clients:
            entries.setdefault(client_id, []).append(entry)
    return [(client_id, _merge_client(found, len(remembered), index)) for client_id, found in entries.items()]


def _merge_client(entries: Sequence[ClientEntry], num_shards: int, index: int) -> ClientEntry:
    last_number = _last_number(entries, num_shards)
    numbers = sorted({number for entry in entries for number in entry.outcomes if last_number >= number > last_number - WINDOW})
    closed = any(entry.closed for entry in entries)
    return ClientEntry(
        last_number=last_number,
        closed=closed,
        settled=closed,  # its numbers are equal from here on
        heartbeats=any(entry.heartbeats for entry in entries),
        outcomes={number: (ANY_CONTENT, _merge_outcomes(number, entries, index)) for number in numbers},
        clock=max(entry.clock for entry in entries),
    )


def _last_number(entries: Sequence[ClientEntry], num_shards: int) -> int:
    """Returns the number up to which all shards have a client's changes; where nobody brings them level, what may be repeated.

    A client without heartbeats, such as that of a REST change, may have broken off between two shards. If what some shards have
    is changes of rows alone, it is as if it had not come: the repeat writes the same rows again, everywhere. A push is not
    applied twice.
    """
    highest = max(entry.last_number for entry in entries)
    if any(entry.heartbeats or entry.closed for entry in entries):
        return highest
    lowest = min(entry.last_number for entry in entries) if len(entries) == num_shards else 0
    beyond = [outcome for entry in entries for number, (_, outcome) in entry.outcomes.items() if number > lowest]
    return highest if any(outcome.steps or outcome.result is not None for outcome in beyond) else lowest


def _merge_outcomes(number: int, entries: Iterable[ClientEntry], index: int) -> Outcome:
    outcomes = [entry.outcomes[number][1] for entry in entries if number in entry.outcomes]
    steps = {table_id: step for outcome in outcomes for table_id, step in outcome.steps.items()}
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    # A shard that had closed the number before its step was decided knows of no contributions; the others do.
    result = max(results, key=lambda one: one.num_contributions, default=None)
    changed = [outcome.change_number for outcome in outcomes if outcome.num_rows]
    num_rows = sum(outcome.num_rows for outcome in outcomes) if index == 0 else 0
    return Outcome(steps, num_rows, max(changed or [outcome.change_number for outcome in outcomes]), result)


def merge_groups(remembered: Sequence[Remembered]) -> list[GroupEntry]:
    """Returns the groups, each as the shard knew it that was told of its members last."""
    merged: dict[str, GroupEntry] = {}
    for one in remembered:
        for entry in one.groups:
            other = merged.get(entry.group.name)
            merged[entry.group.name] = entry if other is None else _merge_group(other, entry)
    return list(merged.values())


def _merge_group(one: GroupEntry, other: GroupEntry) -> GroupEntry:
    group = max(one.group, other.group, key=lambda group: group.version)
    ahead = max(one, other, key=lambda entry: (entry.step, entry.decision is not None))
    return GroupEntry(group, ahead.step, ahead.decision)
