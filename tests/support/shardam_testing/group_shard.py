"""One shard's state with a sync group: its members contribute, and its steps are decided, without a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import ShardamError
from shardam_proto.schema import TableSpec
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.arrivals import Arrival, Proposal, propose
from shardam_server.shard.groups.changes import IncomingPart, Staging, decide, set_group, stage
from shardam_server.shard.groups.entries import GroupEntry
from shardam_server.shard.groups.values import (
    Contribution,
    Decision,
    End,
    Group,
    GroupTerms,
    Kind,
    Member,
    Reduce,
    Refusal,
    StepResult,
)
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection
from shardam_testing.shard_states import MemoryJournal, journaled_state, make_tables, seen
from shardam_testing.state_changes import part_bits

NAME = "workers"
ROW_IDS = range(8)
"""Rows that are looked at."""

OPTIONS = AdamOptions(lr=0.05, weight_decay=0.01)

Gradients = Mapping[int, tuple[Sequence[int], npt.ArrayLike]]
"""Table id -> row ids, gradients."""


def client_of(rank: int) -> bytes:
    return b"worker of rank %02d" % rank


@dataclasses.dataclass(frozen=True)
class Seen:
    """What groups show of a state, to be compared."""

    change_number: int
    groups: Sequence[GroupEntry]
    parts: Sequence[tuple[object, ...]]


def groups_seen(state: ShardState) -> Seen:
    groups = [dataclasses.replace(entry) for entry in state.groups]
    return Seen(state.change_number, groups, [part_bits(part) for part in state.groups.parts()])


class GroupShard:
    """A state whose clients of ranks 0 to num_ranks - 1 are in a sync group.

    Args:
        specs: of tables 1, 2, ...
        num_ranks: members, and the world size.
        reduce: of the group.
        max_rows: the shard's limit.
    """

    state: ShardState
    journal: MemoryJournal

    def __init__(self, specs: Sequence[TableSpec], num_ranks: int, *, reduce: Reduce = "mean", max_rows: int = 0) -> None:
        self.state, self.journal = journaled_state()
        self.state.max_rows = max_rows
        self.state.install(make_tables(specs))
        self.num_ranks = num_ranks
        for rank in range(num_ranks):
            self.state.open_client(client_of(rank), heartbeats=True)
        members = tuple(Member(rank, client_of(rank)) for rank in range(num_ranks))
        set_group(self.state, Group(NAME, GroupTerms("sync", num_ranks, reduce=reduce), 1, members, 0), 0)

    @property
    def entry(self) -> GroupEntry:
        entry = self.state.groups.find(NAME)
        assert entry is not None
        return entry

    def everything(self) -> tuple[object, ...]:
        """All that is to be seen of the shard, and the size of its journal."""
        return seen(self.state, ROW_IDS), groups_seen(self.state), len(self.journal.frames)

    def refuses(self, action: Callable[[], object], kind: type[ShardamError], match: str | None = None) -> ShardamError:
        """Asserts that an action is refused and that it changed nothing; returns the error."""
        before = self.everything()
        with pytest.raises(kind, match=match) as error:
            action()
        assert self.everything() == before
        return error.value

    def number(self, rank: int) -> int:
        """The client's next number."""
        client = self.state.clients.find(client_of(rank))
        assert client is not None
        return client.last_number + 1

    def incoming(
        self,
        rank: int,
        gradients: Gradients | None = None,
        *,
        kind: Kind = "gradient",
        step: int | None = None,
        number: int | None = None,
        content: str = "",
        options: AdamOptions = OPTIONS,
        grad_scale: float = 1.0,
    ) -> IncomingPart:
        """A part of the next step under the client's next number; content: what tells its digest from another one's."""
        sections = []
        for table_id, (row_ids, rows) in (gradients or {}).items():
            table = self.state.table(table_id)
            values = np.array(rows, np.float32).reshape(len(row_ids), table.spec.dim)
            sections.append(GradientSection(table, np.array(row_ids, np.int64), values, options, grad_scale))
        number = self.number(rank) if number is None else number
        origin = Origin(client_of(rank), number, f"number {number} {content}".encode())
        return IncomingPart(origin, self.entry.step + 1 if step is None else step, rank, kind, sections)

    def stage(
        self,
        rank: int,
        gradients: Gradients | None = None,
        *,
        kind: Kind = "gradient",
        options: AdamOptions = OPTIONS,
        grad_scale: float = 1.0,
    ) -> Staging:
        """Stages a rank's part of the next step."""
        return stage(self.state, self.incoming(rank, gradients, kind=kind, options=options, grad_scale=grad_scale))

    def arrivals(self, *ranks: int) -> dict[bytes, Arrival]:
        """Arrivals of ranks whose parts are staged here, with the peaks of this shard; no ranks: of all."""
        arrivals = {}
        for rank in ranks or range(self.num_ranks):
            part = self.state.groups.part(client_of(rank))
            assert part is not None, f"rank {rank} has staged nothing"
            peaks = {table_id: gradient.peak for table_id, gradient in part.tables.items()}
            arrivals[client_of(rank)] = Arrival(client_of(rank), part.origin.number, peaks)
        return arrivals

    def propose(self, arrivals: Mapping[bytes, Arrival] | None = None) -> Proposal:
        """What home would decide; all ranks have arrived unless told otherwise."""
        parts = {part.origin.client_id: part for part in self.state.groups.parts()}
        proposal = propose(self.entry.group, self.entry.step + 1, self.arrivals() if arrivals is None else arrivals, parts)
        assert proposal is not None
        return proposal

    def finish_step(self) -> StepResult:
        """Decides the step of all ranks' staged parts and carries it out."""
        decision = self.propose().decision
        decide(self.state, decision)
        return self.result(decision.contributions[0].rank)

    def decision(self, end: End, *ranks: int, refusal: Refusal | None = None) -> Decision:
        """A decision of the next step that counts the next number of each of these ranks."""
        contributions = []
        for rank in ranks:
            part = self.state.groups.part(client_of(rank))
            kind: Kind = "gradient" if part is None else part.kind
            contributions.append(Contribution(rank, client_of(rank), self.number(rank), kind))
        return Decision(NAME, self.entry.step + 1, tuple(contributions), end, refusal)

    def result(self, rank: int, number: int | None = None) -> StepResult:
        """How a number has ended; the last one unless told otherwise."""
        client = self.state.clients.find(client_of(rank))
        assert client is not None
        result = client.outcomes[client.last_number if number is None else number][1].result
        assert result is not None
        return result
