"""Groups where a shard is told to forget its state: home with all that it had decided, or another one in mid-decision."""

from __future__ import annotations

import asyncio

import numpy as np
from shardam_testing.shard_group import ShardGroup
from shardam_testing.shard_group_members import (
    RANK_0,
    RANK_1,
    arrive_request,
    group_steps,
    join,
    on_three_shards,
    push,
    step_of_both,
    table_steps,
)

from shardam_kernels.factors import AdamOptions
from shardam_server.shard.clients import Origin
from shardam_server.shard.table import GradientSection


async def decide(shards: ShardGroup, step: int, *, away: set[int]) -> None:
    """Has home decide a step that some shards are not told of."""
    for rank, client_id in enumerate((RANK_0, RANK_1)):
        push(shards, client_id, rank, step)
    shards.down |= away
    both = [
        shards.groups.steps.arrive(arrive_request(client_id, rank, step)) for rank, client_id in enumerate((RANK_0, RANK_1))
    ]
    await asyncio.gather(*both)
    await shards.until(
        "the others to be told",
        lambda: [index for index, known in enumerate(group_steps(shards)) if known < step] == sorted(away),
    )


@on_three_shards
async def test_a_decision_that_home_told_one_shard_alone_steps_all_tables_once_when_home_starts_empty(
    shards: ShardGroup,
) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    await step_of_both(shards, 1)
    await decide(shards, 2, away={2})
    await shards.stop_home()  # it never comes back
    shards.down.clear()
    await shards.start_empty(0)
    assert table_steps(shards) == [2, 2, 2]


@on_three_shards
async def test_a_shard_that_is_behind_is_level_after_another_one_has_started_empty(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    await step_of_both(shards, 1)
    await decide(shards, 2, away={1})
    shards.down.clear()
    await shards.start_empty(2)
    assert table_steps(shards) == [2, 2, 2]
    first, second = b"3" * 16, b"4" * 16
    assert await join(shards, first, 0) == 3
    assert await join(shards, second, 1) == 3
    await shards.until("all shards to be told", lambda: group_steps(shards) == [2, 2, 2])


@on_three_shards
async def test_a_group_that_home_has_forgotten_keeps_nobody_out(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    await step_of_both(shards, 1)
    await shards.until("all shards to be told", lambda: group_steps(shards) == [1, 1, 1])
    await shards.start_empty(0)
    alone = b"5" * 16
    shards.open(alone)
    for state in shards.states:
        section = GradientSection(state.table(1), np.array([1]), np.ones((1, 2), np.float32), AdamOptions(lr=0.1), 1.0)
        origin = Origin(alone, 1, b"push")
        state.run_number(origin, lambda state=state, section=section, origin=origin: state.push([section], origin))  # type: ignore[misc]
    assert table_steps(shards) == [2, 2, 2]
