"""The calls of ShardService that home makes for checkpoints; what they do is in cuts.py."""

from __future__ import annotations

import grpc.aio

from shardam_proto.v1 import cut_pb2, shard_pb2_grpc
from shardam_server.shard.peer_cuts import ShardCuts


class CutCalls(shard_pb2_grpc.ShardServiceServicer):
    """Hands these calls on.

    Args:
        cuts: does what they ask.
    """

    def __init__(self, cuts: ShardCuts) -> None:
        self._cuts = cuts

    async def Hold(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.HoldRequest,
        context: grpc.aio.ServicerContext[cut_pb2.HoldRequest, cut_pb2.HoldResponse],
    ) -> cut_pb2.HoldResponse:
        """Holds changes back and tells where clients stand."""
        return await self._cuts.hold(request)

    async def Advance(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.AdvanceRequest,
        context: grpc.aio.ServicerContext[cut_pb2.AdvanceRequest, cut_pb2.AdvanceResponse],
    ) -> cut_pb2.AdvanceResponse:
        """Applies changes up to numbers."""
        return await self._cuts.advance(request)

    async def Cut(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.CutRequest,
        context: grpc.aio.ServicerContext[cut_pb2.CutRequest, cut_pb2.CutResponse],
    ) -> cut_pb2.CutResponse:
        """Cuts, and begins to write what was cut."""
        return await self._cuts.cut(request)

    async def Release(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.ReleaseRequest,
        context: grpc.aio.ServicerContext[cut_pb2.ReleaseRequest, cut_pb2.ReleaseResponse],
    ) -> cut_pb2.ReleaseResponse:
        """Ends a hold."""
        return await self._cuts.release(request)

    async def CheckFiles(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.CheckFilesRequest,
        context: grpc.aio.ServicerContext[cut_pb2.CheckFilesRequest, cut_pb2.CheckFilesResponse],
    ) -> cut_pb2.CheckFilesResponse:
        """Begins to check the files that this shard would load."""
        return await self._cuts.check_files(request)

    async def AdoptPlan(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.AdoptPlanRequest,
        context: grpc.aio.ServicerContext[cut_pb2.AdoptPlanRequest, cut_pb2.AdoptPlanResponse],
    ) -> cut_pb2.AdoptPlanResponse:
        """Learns of a plan."""
        return await self._cuts.adopt_plan(request)

    async def GetTask(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.GetTaskRequest,
        context: grpc.aio.ServicerContext[cut_pb2.GetTaskRequest, cut_pb2.GetTaskResponse],
    ) -> cut_pb2.GetTaskResponse:
        """Describes a task."""
        return await self._cuts.get_task(request)

    async def DropTask(  # noqa: N802 - the service's name
        self,
        request: cut_pb2.DropTaskRequest,
        context: grpc.aio.ServicerContext[cut_pb2.DropTaskRequest, cut_pb2.DropTaskResponse],
    ) -> cut_pb2.DropTaskResponse:
        """Gives a task up."""
        return await self._cuts.drop_task(request)
