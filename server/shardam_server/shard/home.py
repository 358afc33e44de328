"""What only the home shard does: it decides that a table exists and installs it everywhere (PROTOCOL.md, section 1).

The schema goes to Redis first, which gives the name to one table for good; then to the other shards, then here. A call that
breaks off in between is finished by repeating it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardam_kernels.hashing import table_seed
from shardam_proto.errors import SchemaMismatch, ShardLost, ShardNotReady
from shardam_proto.registry import ShardEntry, lost_shard_problem
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import random_63_bits
from shardam_server.shard.peers import Peers
from shardam_server.shard.registration import Registration
from shardam_server.shard.table import Table, table_from_info
from shardam_server.shard.table_initializers import fold_initializer


class Home:
    """Creates tables for the whole cluster.

    Args:
        shard: this shard.
        registration: its entries in Redis.
        peers: the other shards.
    """

    def __init__(self, shard: ShardContext, registration: Registration, peers: Peers) -> None:
        self._shard = shard
        self._registration = registration
        self._peers = peers
        self._one_at_a_time = asyncio.Lock()

    async def create_tables(self, specs: Sequence[TableSpec], seeds: Mapping[str, int] = MappingProxyType({})) -> list[Table]:
        """Creates tables on all shards, or returns those that exist with the same schema.

        Args:
            specs: the schemas.
            seeds: by name, of those that are made now and keep another table's seed.

        Raises:
            WrongRole: this shard is not home.
            SchemaMismatch: a table exists with another schema; nothing was created.
            ShardLost: a shard lacks its state; nothing was created.
            RedisUnreachable, ShardNotReady, ShardUnreachable: not everyone could be told; repeat the call.
        """
        self._shard.identity.require_home("tables are created by")
        by_name = self._check_names(specs)
        async with self._one_at_a_time:
            missing = [spec for spec in by_name.values() if self._shard.state.find_table(spec.name) is None]
            if missing:
                await self._create(missing, seeds)
        tables = [self._shard.state.find_table(spec.name) for spec in specs]
        return [table for table in tables if table is not None]

    def _check_names(self, specs: Sequence[TableSpec]) -> dict[str, TableSpec]:
        by_name: dict[str, TableSpec] = {}
        for spec in specs:
            present = self._shard.state.find_table(spec.name)
            _require_same(spec, by_name.setdefault(spec.name, present.spec if present else spec))
        return by_name

    async def _create(self, specs: Sequence[TableSpec], seeds: Mapping[str, int]) -> None:
        cluster_seed = self._shard.identity.require_cluster().seed
        wanted = [
            common_pb2.TableInfo(
                spec=spec.to_proto(),
                table_id=random_63_bits(),
                table_seed=seeds.get(spec.name, table_seed(cluster_seed, spec.name)),
            )
            for spec in specs
        ]
        for spec in specs:
            fold_initializer(spec)  # one that cannot be folded is refused before anyone knows the table
        state = self._shard.state
        others = await self._other_shards()
        present = await asyncio.to_thread(self._registration.present_tables, [spec.name for spec in specs])
        for spec in specs:
            if spec.name in present:
                _require_same(spec, TableSpec.from_proto(present[spec.name].spec))
        agreed = await asyncio.to_thread(self._registration.publish_tables, wanted)
        for spec, info in zip(specs, agreed, strict=True):
            _require_same(spec, TableSpec.from_proto(info.spec))
        await self._peers.install(others, agreed)
        self._shard.check_state(state)
        await self._shard.change(
            lambda: self._shard.state.install(table_from_info(info, self._shard.device.make_records) for info in agreed)
        )

    async def _other_shards(self) -> list[ShardEntry]:
        view = await asyncio.to_thread(self._registration.view)
        count = self._shard.identity.require_cluster().num_shards
        missing = [index for index in range(count) if index != 0 and index not in view.shards]
        if missing:
            raise ShardNotReady(f"shards {missing} are not registered, so no table can be created; start them and try again")
        for index, entry in sorted(view.shards.items()):
            if entry.lost:
                raise ShardLost(lost_shard_problem(index), metadata={"shard": str(index)})
        return [entry for index, entry in sorted(view.shards.items()) if index != 0]


def _require_same(wanted: TableSpec, present: TableSpec) -> None:
    if wanted != present:
        raise SchemaMismatch(
            f"table {wanted.name!r} exists as {present}, asked for was {wanted}; use the same schema or another name",
            metadata={"table": wanted.name, "present": str(present), "asked": str(wanted)},
        )
