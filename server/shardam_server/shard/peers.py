"""Calls from one shard to the others (ShardService, TableService)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

import grpc
import grpc.aio

from shardam_proto.channels import token_metadata, translate
from shardam_proto.errors import ShardUnreachable
from shardam_proto.limits import CHANNEL_OPTIONS, PROTOCOL_VERSION
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import common_pb2, shard_pb2, shard_pb2_grpc, table_pb2, table_pb2_grpc
from shardam_server.shard.front import is_cancelled
from shardam_server.shard.identity import ShardIdentity

PEER_TIMEOUT_S = 30.0
"""Deadline of a call between shards; installing thousands of tables takes seconds."""

CLIENT_TIMEOUT_S = 5.0
"""Deadline of a call that closes a client: a few records behind the changes that wait there. It is repeated until it works."""


class Peers:
    """Speaks to other shards.

    Args:
        identity: who calls; its cluster's id is sent with every call.
        token: the cluster's token, or None.

    Attributes:
        metadata: sent with every call.
    """

    def __init__(self, identity: ShardIdentity, token: str | None) -> None:
        self._identity = identity
        self.metadata = token_metadata(token)
        self._channels: dict[int, tuple[str, grpc.aio.Channel]] = {}

    def header(self, peer: ShardEntry, timeout_s: float = PEER_TIMEOUT_S) -> common_pb2.RequestHeader:
        """Returns the header of a request to a peer."""
        return common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=self._identity.require_cluster().cluster_id,
            incarnation=peer.incarnation,
            budget_s=timeout_s,
        )

    async def install(self, peers: Iterable[ShardEntry], tables: Sequence[common_pb2.TableInfo]) -> None:
        """Installs tables on every peer, all at once.

        Raises:
            ShardamError: a peer refused or did not answer; repeating the call is safe.
        """
        await asyncio.gather(*(self._install(peer, tables) for peer in peers))

    async def _install(self, peer: ShardEntry, tables: Sequence[common_pb2.TableInfo]) -> None:
        request = shard_pb2.InstallTablesRequest(header=self.header(peer), tables=tables)
        async with grpc.aio.insecure_channel(peer.address, options=CHANNEL_OPTIONS) as channel:
            stub: shard_pb2_grpc.ShardServiceAsyncStub = shard_pb2_grpc.ShardServiceStub(channel)
            try:
                await stub.InstallTables(request, timeout=PEER_TIMEOUT_S, metadata=self.metadata)
            except grpc.RpcError as error:
                raise translate(error, f"shard {peer.index} at {peer.address}") from error

    async def table_steps(self, peer: ShardEntry) -> dict[int, int]:
        """Returns a peer's table steps by table id.

        Raises:
            ShardamError: the peer refused or did not answer.
        """
        steps: dict[int, int] = {}
        after = ""
        async with grpc.aio.insecure_channel(peer.address, options=CHANNEL_OPTIONS) as channel:
            stub: table_pb2_grpc.TableServiceAsyncStub = table_pb2_grpc.TableServiceStub(channel)
            while True:
                request = table_pb2.ListTablesRequest(header=self.header(peer), after_name=after)
                try:
                    page = await stub.ListTables(request, timeout=PEER_TIMEOUT_S, metadata=self.metadata)
                except grpc.RpcError as error:
                    raise translate(error, f"shard {peer.index} at {peer.address}") from error
                steps.update({table.table_id: table.table_step for table in page.tables})
                after = page.next_after_name
                if not after:
                    return steps

    async def end_client(self, peer: ShardEntry, client_id: bytes) -> shard_pb2.EndClientResponse:
        """Ends a client on a peer.

        Raises:
            ShardamError: the peer refused or did not answer; repeating the call is safe.
        """
        request = shard_pb2.EndClientRequest(header=self.header(peer, CLIENT_TIMEOUT_S), client_id=client_id)
        async with self.kept_channel(peer) as stub:
            return await stub.EndClient(request, timeout=CLIENT_TIMEOUT_S, metadata=self.metadata)

    async def end_clients(self, peer: ShardEntry) -> list[shard_pb2.EndedClient]:
        """Ends all clients on a peer; returns those whose numbers may be unequal on other shards.

        Raises:
            ShardamError: the peer refused or did not answer; repeating the call is safe.
        """
        ended: list[shard_pb2.EndedClient] = []
        after = b""
        while True:
            request = shard_pb2.EndClientsRequest(header=self.header(peer), after_client_id=after)
            async with self.kept_channel(peer) as stub:
                page = await stub.EndClients(request, timeout=PEER_TIMEOUT_S, metadata=self.metadata)
            ended.extend(page.clients)
            after = page.next_after_client_id
            if not after:
                return ended

    async def settle_client(
        self, peer: ShardEntry, client_id: bytes, numbers: Sequence[shard_pb2.ClosedNumber], *, settled: bool = False
    ) -> None:
        """Closes numbers of an ended client on a peer.

        Args:
            peer: the other shard.
            client_id: the client.
            numbers: the numbers, and the tables that stepped by them.
            settled: its numbers are equal on all shards then.

        Raises:
            ShardamError: the peer refused or did not answer; repeating the call is safe.
        """
        request = shard_pb2.SettleClientRequest(
            header=self.header(peer, CLIENT_TIMEOUT_S), client_id=client_id, numbers=numbers, settled=settled
        )
        async with self.kept_channel(peer) as stub:
            await stub.SettleClient(request, timeout=CLIENT_TIMEOUT_S, metadata=self.metadata)

    async def update_group(self, peer: ShardEntry, request: shard_pb2.UpdateGroupRequest) -> shard_pb2.UpdateGroupResponse:
        """Brings a group on a peer to where it is here; the request's header is set.

        Raises:
            ShardamError: the peer refused or did not answer; repeating the call is safe.
        """
        request.header.CopyFrom(self.header(peer, CLIENT_TIMEOUT_S))
        async with self.kept_channel(peer) as stub:
            return await stub.UpdateGroup(request, timeout=CLIENT_TIMEOUT_S, metadata=self.metadata)

    async def check_step(self, peer: ShardEntry, request: shard_pb2.CheckStepRequest) -> shard_pb2.CheckStepResponse:
        """Asks a peer whether a step may be applied; the request's header is set.

        Raises:
            ShardamError: the peer refused or did not answer; it changes nothing.
        """
        request.header.CopyFrom(self.header(peer))
        async with self.kept_channel(peer) as stub:
            return await stub.CheckStep(request, timeout=PEER_TIMEOUT_S, metadata=self.metadata)

    @contextlib.asynccontextmanager
    async def kept_channel(self, peer: ShardEntry) -> AsyncIterator[shard_pb2_grpc.ShardServiceAsyncStub]:
        """Yields a stub on a channel that is kept: every write over REST ends a client, every step of a group is told.

        A call that another one's move to a new address cuts off has failed like any other: its task goes on.
        """
        address, channel = self._channels.get(peer.index, ("", None))
        if channel is None or address != peer.address:
            former, channel = channel, grpc.aio.insecure_channel(peer.address, options=CHANNEL_OPTIONS)
            self._channels[peer.index] = peer.address, channel
            if former is not None:
                await former.close()
        stub: shard_pb2_grpc.ShardServiceAsyncStub = shard_pb2_grpc.ShardServiceStub(channel)
        try:
            yield stub
        except grpc.RpcError as error:
            raise translate(error, f"shard {peer.index} at {peer.address}") from error
        except asyncio.CancelledError as error:
            if is_cancelled(error):
                raise
            raise ShardUnreachable(f"shard {peer.index} is no longer at {peer.address}") from error

    async def close(self) -> None:
        """Closes the channels that are kept."""
        channels, self._channels = self._channels, {}
        for _, channel in channels.values():
            await channel.close()
