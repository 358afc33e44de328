"""Calls to other shards on channels that are kept."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from shardam_proto.errors import ShardUnreachable
from shardam_proto.registry import ClusterEntry, ShardEntry
from shardam_proto.v1 import shard_pb2, shard_pb2_grpc
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.peers import Peers


class _Servicer(shard_pb2_grpc.ShardServiceServicer):
    """Answers an UpdateGroup never, and a SettleClient at once."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def UpdateGroup(  # noqa: N802 - the service's name
        self, request: shard_pb2.UpdateGroupRequest, context: object
    ) -> shard_pb2.UpdateGroupResponse:
        self.called.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody answers")

    async def SettleClient(  # noqa: N802 - the service's name
        self, request: shard_pb2.SettleClientRequest, context: object
    ) -> shard_pb2.SettleClientResponse:
        return shard_pb2.SettleClientResponse()


async def _serve(servicer: _Servicer) -> tuple[grpc.aio.Server, ShardEntry]:
    server = grpc.aio.server()
    shard_pb2_grpc.add_ShardServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, ShardEntry(1, f"127.0.0.1:{port}", "", 1, 1, "cpu", 1, ready=True)


def test_a_call_that_is_cut_off_because_the_shard_has_moved_fails_and_cancels_nobody() -> None:
    async def run() -> None:
        servicer = _Servicer()  # type: ignore[abstract]  # the other methods are not called
        (old, there), (new, here) = await _serve(servicer), await _serve(servicer)
        identity = ShardIdentity(0, lineage=1)
        identity.cluster = ClusterEntry("c1", 2, seed=0)
        peers = Peers(identity, None)
        waiting = asyncio.create_task(peers.update_group(there, shard_pb2.UpdateGroupRequest()))
        await servicer.called.wait()
        await peers.settle_client(here, b"a client", [])
        with pytest.raises(ShardUnreachable, match="no longer at"):
            await waiting
        await peers.close()
        await asyncio.gather(old.stop(None), new.stop(None))

    asyncio.run(run())


def test_a_call_whose_caller_is_cancelled_is_cancelled() -> None:
    async def run() -> None:
        servicer = _Servicer()  # type: ignore[abstract]  # the other methods are not called
        server, entry = await _serve(servicer)
        identity = ShardIdentity(0, lineage=1)
        identity.cluster = ClusterEntry("c1", 2, seed=0)
        peers = Peers(identity, None)
        waiting = asyncio.create_task(peers.update_group(entry, shard_pb2.UpdateGroupRequest()))
        await servicer.called.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await peers.close()
        await server.stop(None)

    asyncio.run(run())
