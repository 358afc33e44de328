"""What members' requests wait for: looked at again when it may have changed, in their order, and never for what cannot come."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine

import pytest
from shardam_testing.matrix import num_threads
from shardam_testing.shard_states import make_tables

from shardam_proto.errors import ClientClosed, NotAMember, ShardNotReady
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import decide, set_group
from shardam_server.shard.groups.clocks import clock_of, slowest_clock
from shardam_server.shard.groups.values import NEVER_COMPLETE, Decision, Group, GroupTerms, Member
from shardam_server.shard.groups.waits import (
    Passage,
    PassageOf,
    StepWaits,
    change_passage,
    pull_passage,
    require_passage,
    waits_for,
)
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.state import ShardState

CLIENTS = [bytes([rank]) * 16 for rank in range(3)]
OUTSIDER = b"o" * 16

Test = Callable[["Shard"], Coroutine[None, None, None]]


class Shard:
    """A state with a group of three, and the requests that wait there."""

    def __init__(self, terms: GroupTerms) -> None:
        self.state = ShardState(CpuDevice(num_threads()))
        self.state.install(make_tables([TableSpec("table", 2)]))
        for client_id in (*CLIENTS, OUTSIDER):
            self.state.open_client(client_id)
        members = tuple(Member(rank, client_id) for rank, client_id in enumerate(CLIENTS))
        self.group = Group("workers", terms, 1, members, 0)
        set_group(self.state, self.group, 0)
        self.metrics = ShardMetrics("test", 0)
        self.waits = StepWaits(lambda: self.state, self.metrics)
        self.looks = 0

    def start(self, passage_of: PassageOf, client_id: bytes, step: int) -> asyncio.Task[Passage]:
        """Has a request wait."""

        def counted(state: ShardState, header: common_pb2.RequestHeader) -> Passage | None:
            self.looks += 1
            return passage_of(state, header)

        header = common_pb2.RequestHeader(client_id=client_id, step=step)
        return asyncio.ensure_future(self.waits.passed(counted, header))

    def decide(self, step: int) -> None:
        decide(self.state, Decision("workers", step, (), "abstained"))

    def tick(self, rank: int) -> None:
        """Brings a member's clock forward by a push that was skipped."""
        client = self.state.clients.get(CLIENTS[rank])
        origin = Origin(CLIENTS[rank], client.last_number + 1, b"skip", clock_of(self.state, self.group.members[rank]) + 1)
        self.state.void([], origin)

    def leave(self, rank: int) -> None:
        members = tuple(member for member in self.group.members if member.rank != rank)
        self.group = dataclasses.replace(self.group, version=self.group.version + 1, members=members)
        set_group(self.state, self.group, 0)


