"""Deciding a plan: from one moment on the whole cluster goes on from a checkpoint (shardam_proto.registry.Plan)."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Sequence

from shardam_proto.errors import CheckpointFailed, ShardNotReady, WrongCluster
from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.v1 import common_pb2
from shardam_server.shard.checkpoints.manifest import Manifest
from shardam_server.shard.context import ShardContext
from shardam_server.shard.registration import Registration
from shardam_server.shard.shared_entries import PlanAnswer, PlanEntry

PLAN_ID_BYTES = 8
"""Random bytes that tell one plan from another."""


def new_plan_id() -> str:
    """Returns a random id."""
    return secrets.token_hex(PLAN_ID_BYTES)


def schemas(manifest: Manifest, plan: Plan) -> list[common_pb2.TableInfo]:
    """Returns the schemas of the tables that a plan loads."""
    return [
        common_pb2.TableInfo(
            spec=table.spec.to_proto(),
            table_id=table.table_id,
            table_seed=table.table_seed,
            read_only=plan.makes_read_only(table.spec.name),
        )
        for table in manifest.tables
        if table.spec.name in plan.load
    ]


async def commit(
    shard: ShardContext,
    registration: Registration,
    plan: Plan,
    tables: Sequence[common_pb2.TableInfo],
    hold_id: int = 0,
) -> None:
    """Decides a plan, in one step: from then on Redis has it, its cluster, its map and its tables, and no lineage.

    May be repeated with the same plan. Where it raises RedisUnreachable it may have been decided all the same:
    `is_decided` says.

    Args:
        shard: home.
        registration: its entries in Redis.
        plan: the plan; its timeline or epoch is above home's.
        tables: schemas of all tables from then on.
        hold_id: final hold under which the state moves to other shards; zero: whatever shards do meanwhile is given up.

    Raises:
        CheckpointFailed: it is a move, and not allowed any more; nothing is decided.
        ShardNotReady: home has lost its name, or Redis what it knew of the cluster, or there is another plan; nothing is
            decided.
        WrongCluster: Redis knows another cluster by this name.
        RedisUnreachable: Redis does not answer.
    """
    identity = shard.identity
    identity.require_home("plans are decided by")
    shard.tenure.check()
    entry = PlanEntry(plan, ClusterEntry(identity.require_cluster().cluster_id, plan.num_shards, plan.seed), tables)
    if hold_id:
        num_shards = identity.require_cluster().num_shards
        decide = functools.partial(registration.decide_move, hold_id=hold_id, num_shards=num_shards)
    else:
        decide = functools.partial(registration.decide_plan)
    answer = await asyncio.to_thread(decide, entry, identity.plan, identity.incarnation)
    if answer is PlanAnswer.OTHER_CLUSTER:
        raise WrongCluster(f"Redis knows another cluster as {registration.keys.cluster!r} now; nothing was changed")
    if answer is PlanAnswer.NOT_ALLOWED:
        raise CheckpointFailed(
            "a shard went on, or was started anew, before the move was decided: nothing has moved; try again"
        )
    if answer is not PlanAnswer.DONE:
        raise ShardNotReady(
            f"the state was not replaced, because of what Redis says ({answer.value}): another process may be home, or Redis "
            "was emptied; try again"
        )


def needed_folder(registration: Registration) -> str | None:
    """Returns the folder of the last plan's checkpoint while a shard has not loaded it; None: all have. Blocking.

    Raises:
        RedisUnreachable: Redis does not answer.
    """
    shared = registration.read_shared()
    plan = shared.plan
    if plan is None or all(index in shared.lineages for index in range(plan.num_shards)):
        return None
    return plan.folder


async def is_decided(registration: Registration, plan: Plan) -> bool:
    """Whether a plan is decided, or a later one.

    Raises:
        RedisUnreachable: Redis does not answer.
    """
    known = (await asyncio.to_thread(registration.read_shared)).plan
    if known is None:
        return False
    return known.plan_id == plan.plan_id or known.is_ahead_of(plan.timeline, plan.epoch)
