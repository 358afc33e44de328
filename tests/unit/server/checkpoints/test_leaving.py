"""A process whose state moves to other shards ends, says what to start, and applies nothing more."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from shardam_proto.errors import ShardNotReady
from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.routing import RouteMap
from shardam_server.command_errors import Resharded
from shardam_server.settings import ShardSettings
from shardam_server.shard.checkpoints.adoption import Adoption
from shardam_server.shard.checkpoints.leaving import Leaving
from shardam_server.shard.holding import Holding, Mark
from shardam_server.shard.identity import ShardIdentity

PLAN = Plan("p", timeline=1, epoch=2, num_shards=2, seed=0, folder="c/reshard", checkpoint_id=9, keep_clients=True)


@dataclasses.dataclass
class Kept:
    folder: Path | None = None


class Stage:
    """The parts of a shard that its end has to do with."""

    def __init__(self, index: int = 1, folder: Path | None = None) -> None:
        self.identity = ShardIdentity(index, cluster=ClusterEntry("c1", 3, 0), route_map=RouteMap(1, 3))
        self.holding, self.kept = Holding(), Kept(folder)
        settings = ShardSettings.model_validate(
            {"index": index, "shards": 3, "redis": "redis://127.0.0.1:1/0", "cluster": "prod"}
        )
        self.leaving = Leaving(cast("Any", self), settings)
        unused = cast("Any", None)  # a process that ends does not come to these parts
        self.adoption = Adoption(cast("Any", self), unused, unused, unused, unused, unused, self.leaving.begin)

    def change(self) -> asyncio.Future[str]:
        def start() -> asyncio.Future[str]:
            raise AssertionError("the change was applied")

        return self.holding.run(start, Mark(b"a" * 16, 1), 10)


def on_loop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_plan_of_a_later_epoch_ends_the_process_at_once_and_what_was_held_is_refused() -> None:
    async def test() -> None:
        stage = Stage()
        stage.holding.hold(7, 60.0, when_expired=lambda hold_id: None)
        held = stage.change()
        stage.adoption.notice(PLAN)
        await asyncio.sleep(0)
        assert stage.leaving.begun.is_set()
        for change in (held, stage.change()):
            with pytest.raises(ShardNotReady, match="have moved to 2 shards"):
                await change
        stage.adoption.notice(PLAN)  # a renewal reads it once more
        await stage.adoption.stop()

    on_loop(test)


def test_a_plan_that_the_state_is_not_from_before_ends_nothing() -> None:
    async def test() -> None:
        stage = Stage()
        stage.adoption.notice(dataclasses.replace(PLAN, epoch=1))
        assert not stage.leaving.begun.is_set()
        stage.leaving.check()

    on_loop(test)


@pytest.mark.parametrize(
    ("index", "count", "said"),
    [
        (1, 2, "cluster 'prod' has moved to 2 shards: start shards 0 to 1 with --shards 2"),
        (0, 1, "cluster 'prod' has moved to 1 shards: start shard 0 with --shards 1"),
        (
            2,
            2,
            "start shards 0 to 1 with --shards 2; there is no shard 2 any more, and /x/shard-2 may be deleted once they serve",
        ),
    ],
)
def test_it_says_what_to_start_and_ends_with_a_status_of_its_own(index: int, count: int, said: str) -> None:
    async def test() -> None:
        stage = Stage(index, Path(f"/x/shard-{index}"))
        stage.leaving.begin(dataclasses.replace(PLAN, num_shards=count))
        with pytest.raises(Resharded) as caught:
            stage.leaving.check()
        assert str(caught.value).endswith(said)
        assert caught.value.exit_code == 76

    on_loop(test)


def test_a_drain_releases_a_hold_of_a_checkpoint_and_refuses_what_a_final_one_keeps_back() -> None:
    async def test() -> None:
        stage = Stage()
        stage.holding.hold(7, 60.0)
        stage.leaving.end_hold()
        assert not stage.holding.held
        stage.holding.hold(8, 60.0, when_expired=lambda hold_id: None)
        held = stage.change()
        stage.leaving.end_hold()
        with pytest.raises(ShardNotReady, match="draining while its state moves"):
            await held

    on_loop(test)
