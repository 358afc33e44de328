"""Changes of a shard's state that groups make: members, clocks, parts of all kinds, steps with every end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_server.shard.groups.changes import IncomingPart, decide, set_group, stage
from shardam_server.shard.groups.values import Contribution, Decision, End, Group, GroupTerms, Kind, Member, Refusal
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection
from shardam_testing.state_changes import Change, find, origin, rows

MEMBERS = (b"m" * 16, b"n" * 16)
"""Clients by rank."""

SYNC = GroupTerms("sync", len(MEMBERS))
BOUNDED = GroupTerms("bounded", len(MEMBERS), max_staleness=1)

OPTIONS = AdamOptions(lr=0.05, weight_decay=0.01)

REFUSAL = Refusal("STEP_TIMEOUT", "rank 1 did not arrive", {"ranks": "1"})


def group(terms: GroupTerms, version: int, ranks: Sequence[int]) -> Group:
    members = tuple(Member(rank, MEMBERS[rank], restart_count=rank) for rank in ranks)
    return Group(terms.mode, terms, version, members, complete_restart_count=0)


def members(terms: GroupTerms, version: int, *ranks: int, step: int = 0) -> Change:
    """A group named as its mode."""
    return lambda state: set_group(state, group(terms, version, ranks), step)


def bounded_push(rng: np.random.Generator, rank: int, clock: int, name: str) -> Change:
    row_ids, seed = rng.integers(0, 20, 4), rng.integers(0, 2**31)

    def change(state: ShardState) -> object:
        table = find(state, name)
        gradients = rows(np.random.default_rng(seed), row_ids.size, table.spec.dim)
        section = GradientSection(table, row_ids, gradients, OPTIONS, 1.0)
        return state.push([section], origin(state, MEMBERS[rank], clock=clock))

    return change


def bounded_skip(rank: int, clock: int) -> Change:
    return lambda state: state.void([], origin(state, MEMBERS[rank], clock=clock))


def part(rng: np.random.Generator, rank: int, *names: str, kind: Kind = "gradient", num_rows: int = 6) -> Change:
    """A part of the sync group's next step, with duplicates, and the padding row where there is one."""
    row_ids = {name: rng.integers(0, 12, num_rows) for name in names}
    seed = rng.integers(0, 2**31)

    def change(state: ShardState) -> object:
        values, sections = np.random.default_rng(seed), []
        for name, ids in row_ids.items():
            table = find(state, name)
            sections.append(GradientSection(table, ids, rows(values, ids.size, table.spec.dim), OPTIONS, 4.0))
        entry = state.groups.find("sync")
        assert entry is not None
        return stage(state, IncomingPart(origin(state, MEMBERS[rank]), entry.step + 1, rank, kind, sections))

    return change


def decision(end: End, *ranks: int) -> Change:
    """The sync group's next step, which counts the next number of each of these ranks."""

    def change(state: ShardState) -> object:
        entry = state.groups.find("sync")
        assert entry is not None
        contributions = []
        for rank in ranks:
            staged, number = state.groups.part(MEMBERS[rank]), origin(state, MEMBERS[rank]).number
            contributions.append(Contribution(rank, MEMBERS[rank], number, "gradient" if staged is None else staged.kind))
        refusal = REFUSAL if end == "refused" else None
        return decide(state, Decision("sync", entry.step + 1, tuple(contributions), end, refusal))

    return change


def late_part(rng: np.random.Generator, rank: int, name: str) -> Change:
    """A part of the step that was decided last."""
    row_ids = rng.integers(0, 20, 3)

    def change(state: ShardState) -> object:
        entry, table = state.groups.find("sync"), find(state, name)
        assert entry is not None
        section = GradientSection(table, row_ids, np.ones((3, table.spec.dim), np.float32), OPTIONS, 4.0)
        return stage(state, IncomingPart(origin(state, MEMBERS[rank]), entry.step, rank, "gradient", [section]))

    return change


def delete_as(rank: int, name: str) -> Change:
    """A member's change of rows between steps."""
    return lambda state: state.delete(find(state, name), np.array([1, 2, 3]), origin=origin(state, MEMBERS[rank]))


def step_on(rng: np.random.Generator, *names: str) -> Change:
    """What comes next for the sync group: a client, members, a part of the next rank, or the decision of all parts."""
    next_part = {rank: part(rng, rank, *names) for rank in range(len(MEMBERS))}

    def change(state: ShardState) -> object:
        for client_id in MEMBERS:
            if state.clients.find(client_id) is None:
                return state.open_client(client_id, heartbeats=True)
        if state.groups.find("sync") is None:
            return members(SYNC, 1, 0, 1)(state)
        for rank, client_id in enumerate(MEMBERS):
            if state.groups.part(client_id) is None:
                return next_part[rank](state)
        return decision("applied", *range(len(MEMBERS)))(state)

    return change


def group_changes(rng: np.random.Generator) -> list[Change]:
    """A history over tables words, users, items and tags, after which no group has members."""
    return [
        lambda state: state.open_client(MEMBERS[0], heartbeats=True),
        lambda state: state.open_client(MEMBERS[1], heartbeats=True),
        members(BOUNDED, 1, 0),
        members(BOUNDED, 2, 0, 1),
        bounded_push(rng, 0, 1, "items"),
        bounded_skip(1, 1),
        bounded_push(rng, 0, 2, "tags"),
        members(BOUNDED, 3),
        members(SYNC, 1, 0, 1, step=41),
        part(rng, 1, "words", "users", "tags"),
        part(rng, 0, "words", "users"),
        decision("applied", 0, 1),
        delete_as(1, "words"),
        part(rng, 0, kind="abstain"),
        part(rng, 1, kind="abstain"),
        decision("abstained", 0, 1),
        part(rng, 0, "words", "items"),
        decision("refused", 0),
        late_part(rng, 1, "words"),
        part(rng, 0, kind="empty"),
        part(rng, 1, "items", "users", num_rows=0),
        decision("applied", 0, 1),
        part(rng, 0, "tags"),
        part(rng, 1, "users", "tags"),
        decision("refused", 0),  # and the other one's part is closed as late
        part(rng, 0, "words"),
        lambda state: state.end_client(MEMBERS[0]),  # its part is dropped
        part(rng, 1, "words", "users", "items", "tags"),
        members(SYNC, 2, 1),
        decision("applied", 1),
        decision("refused", 1),  # of a member whose part was refused here
        members(SYNC, 3),
    ]
