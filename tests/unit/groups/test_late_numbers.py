"""A number whose step was decided without it, on a shard that had refused its part."""

from __future__ import annotations

import numpy as np
import pytest
from shardam_testing.matrix import num_threads
from shardam_testing.shard_states import make_tables

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import NonFiniteGradient
from shardam_proto.schema import TableSpec
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, decide, set_group, stage
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member, Refusal
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection

MEMBERS = (b"a" * 16, b"b" * 16)


def test_closing_it_by_hand_is_a_repeat_where_its_part_came_once_more() -> None:
    state = ShardState(CpuDevice(num_threads()))
    state.install(make_tables([TableSpec("words", 2)]))
    for client_id in MEMBERS:
        state.open_client(client_id)
    members = tuple(Member(rank, client_id) for rank, client_id in enumerate(MEMBERS))
    set_group(state, Group("workers", GroupTerms("sync", 2), 1, members), 0)
    gradients = np.full((1, 2), np.nan, np.float32)
    section = GradientSection(state.table(1), np.array([1]), gradients, AdamOptions(), 1.0)
    part = IncomingPart(Origin(MEMBERS[1], 1, b"part"), 1, 1, "gradient", [section])
    with pytest.raises(NonFiniteGradient):
        stage(state, part)
    counted = (Contribution(0, MEMBERS[0], 1, "empty"),)
    decide(state, Decision("workers", 1, counted, "refused", Refusal("STEP_TIMEOUT", "rank 1 did not arrive")))
    outcome = stage(state, part).outcome
    assert outcome is not None
    origin = Origin(MEMBERS[1], 1, b"close")
    assert state.run_number(origin, lambda: state.void([], origin)) == (outcome, True)
