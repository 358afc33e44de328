"""Home calls itself as it calls the other shards."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from shardam_proto.errors import ShardNotReady
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.v1 import cut_pb2, shard_pb2_grpc
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peers import Peers

CLUSTER = ClusterEntry("c1", 2, 0)


class _Here:
    """Home itself; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[cut_pb2.HoldRequest] = []

    async def hold(self, request: cut_pb2.HoldRequest) -> cut_pb2.HoldResponse:
        self.asked.append(request)
        return cut_pb2.HoldResponse()

    async def advance(self, request: cut_pb2.AdvanceRequest) -> cut_pb2.AdvanceResponse:
        return cut_pb2.AdvanceResponse()

    async def cut(self, request: cut_pb2.CutRequest) -> cut_pb2.CutResponse:
        return cut_pb2.CutResponse()

    async def release(self, request: cut_pb2.ReleaseRequest) -> cut_pb2.ReleaseResponse:
        return cut_pb2.ReleaseResponse()

    async def check_files(self, request: cut_pb2.CheckFilesRequest) -> cut_pb2.CheckFilesResponse:
        return cut_pb2.CheckFilesResponse()

    async def adopt_plan(self, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        return cut_pb2.AdoptPlanResponse()

    async def get_task(self, request: cut_pb2.GetTaskRequest) -> cut_pb2.GetTaskResponse:
        return cut_pb2.GetTaskResponse()

    async def drop_task(self, request: cut_pb2.DropTaskRequest) -> cut_pb2.DropTaskResponse:
        return cut_pb2.DropTaskResponse()


class _There(shard_pb2_grpc.ShardServiceServicer):
    """Another shard; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[cut_pb2.HoldRequest] = []

    async def Hold(  # noqa: N802 - the service's name
        self, request: cut_pb2.HoldRequest, context: object
    ) -> cut_pb2.HoldResponse:
        self.asked.append(request)
        return cut_pb2.HoldResponse(clients=[cut_pb2.HeldClient(last_number=5)])


def test_home_and_another_shard_are_asked_by_index() -> None:
    async def run() -> None:
        here, there = _Here(), _There()  # type: ignore[abstract]  # one method is enough
        server = grpc.aio.server()
        shard_pb2_grpc.add_ShardServiceServicer_to_server(there, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        entry = ShardEntry(1, f"127.0.0.1:{port}", "", 77, 1, "cpu", 1, True)
        identity = ShardIdentity(0, cluster=CLUSTER)
        peers = Peers(identity, None)
        directory = PeerDirectory(lambda: ClusterView(CLUSTER, None, {1: entry}))
        calls = PeerCuts(identity, peers, directory, here)
        try:
            with pytest.raises(ShardNotReady, match="shard 1 is not registered"):
                await calls.hold(1, cut_pb2.HoldRequest(hold_id=3, hold_s=2))
            await calls.refresh()
            assert list(calls.shards) == [0, 1]
            assert not (await calls.hold(0, cut_pb2.HoldRequest(hold_id=3, hold_s=2))).clients
            assert (await calls.hold(1, cut_pb2.HoldRequest(hold_id=3, hold_s=2))).clients[0].last_number == 5
        finally:
            await peers.close()
            await server.stop(None)
        for asked, incarnation in ((here.asked, identity.incarnation), (there.asked, 77)):
            assert [(one.hold_id, one.header.incarnation, one.header.cluster_id) for one in asked] == [(3, incarnation, "c1")]

    asyncio.run(run())
