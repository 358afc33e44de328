"""Home closes clients that are gone: ended everywhere, brought to one last number, whatever fails on the way."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

import pytest
from shardam_testing.shard_group import ShardGroup, running_group
from shardam_testing.shard_states import journaled_state

from shardam_proto.errors import BadOption, ClientClosed, QueueFull, ShardNotReady
from shardam_server.shard import last_numbers
from shardam_server.shard.clients import WINDOW, Origin
from shardam_server.shard.last_numbers import end_all_here

CLIENT = b"c" * 16
OTHER = b"o" * 16
LATE = b"l" * 16

Scenario = Callable[[ShardGroup], Awaitable[None]]


def on_shards(count: int) -> Callable[[Scenario], Callable[[], None]]:
    """Runs a test on a group of shards."""

    def decorate(scenario: Scenario) -> Callable[[], None]:
        async def run() -> None:
            async with running_group(count) as group:
                await scenario(group)

        def test() -> None:
            asyncio.run(run())

        functools.update_wrapper(test, scenario)
        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would see the group as a fixture
        return test

    return decorate


def assert_level(group: ShardGroup, client_id: bytes, last_number: int) -> None:
    assert group.last_numbers(client_id) == [last_number] * group.count
    assert group.is_closed(client_id) == [True] * group.count
    assert all(steps == group.steps()[0] for steps in group.steps())


@on_shards(3)
async def test_numbers_that_only_some_shards_have_are_closed_on_the_others_with_the_tables_that_stepped(
    group: ShardGroup,
) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0, 1, 2])
    group.step(CLIENT, 2, [0, 1], table_ids=[2])
    group.step(CLIENT, 3, [1], table_ids=[1])
    group.step(CLIENT, 4, [1], table_ids=[])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 4)
    assert group.steps()[2] == {1: 2, 2: 2}


@on_shards(3)
async def test_home_itself_takes_what_it_lacks(group: ShardGroup) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [2])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 1)


@on_shards(3)
async def test_a_leave_is_answered_when_all_shards_have_ended_the_client(group: ShardGroup) -> None:
    group.open(CLIENT)
    await group.closing.close(CLIENT, wait_s=30.0)
    assert group.is_closed(CLIENT) == [True] * 3


@on_shards(3)
async def test_a_shard_that_is_down_holds_up_neither_the_answer_nor_the_others_and_is_settled_when_it_is_back(
    group: ShardGroup,
) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0])
    group.step(CLIENT, 1, [2])
    group.step(CLIENT, 2, [2])
    group.down = {2}
    await group.closing.close(CLIENT, wait_s=0.05)
    await group.until("shard 1 to be level with home", lambda: group.last_numbers(CLIENT) == [1, 1, 2])
    assert not group.is_settled(CLIENT)
    group.open(OTHER, shards=[0, 1])
    await group.closing.close(OTHER, wait_s=0.05)
    await group.until("another client to be ended on shard 1", lambda: group.is_closed(OTHER)[1])
    group.down = set()
    await group.until_settled(CLIENT, OTHER)
    assert_level(group, CLIENT, 2)


@on_shards(3)
async def test_a_home_that_was_killed_goes_on_with_what_is_closed_and_not_settled(group: ShardGroup) -> None:
    group.open(CLIENT)
    group.open(OTHER)
    group.step(CLIENT, 1, [0, 1])
    group.step(CLIENT, 2, [1])
    group.down = {1, 2}
    await group.closing.close(CLIENT, wait_s=0.05)
    await group.restart_home()
    assert not group.is_settled(CLIENT)
    group.down = set()
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 2)
    assert group.is_closed(OTHER) == [False] * 3


@on_shards(3)
async def test_a_home_that_was_killed_between_two_settlements_closes_no_number_twice(group: ShardGroup) -> None:
    group.open(CLIENT)
    for number in (1, 2, 3):
        group.step(CLIENT, number, [0])
    group.down = {2}
    await group.closing.close(CLIENT)
    await group.until("shard 1 to be level with home", lambda: group.last_numbers(CLIENT)[1] == 3)
    await group.restart_home()
    group.down = set()
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 3)
    assert group.steps() == [{1: 3, 2: 3}] * 3


@on_shards(3)
async def test_a_lost_answer_settles_no_number_twice(group: ShardGroup) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0])
    group.lose_answers = {1, 2}
    await group.closing.close(CLIENT)
    await group.until("both answers to be lost", lambda: not group.lose_answers)
    group.lose_answers = {1, 2}
    await group.until_settled(CLIENT)
    assert group.lose_answers == set()
    assert_level(group, CLIENT, 1)
    assert group.steps() == [{1: 1, 2: 1}] * 3


@on_shards(3)
async def test_many_clients_are_closed_at_once(group: ShardGroup) -> None:
    client_ids = [b"%016d" % place for place in range(40)]
    for place, client_id in enumerate(client_ids):
        group.open(client_id)
        group.step(client_id, 1, [place % 3])
        group.step(client_id, 2, [place % 3])
    await asyncio.gather(*(group.closing.close(client_id, wait_s=30.0) for client_id in client_ids * 2))
    await group.until_settled(*client_ids)
    assert group.steps() == [{1: 80, 2: 80}] * 3


@on_shards(3)
async def test_closing_again_changes_nothing(group: ShardGroup) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0])
    await group.closing.close(CLIENT, wait_s=30.0)
    await group.until_settled(CLIENT)
    records = [len(journal.frames) for journal in group.journals]
    calls = len(group.calls)
    await group.closing.close(CLIENT, wait_s=30.0)
    assert len(group.calls) == calls
    assert [len(journal.frames) for journal in group.journals] == records


@on_shards(3)
async def test_a_client_without_numbers_is_remembered_as_closed_where_it_was_not_known(group: ShardGroup) -> None:
    group.open(CLIENT, shards=[0, 1])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 0)


@on_shards(3)
async def test_a_shard_that_does_not_know_the_client_takes_the_numbers_of_the_others_and_remembers_it_as_closed(
    group: ShardGroup,
) -> None:
    group.open(CLIENT, shards=[0, 1])
    group.step(CLIENT, 1, [0, 1])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 1)


@pytest.mark.parametrize("index", [0, 1], ids=["home", "another shard"])
def test_a_shard_that_starts_empty_ends_all_clients_and_steps_stay_equal_though_home_restarts(index: int) -> None:
    @on_shards(3)
    async def scenario(group: ShardGroup) -> None:
        group.open(CLIENT)
        group.open(OTHER)
        group.step(CLIENT, 1, [0, 1, 2])
        group.step(CLIENT, 2, [2])
        group.step(CLIENT, 3, [2], table_ids=[1])
        group.step(OTHER, 1, [0, 1])
        group.down = {index}
        await group.closing.close(CLIENT, wait_s=0.05)
        await group.start_empty(index)
        expected = [{1: 4, 2: 3}] * 3
        assert group.steps() == expected
        for client_id in (CLIENT, OTHER):
            assert group.is_closed(client_id) == [True] * 3
            with pytest.raises(ClientClosed):
                group.step(client_id, 4, [2])
        await group.restart_home()
        for client_id in (CLIENT, OTHER):
            await group.closing.close(client_id, wait_s=0.05)
            await group.until_settled(client_id)
        assert not group.closing.num_open
        assert group.steps() == expected

    scenario()


@on_shards(2)
async def test_a_settlement_that_is_tried_again_meets_a_shard_that_started_empty_and_changes_nothing(group: ShardGroup) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0, 1])
    group.step(CLIENT, 2, [0])
    group.refuse_settling = {1}
    await group.closing.close(CLIENT, wait_s=30.0)
    await group.until("the settlement to be tried", lambda: group.num_refused > 0)
    await group.start_empty(1)
    group.refuse_settling = set()
    await group.until("home to end it", lambda: not group.closing.num_open)
    assert group.is_settled(CLIENT)
    assert group.steps() == [{1: 2, 2: 2}] * 2


@on_shards(3)
async def test_a_shard_that_breaks_off_starting_empty_leaves_clients_that_home_closes(group: ShardGroup) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0, 1, 2])
    group.step(CLIENT, 2, [1])
    group.lose_answers = {2}
    with pytest.raises(ShardNotReady, match="shard 2 has to be level"):
        await group.start_empty(1)
    group.down = set()  # with its former state after all
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 2)


@on_shards(2)
async def test_a_client_that_opens_after_a_shard_has_started_empty_is_settled_there(group: ShardGroup) -> None:
    group.open(OTHER)
    await group.start_empty(1)
    group.open(CLIENT)
    group.step(CLIENT, 1, [0, 1])
    group.step(CLIENT, 2, [0])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 2)


@on_shards(3)
async def test_a_home_that_does_not_know_the_client_takes_its_numbers_like_the_others(group: ShardGroup) -> None:
    group.open(CLIENT, shards=[1, 2])
    group.step(CLIENT, 1, [1])
    await group.closing.close(CLIENT, wait_s=30.0)
    await group.until_settled(CLIENT)
    assert_level(group, CLIENT, 1)


@on_shards(2)
async def test_a_client_that_was_closed_can_open_nowhere_any_more(group: ShardGroup) -> None:
    group.open(CLIENT, shards=[0])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    for index in range(2):
        with pytest.raises(ClientClosed):
            group.open(CLIENT, shards=[index])


@on_shards(2)
async def test_no_shard_forgets_a_closed_client_before_all_shards_agree_on_its_numbers(group: ShardGroup) -> None:
    for state in group.states:
        state.clients._max_clients = 2
    group.open(CLIENT)
    for number in (1, 2, 3):
        group.step(CLIENT, number, [0, 1])
    group.step(CLIENT, 4, [0])
    group.refuse_settling = {1}
    group.open(OTHER)
    await group.closing.close(CLIENT, wait_s=30.0)
    await group.until("the settlement to be tried", lambda: group.num_refused > 0)
    for index in range(2):
        with pytest.raises(QueueFull):
            group.open(LATE, shards=[index])
    group.refuse_settling = set()
    await group.until_settled(CLIENT)
    group.open(LATE)
    assert group.last_numbers(CLIENT) == [None, None]
    assert group.steps() == [{1: 4, 2: 4}] * 2


@on_shards(2)
async def test_a_client_that_home_has_forgotten_and_another_shard_knows_as_settled_is_brought_nowhere_again(
    group: ShardGroup,
) -> None:
    group.open(CLIENT)
    group.step(CLIENT, 1, [0, 1])
    await group.closing.close(CLIENT)
    await group.until_settled(CLIENT)
    group.states[0].clients.forget([CLIENT])
    await group.closing.close(CLIENT, wait_s=30.0)  # a worker says goodbye again
    await group.until_settled(CLIENT)
    assert group.steps() == [{1: 1, 2: 1}] * 2


@on_shards(1)
async def test_a_single_shard_settles_a_client_with_its_end(group: ShardGroup) -> None:
    group.open(CLIENT)
    records = len(group.journals[0].frames)
    await group.closing.close(CLIENT, wait_s=30.0)
    assert group.is_settled(CLIENT)
    assert len(group.journals[0].frames) == records + 1
    with pytest.raises(BadOption):
        await group.closing.close(b"")


def test_numbers_that_no_shard_remembers_are_named_and_the_shard_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    @on_shards(3)
    async def scenario(group: ShardGroup) -> None:
        group.open(CLIENT)
        for number in range(1, WINDOW + 4):
            group.step(CLIENT, number, [0] if number > 2 else [0, 1])
        group.step(CLIENT, 1, [2])
        for number in range(2, WINDOW + 2):
            group.step(CLIENT, number, [2])
        await group.closing.close(CLIENT)
        await group.until_settled(CLIENT)
        # Home remembers 4 to 67, shard 2 remembers 2 to 65, so that shard 1 can take 3.
        assert_level(group, CLIENT, WINDOW + 3)

    scenario()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    @on_shards(2)
    async def behind(group: ShardGroup) -> None:
        group.open(CLIENT)
        group.step(CLIENT, 1, [1])
        for number in range(1, WINDOW + 4):
            group.step(CLIENT, number, [0])
        await group.closing.close(CLIENT)
        await group.until_settled(CLIENT)
        assert group.last_numbers(CLIENT) == [WINDOW + 3, 1]

    behind()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert f"numbers 2 to 67 of client {CLIENT.hex()} are missing on shard 1" in errors[0]


def test_ended_clients_are_told_in_pages_that_go_on_behind_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_numbers, "PAGE_BYTES", 0)
    state, _ = journaled_state()
    client_ids = [b"%016d" % place for place in (3, 1, 2, 4)]
    for client_id in client_ids:
        state.open_client(client_id)
    for number in (1, 2):
        for client_id in client_ids[:3]:
            origin = Origin(client_id, number, b"push")
            state.run_number(origin, lambda origin=origin: state.void([], origin))  # type: ignore[misc]
    told, after, num_pages = [], b"", 0
    while after or not num_pages:
        page, after = end_all_here(state, after)
        told += [(client.client_id, client.last_number, len(client.numbers)) for client in page]
        num_pages += 1
    assert told == [(client_id, 2, 2) for client_id in sorted(client_ids[:3])]
    assert (num_pages, state.clients.num_open) == (3, 0)
