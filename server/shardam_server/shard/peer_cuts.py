"""Calls of home to all shards about cuts, files and plans (PROTOCOL.md, section 8): to itself as to the others.

Every call may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias, TypeVar

from shardam_proto.errors import ShardNotReady
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import common_pb2, cut_pb2, shard_pb2_grpc
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peers import Peers

CALL_TIMEOUT_S = 10.0
"""Deadline of a call that waits for nothing but the changes before it; beyond, the hold of a cut is long over."""

DROP_TIMEOUT_S = 30.0
"""Deadline of giving a task up, which ends at its next piece of a file and then removes what it wrote."""


class ShardCuts(Protocol):
    """What one shard does for home's cuts, files and plans, without the network between.

    A request's header is set. Each raises ShardamError where the shard refuses.
    """

    async def hold(self, request: cut_pb2.HoldRequest) -> cut_pb2.HoldResponse:
        """Holds changes back and tells where clients stand."""
        ...

    async def advance(self, request: cut_pb2.AdvanceRequest) -> cut_pb2.AdvanceResponse:
        """Applies changes up to numbers."""
        ...

    async def cut(self, request: cut_pb2.CutRequest) -> cut_pb2.CutResponse:
        """Takes a snapshot and begins to write it."""
        ...

    async def release(self, request: cut_pb2.ReleaseRequest) -> cut_pb2.ReleaseResponse:
        """Ends a hold."""
        ...

    async def check_files(self, request: cut_pb2.CheckFilesRequest) -> cut_pb2.CheckFilesResponse:
        """Begins to check the files that this shard would load."""
        ...

    async def adopt_plan(self, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        """Learns of a plan."""
        ...

    async def get_task(self, request: cut_pb2.GetTaskRequest) -> cut_pb2.GetTaskResponse:
        """Says how far a task is."""
        ...

    async def drop_task(self, request: cut_pb2.DropTaskRequest) -> cut_pb2.DropTaskResponse:
        """Gives a task up."""
        ...


RequestT = TypeVar(
    "RequestT",
    cut_pb2.HoldRequest,
    cut_pb2.AdvanceRequest,
    cut_pb2.CutRequest,
    cut_pb2.ReleaseRequest,
    cut_pb2.CheckFilesRequest,
    cut_pb2.AdoptPlanRequest,
    cut_pb2.GetTaskRequest,
    cut_pb2.DropTaskRequest,
)
ResponseT = TypeVar("ResponseT")
There: TypeAlias = "Callable[[shard_pb2_grpc.ShardServiceAsyncStub], Callable[..., Awaitable[ResponseT]]]"
"""Picks a method of another shard's stub."""


class PeerCuts:
    """Speaks to all shards, home included, by index. Used on the event loop of home.

    All methods set the request's header, and raise ShardamError where the shard refused or did not answer.

    Args:
        identity: home's.
        peers: the other shards' channels.
        directory: knows where they are.
        here: what home itself does.
    """

    def __init__(self, identity: ShardIdentity, peers: Peers, directory: PeerDirectory, here: ShardCuts) -> None:
        self._identity = identity
        self._peers = peers
        self._directory = directory
        self._here = here

    @property
    def shards(self) -> range:
        """The indexes of all shards.

        Raises:
            ShardNotReady: the cluster is not known yet.
        """
        return range(self._identity.require_cluster().num_shards)

    async def refresh(self) -> None:
        """Looks again where the other shards are; before a job, and after a call that failed."""
        await self._directory.refresh()

    def entry(self, index: int) -> ShardEntry:
        """Returns another shard's entry.

        Raises:
            ShardNotReady: it has not been registered since this process started.
        """
        return self._directory.entry(index)

    async def hold(self, index: int, request: cut_pb2.HoldRequest) -> cut_pb2.HoldResponse:
        """Holds changes back and learns where clients stand."""
        return await self._call(index, request, self._here.hold, lambda stub: stub.Hold)

    async def advance(self, index: int, request: cut_pb2.AdvanceRequest, hold_s: float) -> cut_pb2.AdvanceResponse:
        """Has changes applied up to numbers; the shard says which it lacks when its hold ends, after so long."""
        return await self._call(index, request, self._here.advance, lambda stub: stub.Advance, hold_s + CALL_TIMEOUT_S)

    async def cut(self, index: int, request: cut_pb2.CutRequest) -> cut_pb2.CutResponse:
        """Has a snapshot taken, and its writing begun."""
        return await self._call(index, request, self._here.cut, lambda stub: stub.Cut)

    async def release(self, index: int, request: cut_pb2.ReleaseRequest) -> cut_pb2.ReleaseResponse:
        """Ends a hold."""
        return await self._call(index, request, self._here.release, lambda stub: stub.Release)

    async def check_files(self, index: int, request: cut_pb2.CheckFilesRequest) -> cut_pb2.CheckFilesResponse:
        """Has a checkpoint's files checked."""
        return await self._call(index, request, self._here.check_files, lambda stub: stub.CheckFiles)

    async def adopt_plan(self, index: int, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        """Tells of a plan."""
        return await self._call(index, request, self._here.adopt_plan, lambda stub: stub.AdoptPlan)

    async def get_task(self, index: int, request: cut_pb2.GetTaskRequest) -> cut_pb2.GetTaskResponse:
        """Asks how far a task is."""
        return await self._call(index, request, self._here.get_task, lambda stub: stub.GetTask)

    async def drop_task(self, index: int, request: cut_pb2.DropTaskRequest) -> cut_pb2.DropTaskResponse:
        """Has a task given up."""
        return await self._call(index, request, self._here.drop_task, lambda stub: stub.DropTask, DROP_TIMEOUT_S)

    async def _call(
        self,
        index: int,
        request: RequestT,
        here: Callable[[RequestT], Awaitable[ResponseT]],
        there: There[ResponseT],
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> ResponseT:
        if index == self._identity.index:
            request.header.CopyFrom(self._own_header(timeout_s))
            try:
                return await asyncio.wait_for(here(request), timeout_s)
            except TimeoutError:
                raise ShardNotReady(f"home did not answer itself within {timeout_s:g} s; try again") from None
        peer = self._directory.entry(index)
        request.header.CopyFrom(self._peers.header(peer, timeout_s))
        async with self._peers.kept_channel(peer) as stub:
            return await there(stub)(request, timeout=timeout_s, metadata=self._peers.metadata)

    def _own_header(self, timeout_s: float) -> common_pb2.RequestHeader:
        return common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=self._identity.require_cluster().cluster_id,
            incarnation=self._identity.incarnation,
            budget_s=timeout_s,
        )
