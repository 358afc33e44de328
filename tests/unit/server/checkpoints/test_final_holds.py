"""A final hold that runs out: Redis says whether the state has moved, and only then does the shard go on, or end."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable

import pytest

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.routing import RouteMap
from shardam_server.shard.checkpoints import final_holds
from shardam_server.shard.checkpoints.final_holds import FinalHolds
from shardam_server.shard.holding import Holding
from shardam_server.shard.identity import ShardIdentity

HOLD_ID = 7
PLAN = Plan("p", timeline=1, epoch=2, num_shards=4, seed=0, folder="c/reshard", checkpoint_id=9, keep_clients=True)


class Stage:
    """A shard that is held, and a Redis that answers as a test tells it."""

    def __init__(self) -> None:
        self.holding = Holding()
        self.adopted: list[Plan] = []
        self.asked = 0
        self.answers: list[Plan | RedisUnreachable | None] = []
        self.gate = threading.Event()
        self.gate.set()
        identity = ShardIdentity(1, cluster=ClusterEntry("c", 2, 0), route_map=RouteMap(1, 2))
        self.holds = FinalHolds(identity, self.holding, self.end_move, self.adopted.append)

    def end_move(self, hold_id: int) -> Plan | None:
        assert hold_id == HOLD_ID
        self.asked += 1
        assert self.gate.wait(60)
        answer = self.answers.pop(0)
        if isinstance(answer, RedisUnreachable):
            raise answer
        return answer

    async def expire(self) -> None:
        self.holding.hold(HOLD_ID, 0.001, self.holds.final_hold_expired)
        while not self.asked:
            await asyncio.sleep(0.001)

    async def settled(self) -> None:
        while self.answers or (self.holding.held and not self.adopted):
            await asyncio.sleep(0.001)


def on_loop(test: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(Stage()), 60)

    asyncio.run(run())


def test_a_shard_goes_on_once_redis_says_that_nothing_was_decided() -> None:
    async def test(stage: Stage) -> None:
        stage.answers = [None]
        stage.gate.clear()
        await stage.expire()
        assert stage.holding.held  # Redis has not answered
        stage.gate.set()
        await stage.settled()
        assert not stage.holding.held
        assert stage.adopted == []

    on_loop(test)


def test_a_plan_that_was_decided_is_taken_over_and_nothing_is_released() -> None:
    async def test(stage: Stage) -> None:
        stage.answers = [PLAN]
        await stage.expire()
        await stage.settled()
        assert stage.adopted == [PLAN]
        assert stage.holding.hold_id == HOLD_ID

    on_loop(test)


def test_a_plan_that_the_state_comes_from_already_is_no_reason_to_wait() -> None:
    async def test(stage: Stage) -> None:
        stage.answers = [dataclasses.replace(PLAN, epoch=1)]
        await stage.expire()
        await stage.settled()
        assert not stage.holding.held
        assert stage.adopted == []

    on_loop(test)


def test_a_redis_that_is_away_keeps_the_shard_held_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_holds, "FIRST_WAIT_S", 0.001)

    async def test(stage: Stage) -> None:
        stage.answers = [RedisUnreachable("away"), RedisUnreachable("away"), None]
        await stage.expire()
        await stage.settled()
        assert stage.asked == 3
        assert not stage.holding.held

    on_loop(test)


def test_a_hold_that_home_has_released_meanwhile_is_left_alone() -> None:
    async def test(stage: Stage) -> None:
        stage.answers = [RedisUnreachable("away")]
        stage.gate.clear()
        await stage.expire()
        stage.holding.release(HOLD_ID)
        stage.gate.set()
        while stage.answers:
            await asyncio.sleep(0.001)
        await stage.holds.stop()
        assert stage.asked == 1
        assert stage.adopted == []

    on_loop(test)
