"""What home does with held shards while it is decided whether a restore takes place."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest

from shardam_proto.errors import RedisUnreachable, ShardamError, ShardNotReady
from shardam_proto.registry import Plan
from shardam_proto.v1 import common_pb2
from shardam_server.shard.checkpoints import plans, restoring
from shardam_server.shard.checkpoints.adoption import Adoption
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.cutting import Cutting
from shardam_server.shard.checkpoints.manifest import Manifest
from shardam_server.shard.checkpoints.restoring import Restoring
from shardam_server.shard.checkpoints.table_choice import TableChoice
from shardam_server.shard.context import ShardContext
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.registration import Registration

PLAN = Plan("p", 1, 1, 2, 0, "oak/one", 5, keep=("t",))


@dataclasses.dataclass
class Shards:
    """Counts holds that are released."""

    released: list[int] = dataclasses.field(default_factory=list)

    async def level(self, hold_s: float, *, without: Iterable[bytes] = ()) -> int:
        return 7

    async def release(self, hold_id: int) -> None:
        self.released.append(hold_id)

    def load_tables(self) -> list[common_pb2.TableInfo]:
        return []


@pytest.mark.parametrize(
    ("error", "released"), [(RedisUnreachable("no answer"), []), (ShardNotReady("home has lost its name"), [7])]
)
def test_shards_that_are_held_go_on_only_where_it_is_known_that_nothing_is_decided(
    monkeypatch: pytest.MonkeyPatch, error: ShardamError, released: list[int]
) -> None:
    async def commit(*args: object) -> None:
        raise error

    monkeypatch.setattr(plans, "commit", commit)
    monkeypatch.setattr(restoring, "COMMIT_S", 0.0)
    shards = Shards()
    restore = Restoring(
        cast(ShardContext, SimpleNamespace()),
        cast(Registration, shards),
        cast(PeerCuts, shards),
        cast(Cutting, shards),
        cast(Catalogue, None),
        cast(Adoption, None),
    )
    manifest = Manifest("one", 5, 0.0, 0.0, "0", "oak", "id", 0, 1, 1, 2, (), ())
    checked = restoring._Checked(manifest, "oak/one", TableChoice((), ("t",), (), ()))

    async def run() -> None:
        with pytest.raises(type(error)):
            await restore._decide(PLAN, checked)

    asyncio.run(run())
    assert shards.released == released
