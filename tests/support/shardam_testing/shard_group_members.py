"""A group's members on the shards of a ShardGroup: they join, push and arrive by plain calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, stage
from shardam_server.shard.groups.values import Kind
from shardam_server.shard.table import GradientSection
from shardam_testing.shard_group import ShardGroup, running_group

RANK_0, RANK_1, AGAIN = b"0" * 16, b"1" * 16, b"2" * 16

OPTIONS = AdamOptions(lr=0.1)

Scenario = Callable[[ShardGroup], Awaitable[None]]


def on_three_shards(scenario: Scenario) -> Callable[[], None]:
    """Runs a test on home and two more shards."""

    async def run() -> None:
        async with running_group(3) as shards:
            await scenario(shards)

    def test() -> None:
        asyncio.run(run())

    functools.update_wrapper(test, scenario)
    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would see the shards as a fixture
    return test


def join_request(client_id: bytes, rank: int, *, world_size: int = 2, restarts: int = 0) -> embedding_pb2.JoinGroupRequest:
    terms = group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_SYNC, reduce=group_pb2.REDUCE_MEAN, world_size=world_size)
    header = common_pb2.RequestHeader(protocol_version=PROTOCOL_VERSION, client_id=client_id)
    return embedding_pb2.JoinGroupRequest(header=header, group="workers", terms=terms, rank=rank, restart_count=restarts)


async def join(shards: ShardGroup, client_id: bytes, rank: int, *, world_size: int = 2, restarts: int = 0) -> int:
    shards.open(client_id)
    return await shards.groups.join(join_request(client_id, rank, world_size=world_size, restarts=restarts))


def push(shards: ShardGroup, client_id: bytes, rank: int, step: int, *, number: int = 0, kind: Kind = "gradient") -> None:
    """Stages a part on every shard."""
    for state in shards.states:
        sections = []
        if kind == "gradient":
            gradients = np.full((2, 2), 1.0 + rank, np.float32)
            sections = [GradientSection(state.table(1), np.array([1, 2]), gradients, OPTIONS, 1.0)]
        stage(state, IncomingPart(Origin(client_id, number or step, b"part"), step, rank, kind, sections))


def arrive_request(
    client_id: bytes, rank: int, step: int, *, number: int = 0, budget_s: float = 20.0, peak: float = 1.0
) -> embedding_pb2.ArriveRequest:
    header = common_pb2.RequestHeader(
        protocol_version=PROTOCOL_VERSION,
        client_id=client_id,
        number=number or step,
        step=step,
        rank=rank,
        budget_s=budget_s,
    )
    return embedding_pb2.ArriveRequest(header=header, peaks=[group_pb2.TablePeak(table_id=1, peak=peak)])


async def step_of_both(shards: ShardGroup, step: int) -> list[embedding_pb2.ArriveResponse]:
    for rank, client_id in enumerate((RANK_0, RANK_1)):
        push(shards, client_id, rank, step)
    arrivals = [
        shards.groups.steps.arrive(arrive_request(client_id, rank, step)) for rank, client_id in enumerate((RANK_0, RANK_1))
    ]
    return list(await asyncio.gather(*arrivals))


def group_steps(shards: ShardGroup) -> list[int]:
    return [entry.step for state in shards.states for entry in state.groups]


def table_steps(shards: ShardGroup) -> list[int]:
    return [state.table(1).step for state in shards.states]
