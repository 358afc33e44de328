"""A shard within the test's process, whose changes and reads can be held up, so that tests of order need no luck."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from shardam_proto.channels import open_channel
from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, cut_pb2, embedding_pb2_grpc, row_pb2_grpc, shard_pb2, shard_pb2_grpc
from shardam_server.shard.client_closing import ClientClosing
from shardam_server.shard.context import ShardContext
from shardam_server.shard.front import ShardFront
from shardam_server.shard.groups.delivery import Delivery
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.lost import LostShard
from shardam_server.shard.membership import Membership
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peers import Peers
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.registration import Registration
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.services.cuts import Cuts
from shardam_server.shard.services.embedding import EmbeddingServicer
from shardam_server.shard.services.row import RowServicer
from shardam_server.shard.services.shard import ShardServicer
from shardam_server.shard.state import ShardState
from shardam_server.shard.streams import Streams
from shardam_server.shard.table import table_from_info
from shardam_server.shard.tenure import Tenure
from shardam_testing.matrix import num_threads
from shardam_testing.raw_client import RawClient
from shardam_testing.waiting import wait_for

T = TypeVar("T")

HANG_S = 60.0
"""No step of these tests takes a hundredth of this."""


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the one loop of all these shards, since grpc.aio disturbs a second one of its process; it runs to the end."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _cuts(shard: ShardContext) -> Cuts:
    """Nobody makes checkpoints of these shards."""

    async def adopt(request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        raise AssertionError(f"there is no plan {request.plan}")

    return Cuts(shard, None, 0, shard.holding.release, adopt)


class HeldShard:
    """A serving shard, its event loop on another thread than the test."""

    def __init__(self, streams: Streams, max_queue_bytes: int, token: str | None) -> None:
        self.identity = ShardIdentity(0, cluster=ClusterEntry("c" * 32, 1, 0), route_map=RouteMap(epoch=1, num_shards=1))
        device = CpuDevice(num_threads())
        self.shard = ShardContext(
            self.identity,
            ShardState(device),
            Sequencer(max_queue_bytes),
            ShardMetrics("test", 0),
            device,
            Tenure(3600.0),
            streams=streams,
            serving=shard_pb2.SERVING_STATE_SERVING,
        )
        self.token = token
        self.loop = _event_loop()
        self._num_tables = 0
        self.run(self._start())

    async def _start(self) -> None:
        peers = Peers(self.identity, self.token)
        directory = PeerDirectory(lambda: ClusterView(None, None, {}))
        self.groups = HomeGroups(self.shard, Delivery(self.shard, peers, directory))
        closing = ClientClosing(self.shard, peers, directory, self.groups)
        self.groups.close_client = closing.close
        await self.groups.start()
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ShardFront(self.shard.metrics, self.token)])
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(
            EmbeddingServicer(self.shard, closing, self.groups), self._server
        )
        row_pb2_grpc.add_RowServiceServicer_to_server(RowServicer(self.shard), self._server)
        shard_pb2_grpc.add_ShardServiceServicer_to_server(
            ShardServicer(self.shard, self._lost(peers), closing, self.groups, _cuts(self.shard), None), self._server
        )
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def _lost(self, peers: Peers) -> LostShard:
        """Nobody tells these shards to forget anything, and there is no Redis."""
        registration = Registration("redis://127.0.0.1:1/0", "test", 1.0)
        membership = Membership(self.shard, registration, 3600.0, lambda _: None, lambda _: None)
        return LostShard(self.shard, registration, membership, peers, lambda: self.shard.state, self._serve)

    async def _serve(self) -> None:
        raise AssertionError("this shard serves from the start")

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_S)

    def on_loop(self, action: Callable[[], T]) -> T:
        """Runs an action on the event loop's thread."""

        async def act() -> T:
            return action()

        return self.run(act())

    def stop_server(self, grace_s: float) -> None:
        """Refuses calls and waits for those that run, as a drain does."""
        self.run(self._server.stop(grace_s))

    def close(self) -> None:
        self.run(self._server.stop(0))
        self.shard.sequencer.close()

    def install(self, dim: int = 2) -> common_pb2.TableInfo:
        """Adds a table."""
        self._num_tables += 1
        spec = TableSpec(f"t{self._num_tables}", dim).to_proto()
        info = common_pb2.TableInfo(spec=spec, table_id=self._num_tables, table_seed=1)
        table = table_from_info(info, self.shard.device.make_records)
        self.run(self.shard.change(lambda: self.shard.state.install([table])))
        return info

    @contextlib.contextmanager
    def client(self, *, opened: bool = True) -> Iterator[RawClient]:
        """Makes a client of this shard; without its Open, which is a change, if told so."""
        entry = ShardEntry(0, self.address, "", self.identity.incarnation, self.identity.lineage, "cpu", 0, True)
        assert self.identity.cluster is not None
        with open_channel(self.address) as channel:
            client = RawClient(channel, entry, self.identity.cluster.cluster_id, 1, self.token)
            if opened:
                client.open()
            yield client

    def wait_for_reads(self, count: int) -> None:
        """Waits until so many reads were let in and have not ended."""
        wait_for("reads to be let in", lambda: self.shard.sequencer._num_reads == count)

    @contextlib.contextmanager
    def held_changes(self) -> Iterator[None]:
        """Lets no change be applied meanwhile."""
        release, held = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            release.wait(HANG_S)

        self.loop.call_soon_threadsafe(self.shard.sequencer.submit, hold)
        assert held.wait(HANG_S)
        try:
            yield
        finally:
            release.set()


@contextlib.contextmanager
def held_shard(
    *, max_parked: int = 1024, max_reserved_bytes: int = 2**29, max_queue_bytes: int = 2**28, token: str | None = None
) -> Iterator[HeldShard]:
    """Runs a shard within this process."""
    shard = HeldShard(Streams(max_parked, max_reserved_bytes), max_queue_bytes, token)
    try:
        yield shard
    finally:
        shard.close()
