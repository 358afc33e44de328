"""EmbeddingService: open, pull, push, close a number, the stream of them all, leave."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc.aio

from shardam_proto.errors import BadOption, VersionMismatch
from shardam_proto.limits import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.v1 import embedding_pb2, embedding_pb2_grpc
from shardam_server.shard.client_closing import ClientClosing
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.holding import mark_of
from shardam_server.shard.phases import Laps
from shardam_server.shard.services import client_life
from shardam_server.shard.services.exchange import ExchangeStream
from shardam_server.shard.services.exchange_work import ExchangeWork
from shardam_server.shard.services.pulls import Pulls
from shardam_server.shard.services.pushes import Pushes, PushPart
from shardam_server.shard.services.row_changes import RowChanges


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Training traffic of one shard.

    Args:
        shard: the shard.
        closing: closes clients on all shards, if this one is home.
        groups: keeps groups of workers, if this one is home.
    """

    def __init__(self, shard: ShardContext, closing: ClientClosing, groups: HomeGroups) -> None:
        self._shard = shard
        self._closing = closing
        self._groups = groups
        self._pulls = Pulls(shard)
        self._pushes = Pushes(shard)
        self._work = ExchangeWork(self._pulls, self._pushes, RowChanges(shard), groups.steps)

    async def Open(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.OpenRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.OpenRequest, embedding_pb2.OpenResponse],
    ) -> embedding_pb2.OpenResponse:
        """Registers a client, or tells where a known one stands."""
        shard = self._shard
        shard.check_serving(request.header)
        low, high = request.min_protocol_version, request.max_protocol_version
        if not low <= high:
            raise BadOption(f"min_protocol_version {low} is above max_protocol_version {high}")
        version = min(high, PROTOCOL_VERSION)
        if version < max(low, MIN_PROTOCOL_VERSION):
            raise VersionMismatch(
                f"the client speaks protocol versions {low} to {high}, shard {shard.identity.index} {MIN_PROTOCOL_VERSION} to "
                f"{PROTOCOL_VERSION}; use matching shardam packages"
            )
        client_id = request.header.client_id

        def open_client() -> int:
            entry = shard.state.open_client(client_id, heartbeats=request.heartbeats)
            part = shard.state.groups.part(client_id)
            return entry.last_number if part is None else max(entry.last_number, part.origin.number)

        last_number = await shard.change(open_client)
        return embedding_pb2.OpenResponse(
            header=shard.header(request.header, last_number),
            protocol_version=version,
            cluster_id=shard.identity.require_cluster().cluster_id,
            num_shards=shard.identity.require_route_map().num_shards,
            client_lease_s=shard.client_lease_s,
        )

    async def Pull(  # type: ignore[override]  # noqa: N802 - the service's name; the answer is encoded already
        self,
        request: embedding_pb2.PullRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.PullRequest, embedding_pb2.PullResponse],
    ) -> bytes:
        """Reads weights; creates nothing."""
        self._shard.check_serving(request.header)
        return await self._pulls.read(request)

    async def Push(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.PushRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.PushRequest, embedding_pb2.PushResponse],
    ) -> embedding_pb2.PushResponse:
        """Applies one part of an optimizer step."""
        self._shard.check_serving(request.header)
        self._shard.sequencer.check_room()
        laps = Laps(time.perf_counter())
        return await self._shard.change(
            lambda: self._pushes.apply(PushPart.of_message(request, request.row_ids, request.rows), laps),
            request.ByteSize(),
            mark_of(request.header),
        )

    async def CloseNumber(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.CloseNumberRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.CloseNumberRequest, embedding_pb2.CloseNumberResponse],
    ) -> embedding_pb2.CloseNumberResponse:
        """Uses a number up without applying its change here."""
        self._shard.check_serving(request.header)
        self._shard.sequencer.check_room()
        return await self._shard.change(lambda: self._pushes.close_number(request), request.ByteSize(), mark_of(request.header))

    async def Exchange(  # type: ignore[override]  # noqa: N802 - the service's name; the stubs know only generators
        self,
        request_iterator: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> None:
        """Serves one stream until its client ends it or the shard drains; the front leaves its messages as bytes."""
        await ExchangeStream(self._shard, self._work, context).run()

    async def Heartbeat(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.HeartbeatRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.HeartbeatRequest, embedding_pb2.HeartbeatResponse],
    ) -> embedding_pb2.HeartbeatResponse:
        """Notes a sign of life; on home only."""
        return await client_life.hear(self._shard, request)

    async def Leave(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.LeaveRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.LeaveRequest, embedding_pb2.LeaveResponse],
    ) -> embedding_pb2.LeaveResponse:
        """Ends a client; on home on all shards."""
        return await client_life.leave(self._shard, self._closing, self._groups, request)

    async def JoinGroup(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.JoinGroupRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.JoinGroupRequest, embedding_pb2.JoinGroupResponse],
    ) -> embedding_pb2.JoinGroupResponse:
        """Takes a client into a group of workers; on home only."""
        self._shard.check_serving(request.header)
        first_step = await self._groups.join(request)
        return embedding_pb2.JoinGroupResponse(header=self._shard.header(request.header), first_step=first_step)
