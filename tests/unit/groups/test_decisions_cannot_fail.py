"""What is staged can be carried out: a decision that home has made is refused by no shard, whatever it merges."""

from __future__ import annotations

import numpy as np
import pytest
from shardam_testing.matrix import num_threads
from shardam_testing.shard_states import make_tables

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import NonFiniteGradient, RowLimit
from shardam_proto.schema import TableSpec
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.arrivals import Arrival, propose
from shardam_server.shard.groups.changes import IncomingPart, Staging, check_step, set_group, stage
from shardam_server.shard.groups.values import Group, GroupTerms, Member
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection

CLIENTS = (b"a" * 16, b"b" * 16)


def shard_of_two(max_rows: int = 0) -> ShardState:
    """Returns a shard with two tables and a sync group of two ranks."""
    state = ShardState(CpuDevice(num_threads()), max_rows)
    state.install(make_tables([TableSpec("words", 2), TableSpec("users", 2)]))
    for client_id in CLIENTS:
        state.open_client(client_id)
    members = tuple(Member(rank, client_id) for rank, client_id in enumerate(CLIENTS))
    set_group(state, Group("workers", GroupTerms("sync", 2), 1, members), 0)
    return state


def send(state: ShardState, rank: int, table_id: int, row_ids: list[int], value: float = 1.0, scale: float = 1.0) -> Staging:
    gradients = np.full((len(row_ids), 2), value, np.float32)
    section = GradientSection(state.table(table_id), np.array(row_ids), gradients, AdamOptions(), scale)
    return stage(state, IncomingPart(Origin(CLIENTS[rank], 1, b"digest"), 1, rank, "gradient", [section]))


def test_the_row_limit_counts_what_other_ranks_have_staged_in_other_tables() -> None:
    state = shard_of_two(max_rows=5)
    send(state, 0, 1, [1, 2, 3])
    with pytest.raises(RowLimit):
        send(state, 1, 2, [4, 5, 6])
    send(state, 1, 2, [4, 5])


def test_sums_that_pass_float32_before_they_are_unscaled_are_checked_before_the_decision() -> None:
    state = shard_of_two()
    stagings = [send(state, rank, 1, [1], value=2.0**127, scale=2.0**100) for rank in range(2)]
    arrivals = {client_id: Arrival(client_id, 1, staging.peaks) for client_id, staging in zip(CLIENTS, stagings, strict=True)}
    entry = state.groups.find("workers")
    assert entry is not None
    proposal = propose(entry.group, 1, arrivals, {part.origin.client_id: part for part in state.groups.parts()})
    assert proposal is not None
    assert proposal.needs_check
    with pytest.raises(NonFiniteGradient):
        check_step(state, proposal.decision)
