"""Home takes members in, decides steps once all have arrived, and lets members go; whatever fails on the way."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from shardam_testing.shard_group import WAIT_S, ShardGroup, running_group
from shardam_testing.shard_group_members import (
    AGAIN,
    OPTIONS,
    RANK_0,
    RANK_1,
    arrive_request,
    group_steps,
    join,
    join_request,
    on_three_shards,
    push,
    step_of_both,
    table_steps,
)

from shardam_proto.errors import BadOption, ClientClosed, GroupMismatch, NonFiniteGradient, ShardNotReady
from shardam_proto.v1 import group_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, decide, stage
from shardam_server.shard.groups.values import Decision
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection


@on_three_shards
async def test_a_step_is_decided_when_all_have_arrived_and_carried_out_everywhere(shards: ShardGroup) -> None:
    assert await join(shards, RANK_0, 0) == 1
    assert await join(shards, RANK_1, 1) == 1
    for step in (1, 2, 3):
        answers = await step_of_both(shards, step)
        assert [answer.result.num_contributions for answer in answers] == [2, 2]
        assert [answer.result.end for answer in answers] == [group_pb2.STEP_END_APPLIED] * 2
        await shards.until("all shards to be told", lambda step=step: group_steps(shards) == [step] * 3)  # type: ignore[misc]
    assert table_steps(shards) == [3, 3, 3]
    assert shards.last_numbers(RANK_0) == [3, 3, 3]


@on_three_shards
async def test_a_group_that_starts_waits_for_all_its_ranks(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    push(shards, RANK_0, 0, 1)
    answer = await shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1, budget_s=0.05))
    assert not answer.HasField("result")
    assert (list(answer.missing_ranks), list(answer.absent_ranks)) == ([1], [1])
    [(group, step, missing, _)] = shards.groups.waiting()
    assert (group.name, step, missing) == ("workers", 1, [1])
    await join(shards, RANK_1, 1)
    assert shards.groups.waiting() != []
    answer = await shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1, budget_s=0.05))
    assert (list(answer.missing_ranks), list(answer.absent_ranks)) == ([1], [])
    push(shards, RANK_1, 1, 1)
    answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 1))
    assert answer.result.num_contributions == 2
    assert shards.groups.waiting() == []  # both compute, and nobody waits for either


@on_three_shards
async def test_a_member_that_is_closed_stops_nobody_and_leaves_nothing(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    await step_of_both(shards, 1)
    push(shards, RANK_0, 0, 2)
    push(shards, RANK_1, 1, 2)
    waiting = asyncio.create_task(shards.groups.steps.arrive(arrive_request(RANK_0, 0, 2)))
    await shards.closing.close(RANK_1)
    answer = await waiting
    assert answer.result.num_contributions == 1
    await shards.until_settled(RANK_1)
    assert shards.last_numbers(RANK_1) == [1, 1, 1]
    assert table_steps(shards) == [2, 2, 2]
    assert [state.groups.parts() for state in shards.states] == [[], [], []]
    with pytest.raises(ClientClosed):
        push(shards, RANK_1, 1, 3)


@on_three_shards
async def test_a_higher_restart_count_takes_the_rank_over_at_the_next_step(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    await step_of_both(shards, 1)
    with pytest.raises(GroupMismatch, match=r"rank 1 .* is taken"):
        await join(shards, AGAIN, 1)
    assert await join(shards, AGAIN, 1, restarts=1) == 2
    assert shards.is_closed(RANK_1)[0]
    push(shards, RANK_0, 0, 2)
    push(shards, AGAIN, 1, 2, number=1)
    first, second = await asyncio.gather(
        shards.groups.steps.arrive(arrive_request(RANK_0, 0, 2)),
        shards.groups.steps.arrive(arrive_request(AGAIN, 1, 2, number=1)),
    )
    assert first.result == second.result
    assert first.result.num_contributions == 2


@on_three_shards
async def test_a_shard_that_is_down_gets_the_decision_when_it_is_back(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    for rank, client_id in enumerate((RANK_0, RANK_1)):
        push(shards, client_id, rank, 1)
    shards.down.add(2)
    both = [shards.groups.steps.arrive(arrive_request(client_id, rank, 1)) for rank, client_id in enumerate((RANK_0, RANK_1))]
    await asyncio.gather(*both)
    await shards.until("shard 1 to be told", lambda: group_steps(shards) == [1, 1, 0])
    shards.restart(2)
    shards.down.clear()
    await shards.until("shard 2 to be told", lambda: group_steps(shards) == [1, 1, 1])
    assert table_steps(shards) == [1, 1, 1]


@on_three_shards
async def test_a_home_that_comes_back_tells_what_it_had_decided_and_answers_for_it(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    for rank, client_id in enumerate((RANK_0, RANK_1)):
        push(shards, client_id, rank, 1)
    shards.down |= {1, 2}
    both = [shards.groups.steps.arrive(arrive_request(client_id, rank, 1)) for rank, client_id in enumerate((RANK_0, RANK_1))]
    await asyncio.gather(*both)
    await shards.restart_home()
    shards.down.clear()
    await shards.until("all shards to be told", lambda: group_steps(shards) == [1, 1, 1])
    answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 1))
    assert answer.result.num_contributions == 2
    await step_of_both(shards, 2)
    await shards.until("the next step", lambda: table_steps(shards) == [2, 2, 2])


@on_three_shards
async def test_a_home_that_comes_back_waits_for_members_to_arrive_again(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    push(shards, RANK_0, 0, 1)
    push(shards, RANK_1, 1, 1)
    await shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1, budget_s=0.05))
    await shards.restart_home()
    answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 1, budget_s=0.05))
    assert not answer.HasField("result")
    answer = await shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1))
    assert answer.result.num_contributions == 2


@on_three_shards
async def test_a_client_is_ended_on_a_shard_only_after_the_decisions_it_is_part_of(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    shards.down.add(2)
    await step_of_both(shards, 1)
    await shards.closing.close(RANK_1)
    await shards.until("shard 1 to end the client", lambda: ("end", 1, RANK_1) in shards.calls)
    shards.down.clear()
    await shards.until_settled(RANK_1)
    assert table_steps(shards) == [1, 1, 1]
    assert shards.last_numbers(RANK_1) == [1, 1, 1]


@on_three_shards
async def test_large_gradients_are_checked_on_all_shards_before_the_step_is_decided(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    for rank, client_id in enumerate((RANK_0, RANK_1)):
        for index, state in enumerate(shards.states):
            gradients = np.full((1, 2), 1.5 * 2.0**63 if index == 2 else 1.0, np.float32)
            sections = [GradientSection(state.table(1), np.array([7]), gradients, OPTIONS, 1.0)]
            stage(state, IncomingPart(Origin(client_id, 1, b"part"), 1, rank, "gradient", sections))
    both = [
        shards.groups.steps.arrive(arrive_request(client_id, rank, 1, peak=1.5 * 2.0**63))
        for rank, client_id in enumerate((RANK_0, RANK_1))
    ]
    answers = await asyncio.gather(*both)
    assert [answer.result.refusal.reason for answer in answers] == ["NON_FINITE_GRADIENT"] * 2
    assert table_steps(shards) == [0, 0, 0]
    await step_of_both(shards, 2)
    await shards.until("the next step", lambda: table_steps(shards) == [1, 1, 1])


@on_three_shards
async def test_members_may_go_while_a_shard_that_has_to_check_a_step_is_away(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    push(shards, RANK_0, 0, 1)
    push(shards, RANK_1, 1, 1)
    shards.down.add(2)
    both = [
        asyncio.create_task(shards.groups.steps.arrive(arrive_request(client_id, rank, 1, peak=2.0**62)))
        for rank, client_id in enumerate((RANK_0, RANK_1))
    ]
    await shards.until("shard 1 to be asked", lambda: ("check step", 1, b"") in shards.calls)
    await asyncio.wait_for(shards.closing.close(RANK_1), WAIT_S)
    shards.down.clear()
    answer = await both[0]
    assert answer.result.num_contributions == 1
    with pytest.raises(ClientClosed):
        await both[1]


def test_a_step_that_waits_too_long_is_given_up_and_names_the_missing_rank() -> None:
    async def run() -> None:
        async with running_group(3) as shards:
            await shards.stop_home()
            shards.step_timeout_s = 0.2
            await shards.start_home()
            await join(shards, RANK_0, 0)
            await join(shards, RANK_1, 1)
            push(shards, RANK_0, 0, 1)
            answer = await shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1))
            assert answer.result.refusal.reason == "STEP_TIMEOUT"
            assert answer.result.refusal.metadata["ranks"] == "1"
            push(shards, RANK_1, 1, 1)  # too late: it is closed, and refused
            answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 1))
            assert (answer.result.num_contributions, answer.result.refusal.reason) == (0, "STEP_TIMEOUT")
            await step_of_both(shards, 2)
            await shards.until("the next step", lambda: table_steps(shards) == [1, 1, 1])

    asyncio.run(run())


def test_a_pause_of_home_counts_for_no_steps_time() -> None:
    async def run() -> None:
        async with running_group(1) as shards:
            await shards.stop_home()
            shards.step_timeout_s = 2.0
            await shards.start_home()
            await join(shards, RANK_0, 0)
            await join(shards, RANK_1, 1)
            push(shards, RANK_0, 0, 1)
            waiting = asyncio.create_task(shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1)))
            await shards.until("rank 0 to arrive", lambda: shards.groups.has_arrived("workers", RANK_0))
            time.sleep(2 * shards.step_timeout_s)  # nothing else runs, as where the process is stopped
            done, _ = await asyncio.wait({waiting}, timeout=0.5)
            assert not done
            push(shards, RANK_1, 1, 1)
            answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 1))
            assert answer.result.num_contributions == 2
            await waiting

    asyncio.run(run())


@on_three_shards
async def test_a_shard_that_hangs_while_a_group_begins_holds_up_nobody_else(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0, world_size=1)
    former, asked = shards.groups._delivery.former, asyncio.Event()

    async def hang(name: str) -> tuple[int, int]:
        asked.set()
        await asyncio.Event().wait()
        return await former(name)

    shards.groups._delivery.former = hang  # type: ignore[method-assign]
    shards.open(RANK_1)
    request = join_request(RANK_1, 0, world_size=1)
    request.group = "others"
    joining = asyncio.create_task(shards.groups.join(request))
    await asked.wait()
    await asyncio.wait_for(shards.closing.close(RANK_0), WAIT_S)
    joining.cancel()


@on_three_shards
async def test_a_join_that_cannot_be_told_to_all_is_finished_by_repeating_it(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0, world_size=1)
    shards.down.add(1)
    shards.open(RANK_1)
    await shards.closing.close(RANK_0)
    joining = asyncio.create_task(shards.groups.join(join_request(RANK_1, 0, world_size=1)))
    with pytest.raises(ShardNotReady, match=r"shards \[1\]"):
        await joining
    shards.down.clear()
    assert await shards.groups.join(join_request(RANK_1, 0, world_size=1)) == 1


@on_three_shards
async def test_a_client_that_leaves_after_its_arrival_is_counted_and_then_closed(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    push(shards, RANK_0, 0, 1)
    push(shards, RANK_1, 1, 1)
    first = asyncio.create_task(shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1)))
    await shards.until("the arrival", lambda: shards.groups.has_arrived("workers", RANK_0))
    assert shards.groups.leaves_later(RANK_0)
    assert not shards.groups.leaves_later(RANK_1)
    answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 1))
    assert answer.result.num_contributions == 2
    assert (await first).result.num_contributions == 2
    await shards.until_settled(RANK_0)
    push(shards, RANK_1, 1, 2)
    answer = await shards.groups.steps.arrive(arrive_request(RANK_1, 1, 2))
    assert answer.result.num_contributions == 1


def test_a_step_that_home_cannot_apply_is_counted_and_logged_as_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with running_group(3) as shards:
            await join(shards, RANK_0, 0, world_size=1)
            push(shards, RANK_0, 0, 1)
            answer = await shards.groups.steps.arrive(arrive_request(RANK_0, 0, 1))
            assert answer.result.end == group_pb2.STEP_END_REFUSED

    def decide_refusals_alone(state: ShardState, decision: Decision) -> None:
        if decision.end != "refused":
            raise NonFiniteGradient("row 7 overflows")
        decide(state, decision)

    ends: list[str] = []
    monkeypatch.setattr("shardam_server.shard.groups.steps.decide", decide_refusals_alone)
    monkeypatch.setattr(ShardMetrics, "count_step", lambda _, end: ends.append(end))
    asyncio.run(run())
    assert ends == ["refused"]
    assert "step 1 of group 'workers' was refused: row 7 overflows" in caplog.text


@on_three_shards
async def test_a_client_without_heartbeats_cannot_join_since_nobody_would_see_it_die(shards: ShardGroup) -> None:
    for state in shards.states:
        state.open_client(RANK_0, heartbeats=False)
    with pytest.raises(BadOption, match="heartbeats"):
        await shards.groups.join(join_request(RANK_0, 0))
    assert [list(state.groups) for state in shards.states] == [[], [], []]


@on_three_shards
async def test_a_join_beside_the_close_of_its_client_leaves_no_member_behind(shards: ShardGroup) -> None:
    await join(shards, RANK_0, 0)
    await join(shards, RANK_1, 1)
    again = [shards.groups.join(join_request(RANK_1, 1)) for _ in range(3)]
    await asyncio.gather(again[0], shards.closing.close(RANK_1), *again[1:], return_exceptions=True)
    [entry] = shards.states[0].groups
    assert [member.client_id for member in entry.group.members] == [RANK_0]
    assert shards.is_closed(RANK_1)[0]
