"""ShardService: status, metrics, and what home asks of the other shards."""

from __future__ import annotations

import asyncio
import socket
import time
from importlib.metadata import version

import grpc.aio

from shardam_proto.errors import ShardNotReady
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.checkpoints.home import HomeCheckpoints
from shardam_server.shard.client_closing import ClientClosing
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.last_numbers import closed_numbers, end_all_here, end_here, settle_here
from shardam_server.shard.lost import LostShard
from shardam_server.shard.metrics import resident_bytes
from shardam_server.shard.peer_cuts import ShardCuts
from shardam_server.shard.services import peer_groups, workers
from shardam_server.shard.services.cut_calls import CutCalls
from shardam_server.shard.table import table_from_info


class ShardServicer(CutCalls):
    """One shard process. Answers while starting, LOST and draining, too.

    Args:
        shard: the shard.
        lost: what it does when it is told to forget its state.
        closing: closes clients; used on home only.
        groups: keeps groups of workers; used on home only.
        cuts: does what home asks for checkpoints.
        checkpoints: home's, and what is known of their folder; None: there is none.
    """

    def __init__(
        self,
        shard: ShardContext,
        lost: LostShard,
        closing: ClientClosing,
        groups: HomeGroups,
        cuts: ShardCuts,
        checkpoints: HomeCheckpoints | None,
    ) -> None:
        super().__init__(cuts)
        self._checkpoints = checkpoints
        self._shard = shard
        self._lost = lost
        self._closing = closing
        self._groups = groups

    async def GetStatus(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[shard_pb2.GetStatusRequest, shard_pb2.GetStatusResponse],
    ) -> shard_pb2.GetStatusResponse:
        """Describes the process and its state."""
        shard = self._shard
        shard.identity.check(request.header)
        tables = shard.state.tables()
        journal = shard.kept.status()
        status = shard_pb2.GetStatusResponse(
            header=shard.header(request.header),
            version=version("shardam"),
            state=shard.serving_state,
            waiting_for=shard.waiting_for,
            address=shard.address,
            http_address=shard.http_address,
            device=shard.device.name,
            pid=shard.pid,
            host_name=socket.gethostname(),
            uptime_s=time.monotonic() - shard.started,
            num_tables=len(tables),
            num_rows=sum(table.num_rows for table in tables),
            max_rows=shard.state.max_rows,
            record_bytes=sum(table.storage.record_bytes for table in tables),
            index_bytes=sum(table.storage.index_bytes for table in tables),
            resident_bytes=resident_bytes(),
            queue_depth=shard.sequencer.queue_depth,
            num_clients=shard.state.clients.num_open,
            device_memory_bytes=shard.device.memory_bytes,
            queue_bytes=shard.sequencer.queue_bytes,
            reserved_bytes=shard.streams.open_parts.reserved_bytes,
            parked_requests=shard.streams.parking.num_parked,
            journal_mode=journal.mode,
            journal_state=journal.state,
            journal_problem=journal.problem,
            journal_bytes=journal.size_bytes,
            data_folder=str(shard.kept.folder or ""),
            pre_image_bytes=shard.state.snapshots.kept_bytes,
        )
        if self._checkpoints is not None:
            status.checkpoint_root = str(self._checkpoints.catalogue.root)
            status.checkpoint_problem = self._checkpoints.problem
            last = self._checkpoints.jobs.last_checkpoint
            if last is not None:
                status.last_checkpoint.CopyFrom(last.message())
        return status

    async def InstallTables(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.InstallTablesRequest,
        context: grpc.aio.ServicerContext[shard_pb2.InstallTablesRequest, shard_pb2.InstallTablesResponse],
    ) -> shard_pb2.InstallTablesResponse:
        """Installs tables that home created; also while this shard still waits for the others."""
        shard = self._shard
        shard.check_not_lost()
        shard.identity.require_cluster()
        shard.identity.check(request.header)
        if not shard.identity.lineage:
            raise ShardNotReady(f"shard {shard.identity.index} is starting, waits for {shard.waiting_for}; try again")
        tables = [table_from_info(info, shard.device.make_records) for info in request.tables]
        await shard.change(lambda: shard.state.install(tables))
        return shard_pb2.InstallTablesResponse(header=shard.header(request.header))

    async def EndClient(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.EndClientRequest,
        context: grpc.aio.ServicerContext[shard_pb2.EndClientRequest, shard_pb2.EndClientResponse],
    ) -> shard_pb2.EndClientResponse:
        """Ends a client here for home, and tells how its last numbers ended."""
        shard = self._shard
        shard.check_serving(request.header)
        numbers = await shard.change(lambda: end_here(shard.state, request.client_id))
        return shard_pb2.EndClientResponse(
            header=shard.header(request.header),
            last_number=numbers.last_number,
            numbers=closed_numbers(numbers.tables),
            settled=numbers.settled,
        )

    async def EndClients(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.EndClientsRequest,
        context: grpc.aio.ServicerContext[shard_pb2.EndClientsRequest, shard_pb2.EndClientsResponse],
    ) -> shard_pb2.EndClientsResponse:
        """Ends all clients here for a shard that starts empty, and tells how their last numbers ended."""
        shard = self._shard
        shard.check_serving(request.header)
        clients, next_after = await shard.change(lambda: end_all_here(shard.state, request.after_client_id))
        if shard.identity.is_home:
            await self._groups.let_closed_go()
            await self._closing.take_up()  # the caller may break off, and its former state come back
        return shard_pb2.EndClientsResponse(
            header=shard.header(request.header), clients=clients, next_after_client_id=next_after
        )

    async def SettleClient(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.SettleClientRequest,
        context: grpc.aio.ServicerContext[shard_pb2.SettleClientRequest, shard_pb2.SettleClientResponse],
    ) -> shard_pb2.SettleClientResponse:
        """Closes numbers of an ended client that other shards have."""
        shard = self._shard
        shard.check_serving(request.header)
        numbers = [(closed.number, tuple(closed.table_ids)) for closed in request.numbers]
        await shard.change_now(lambda: settle_here(shard.state, request.client_id, numbers, settled=request.settled))
        return shard_pb2.SettleClientResponse(header=shard.header(request.header))

    async def UpdateGroup(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.UpdateGroupRequest,
        context: grpc.aio.ServicerContext[shard_pb2.UpdateGroupRequest, shard_pb2.UpdateGroupResponse],
    ) -> shard_pb2.UpdateGroupResponse:
        """Brings a group here to where home has it."""
        return await peer_groups.update(self._shard, request)

    async def CheckStep(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.CheckStepRequest,
        context: grpc.aio.ServicerContext[shard_pb2.CheckStepRequest, shard_pb2.CheckStepResponse],
    ) -> shard_pb2.CheckStepResponse:
        """Says whether a step's merged gradients may be applied here."""
        return await peer_groups.check(self._shard, request)

    async def ListWorkers(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.ListWorkersRequest,
        context: grpc.aio.ServicerContext[shard_pb2.ListWorkersRequest, shard_pb2.ListWorkersResponse],
    ) -> shard_pb2.ListWorkersResponse:
        """Lists the workers and what groups wait for; on home only."""
        return await workers.list_workers(self._shard, self._groups, request)

    async def ForgetState(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.ForgetStateRequest,
        context: grpc.aio.ServicerContext[shard_pb2.ForgetStateRequest, shard_pb2.ForgetStateResponse],
    ) -> shard_pb2.ForgetStateResponse:
        """Starts empty on a new lineage, if the shard is LOST."""
        shard = self._shard
        shard.identity.require_cluster()
        shard.identity.check(request.header)
        # Goes on whatever becomes of the caller: a new lineage is not left half made.
        await asyncio.shield(self._lost.forget(without_lost=request.without_lost))
        return shard_pb2.ForgetStateResponse(header=shard.header(request.header))

    async def GetMetrics(  # noqa: N802 - the service's name
        self,
        request: shard_pb2.GetMetricsRequest,
        context: grpc.aio.ServicerContext[shard_pb2.GetMetricsRequest, shard_pb2.GetMetricsResponse],
    ) -> shard_pb2.GetMetricsResponse:
        """Returns the shard's metrics as text."""
        self._shard.identity.check(request.header)
        text = await asyncio.to_thread(self._shard.metrics.text)  # not behind the pulls whose number it tells
        return shard_pb2.GetMetricsResponse(header=self._shard.header(request.header), text=text)
