"""What every route needs: the settings that matter to it, the way to the shards, and the id of its request."""

from __future__ import annotations

import dataclasses
from typing import Annotated, cast

from fastapi import Depends, Request

from shardam_server.admin.metrics import RestMetrics
from shardam_server.admin.shard_calls import ShardCalls


@dataclasses.dataclass(frozen=True)
class AdminContext:
    """What the process holds; nothing of it outlives a restart or differs between two admin processes.

    Attributes:
        cluster: the cluster's name.
        redis: Redis' URL without its password.
        version: version of the package.
        calls: reaches the shards.
        metrics: metrics of the routes.
        max_batch_ids: ids that one batchGet may name.
        max_import_mib: MiB of a table's file that a request may bring.
    """

    cluster: str
    redis: str
    version: str
    calls: ShardCalls
    metrics: RestMetrics
    max_batch_ids: int
    max_import_mib: int


async def _admin_context(request: Request) -> AdminContext:
    return cast(AdminContext, request.app.state.context)


async def _request_number(request: Request) -> int:
    return cast(int, request.state.request_number)


Admin = Annotated[AdminContext, Depends(_admin_context)]
"""The process' context, as a parameter of an endpoint."""

RequestNumber = Annotated[int, Depends(_request_number)]
"""The request's id as shards see it (uint64), as a parameter of an endpoint."""