async def settle() -> None:
    """Lets tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Test, terms: GroupTerms) -> None:
    async def act() -> None:
        shard = Shard(terms)
        async with asyncio.timeout(30):
            await test(shard)

    asyncio.run(act())


SYNC, BOUNDED = GroupTerms("sync", 3), GroupTerms("bounded", 3, 1)


def test_requests_go_on_in_their_order_once_the_step_before_theirs_is_carried_out() -> None:
    async def test(shard: Shard) -> None:
        order: list[int] = []
        tasks = [shard.start(change_passage, client_id, step) for client_id in CLIENTS for step in (2, 3)]
        for index, task in enumerate(tasks):
            task.add_done_callback(lambda _, index=index: order.append(index))  # type: ignore[misc]  # bound at once
        await settle()
        for step, expected in ((1, [0, 2, 4]), (2, [0, 2, 4, 1, 3, 5])):
            shard.decide(step)
            shard.waits.notice()
            await settle()
            assert order == expected
        assert all(task.result() == Passage() for task in tasks)

    run(test, SYNC)


def test_changes_that_let_nobody_go_on_cost_no_look_at_those_who_wait() -> None:
    async def test(shard: Shard) -> None:
        for _ in range(3):
            shard.tick(0)
        waiting = [shard.start(pull_passage, CLIENTS[0], 4) for _ in range(10)]
        await settle()
        assert shard.looks == 10
        for _ in range(5):
            shard.tick(1)
            shard.waits.notice()
        assert shard.looks == 10  # the slowest is still at 0
        shard.tick(2)
        shard.waits.notice()
        assert shard.looks == 20
        shard.tick(2)
        shard.waits.notice()
        assert [passage.staleness for passage in await asyncio.gather(*waiting)] == [1] * 10

    run(test, BOUNDED)


def test_a_pull_waits_by_the_clock_that_its_client_has_when_it_is_looked_at() -> None:
    async def test(shard: Shard) -> None:
        shard.tick(0)
        assert await shard.start(pull_passage, CLIENTS[0], 2) == Passage(1)
        shard.tick(0)
        waiting = shard.start(pull_passage, CLIENTS[0], 3)
        await settle()
        shard.tick(0)
        for rank in (1, 2):
            shard.tick(rank)
        shard.waits.notice()
        await settle()
        assert not waiting.done()
        assert await shard.start(pull_passage, CLIENTS[1], 2) == Passage(0)
        for rank in (1, 2):
            shard.tick(rank)
        shard.waits.notice()
        assert await waiting == Passage(1)

    run(test, BOUNDED)


def test_members_that_joined_late_and_ranks_that_never_came_have_the_clock_they_begin_with() -> None:
    shard = Shard(BOUNDED)
    shard.tick(0)
    assert slowest_clock(shard.state, shard.group) == 0
    members = (shard.group.members[0], Member(1, CLIENTS[1], first_step=5))
    assert slowest_clock(shard.state, dataclasses.replace(shard.group, members=members)) == 1
    incomplete = dataclasses.replace(shard.group, members=members, complete_restart_count=-1)
    assert slowest_clock(shard.state, incomplete) == 0
    assert slowest_clock(shard.state, dataclasses.replace(incomplete, members=members[1:])) == 4
    assert clock_of(shard.state, Member(0, b"unknown", first_step=7)) == 6


@pytest.mark.parametrize("terms", [SYNC, BOUNDED])
def test_a_client_that_is_closed_or_no_member_any_more_waits_no_longer(terms: GroupTerms) -> None:
    async def test(shard: Shard) -> None:
        for rank in (0, 1):
            for _ in range(2):
                shard.tick(rank)
        closed, left = (shard.start(pull_passage, client_id, 9) for client_id in CLIENTS[:2])
        await settle()
        shard.state.end_client(CLIENTS[0])
        shard.waits.notice()
        with pytest.raises(ClientClosed):
            await closed
        assert not left.done()
        shard.leave(1)
        shard.waits.notice()
        with pytest.raises(NotAMember):
            await left

    run(test, terms)


def test_a_change_of_a_client_that_is_closed_goes_on_to_be_refused() -> None:
    async def test(shard: Shard) -> None:
        waiting = shard.start(change_passage, CLIENTS[0], 2)
        await settle()
        shard.state.end_client(CLIENTS[0])
        shard.waits.notice()
        assert await waiting == Passage()
        assert await shard.start(change_passage, OUTSIDER, 7) == Passage()

    run(test, SYNC)


def test_a_state_that_is_replaced_lets_nobody_wait_for_the_old_one() -> None:
    async def test(shard: Shard) -> None:
        waiting = shard.start(pull_passage, CLIENTS[0], 2)
        await settle()
        shard.state = ShardState(CpuDevice(num_threads()))
        shard.waits.notice()
        with pytest.raises(ClientClosed):
            await waiting

    run(test, SYNC)


def test_one_that_gives_up_is_forgotten_and_the_others_go_on() -> None:
    async def test(shard: Shard) -> None:
        lost, waiting = (shard.start(change_passage, CLIENTS[0], 2) for _ in range(2))
        await settle()
        lost.cancel()
        shard.decide(1)
        shard.waits.notice()
        await settle()
        assert lost.cancelled()
        assert await waiting == Passage()
        assert not shard.waits._groups
        assert 'shardam_step_wait_seconds_count{cluster="test",shard="0"} 2.0' in shard.metrics.text()

    run(test, SYNC)


def test_a_request_that_cannot_wait_is_refused_to_be_sent_again() -> None:
    shard = Shard(SYNC)
    ahead, due = (common_pb2.RequestHeader(client_id=CLIENTS[0], step=step) for step in (2, 1))
    for passage_of in (change_passage, pull_passage):
        with pytest.raises(ShardNotReady, match="step 2 of client"):
            require_passage(passage_of, shard.state, ahead)
        assert require_passage(passage_of, shard.state, due) == Passage()
    assert require_passage(pull_passage, shard.state, common_pb2.RequestHeader()) == Passage()


def test_a_pull_that_waits_in_a_bounded_group_says_for_whom() -> None:
    shard = Shard(GroupTerms("bounded", 3, 1))
    header = common_pb2.RequestHeader(client_id=CLIENTS[0], step=1)
    assert waits_for(shard.state, header) == {}
    shard.tick(0)
    shard.tick(0)
    shard.tick(1)
    assert waits_for(shard.state, header) == {"missing_ranks": "2"}
    shard.leave(2)
    assert waits_for(shard.state, header) == {}
    assert waits_for(shard.state, common_pb2.RequestHeader(client_id=OUTSIDER, step=1)) == {}


def test_a_pull_that_waits_for_ranks_that_never_came_says_so() -> None:
    shard = Shard(GroupTerms("bounded", 3, 1))
    shard.group = Group("workers", shard.group.terms, 2, shard.group.members[:1], NEVER_COMPLETE)
    set_group(shard.state, shard.group, 0)
    shard.tick(0)
    header = common_pb2.RequestHeader(client_id=CLIENTS[0], step=2)
    assert waits_for(shard.state, header) == {}
    shard.tick(0)
    assert waits_for(shard.state, header) == {"missing_ranks": "1,2", "absent_ranks": "1,2"}
