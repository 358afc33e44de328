"""CheckpointService: what trainers and operators ask of home's checkpoints."""

from __future__ import annotations

import asyncio

import grpc.aio

from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2
from shardam_server.shard.checkpoints.descriptions import describe
from shardam_server.shard.checkpoints.extras import read_part
from shardam_server.shard.checkpoints.folders import problem_of_sizes
from shardam_server.shard.checkpoints.home import HomeCheckpoints
from shardam_server.shard.context import ShardContext
from shardam_server.shard.services.cuts import no_folder

WAIT_S = 10.0
"""A call that waits for a cut is answered after this time at the latest; its repeat goes on waiting."""

BUDGET_SHARE = 0.8
"""So that the answer is there before the caller gives it up."""


class CheckpointServicer(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Home's checkpoints; another shard refuses.

    Args:
        shard: the shard.
        checkpoints: home's; None: there is no folder for them.
    """

    def __init__(self, shard: ShardContext, checkpoints: HomeCheckpoints | None) -> None:
        self._shard = shard
        self._given = checkpoints

    async def CreateCheckpoint(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.CreateCheckpointRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.CreateCheckpointRequest, checkpoint_pb2.CreateCheckpointResponse],
    ) -> checkpoint_pb2.CreateCheckpointResponse:
        """Has a checkpoint made; answers once the state is cut, or with a job that waits."""
        shard = self._shard
        self._check(request.header)
        shard.check_serving(request.header)
        wait_s = min(WAIT_S, request.header.budget_s * BUDGET_SHARE) if request.header.budget_s else WAIT_S
        job = await self._checkpoints.create(request, wait_s)
        return checkpoint_pb2.CreateCheckpointResponse(header=shard.header(request.header), job=job.message())

    async def PutExtra(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.PutExtraRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.PutExtraRequest, checkpoint_pb2.PutExtraResponse],
    ) -> checkpoint_pb2.PutExtraResponse:
        """Takes a part of what a trainer adds."""
        self._check(request.header)
        received = await asyncio.to_thread(
            self._checkpoints.extras.put, request.extra_id, request.offset, request.total_bytes, request.data
        )
        return checkpoint_pb2.PutExtraResponse(header=self._header(request.header), received_bytes=received)

    async def GetExtra(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.GetExtraRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.GetExtraRequest, checkpoint_pb2.GetExtraResponse],
    ) -> checkpoint_pb2.GetExtraResponse:
        """Reads a part of what a trainer added."""
        self._check(request.header)

        def read() -> tuple[bytes, int, str]:
            manifest, folder = self._checkpoints.catalogue.read(request.name)
            return *read_part(manifest, folder, request.rank, request.offset), manifest.name

        data, total_bytes, name = await asyncio.to_thread(read)
        return checkpoint_pb2.GetExtraResponse(
            header=self._header(request.header), total_bytes=total_bytes, name=name, data=data
        )

    async def ListCheckpoints(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.ListCheckpointsRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.ListCheckpointsRequest, checkpoint_pb2.ListCheckpointsResponse],
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        """Lists the cluster's checkpoints."""
        self._check(request.header)
        found = await asyncio.to_thread(self._list)
        return checkpoint_pb2.ListCheckpointsResponse(
            header=self._header(request.header), checkpoints=found, root=str(self._checkpoints.catalogue.root)
        )

    def _list(self) -> list[checkpoint_pb2.CheckpointInfo]:
        return [
            checkpoint_pb2.CheckpointInfo(name=entry.name, folder=str(entry.folder), problem=entry.problem)
            if entry.manifest is None
            else describe(entry.manifest, entry.folder, entry.problem, whole=False)
            for entry in self._checkpoints.catalogue.list()
        ]

    async def GetCheckpoint(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.GetCheckpointRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.GetCheckpointRequest, checkpoint_pb2.GetCheckpointResponse],
    ) -> checkpoint_pb2.GetCheckpointResponse:
        """Describes one checkpoint."""
        self._check(request.header)

        def read() -> checkpoint_pb2.CheckpointInfo:
            manifest, folder = self._checkpoints.catalogue.read(request.name)
            return describe(manifest, folder, problem_of_sizes(manifest, folder), whole=True)

        found = await asyncio.to_thread(read)
        return checkpoint_pb2.GetCheckpointResponse(header=self._header(request.header), checkpoint=found)

    async def VerifyCheckpoint(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.VerifyCheckpointRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.VerifyCheckpointRequest, checkpoint_pb2.VerifyCheckpointResponse],
    ) -> checkpoint_pb2.VerifyCheckpointResponse:
        """Begins to read all files of a checkpoint."""
        self._check(request.header)
        await asyncio.to_thread(self._checkpoints.catalogue.resolve, request.name)
        job = self._checkpoints.verify(request.name)
        return checkpoint_pb2.VerifyCheckpointResponse(header=self._header(request.header), job=job.message())

    async def DeleteCheckpoint(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.DeleteCheckpointRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.DeleteCheckpointRequest, checkpoint_pb2.DeleteCheckpointResponse],
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        """Deletes a checkpoint."""
        self._check(request.header)
        self._checkpoints.check_unused(request.name)
        await asyncio.to_thread(self._checkpoints.delete, request.name)
        return checkpoint_pb2.DeleteCheckpointResponse(header=self._header(request.header))

    async def RestoreCheckpoint(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.RestoreCheckpointRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.RestoreCheckpointRequest, checkpoint_pb2.RestoreCheckpointResponse],
    ) -> checkpoint_pb2.RestoreCheckpointResponse:
        """Begins to replace the state by a checkpoint's."""
        self._check(request.header)
        job = self._checkpoints.restore(request)
        return checkpoint_pb2.RestoreCheckpointResponse(header=self._header(request.header), job=job.message())

    async def Reshard(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.ReshardRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.ReshardRequest, checkpoint_pb2.ReshardResponse],
    ) -> checkpoint_pb2.ReshardResponse:
        """Begins to move the state to another number of shards."""
        self._check(request.header)
        self._shard.check_serving(request.header)
        job = self._checkpoints.reshard(request.num_shards)
        return checkpoint_pb2.ReshardResponse(header=self._header(request.header), job=job.message())

    async def GetJob(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.GetJobRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.GetJobRequest, checkpoint_pb2.GetJobResponse],
    ) -> checkpoint_pb2.GetJobResponse:
        """Describes a job."""
        self._check(request.header)
        job = self._checkpoints.jobs.find(request.id)
        return checkpoint_pb2.GetJobResponse(header=self._header(request.header), job=job.message())

    async def ListJobs(  # noqa: N802 - the service's name
        self,
        request: checkpoint_pb2.ListJobsRequest,
        context: grpc.aio.ServicerContext[checkpoint_pb2.ListJobsRequest, checkpoint_pb2.ListJobsResponse],
    ) -> checkpoint_pb2.ListJobsResponse:
        """Lists the jobs."""
        self._check(request.header)
        jobs: list[job_pb2.Job] = [job.message() for job in self._checkpoints.jobs.all()]
        return checkpoint_pb2.ListJobsResponse(header=self._header(request.header), jobs=jobs)

    def _check(self, header: common_pb2.RequestHeader) -> None:
        """Checks that a request means this shard, and that this shard is home and has a folder for checkpoints.

        Raises:
            WrongRole: it is not home.
            BadOption: there is no folder.
            ShardamError: as ShardIdentity.check.
        """
        shard = self._shard
        shard.identity.require_cluster()
        shard.state.clients.touch(header.client_id)
        shard.identity.check(header)
        shard.identity.require_home("checkpoints are made by")
        if self._given is None:
            raise no_folder(shard.identity.index)
        shard.tenure.check()

    def _header(self, header: common_pb2.RequestHeader) -> common_pb2.ResponseHeader:
        return self._shard.header(header)

    @property
    def _checkpoints(self) -> HomeCheckpoints:
        if self._given is None:
            raise no_folder(self._shard.identity.index)
        return self._given
