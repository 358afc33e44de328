"""The shard process: binds, joins the cluster, serves, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc.aio
import prometheus_client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from shardam_proto.errors import InvalidArgument, JournalDamaged, ShardamError, VersionMismatch
from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.registry import Plan
from shardam_proto.routing import RouteMap
from shardam_proto.scheduling import starting_batch_threads
from shardam_proto.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    row_pb2,
    row_pb2_grpc,
    shard_pb2,
    shard_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)
from shardam_server.bind import check_bind, check_port_free, join_address, port_refused, reachable_host
from shardam_server.command_errors import CommandError, UsageError
from shardam_server.devices import choose_device
from shardam_server.lifeline import watch_lifeline
from shardam_server.logs import configure_logging
from shardam_server.settings import ShardSettings
from shardam_server.shard import garbage
from shardam_server.shard.allocator import keep_freed_memory
from shardam_server.shard.checkpoints.assembly import Checkpoints
from shardam_server.shard.client_closing import ClientClosing
from shardam_server.shard.client_liveness import ClientWatch, Silence
from shardam_server.shard.context import ShardContext
from shardam_server.shard.front import ShardFront
from shardam_server.shard.groups.delivery import Delivery
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.home import Home
from shardam_server.shard.http_listener import HttpListener
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.joining import Joining
from shardam_server.shard.keeping import recover
from shardam_server.shard.lost import LostShard
from shardam_server.shard.membership import Membership
from shardam_server.shard.metrics import ShardGauges, ShardMetrics, resident_bytes
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peers import Peers
from shardam_server.shard.records import CpuDevice, Device
from shardam_server.shard.registration import Registration
from shardam_server.shard.renewal import Renewal
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.services.checkpoint import CheckpointServicer
from shardam_server.shard.services.embedding import EmbeddingServicer
from shardam_server.shard.services.row import RowServicer
from shardam_server.shard.services.shard import ShardServicer
from shardam_server.shard.services.table import TableServicer
from shardam_server.shard.serving import Serving
from shardam_server.shard.state import ShardState
from shardam_server.shard.streams import Streams
from shardam_server.shard.tenure import Tenure
from shardam_server.shard_words import JOURNAL_STATES

logger = logging.getLogger(__name__)

Found = TypeVar("Found", RouteMap, Plan)

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (embedding_pb2, "EmbeddingService"),
        (row_pb2, "RowService"),
        (table_pb2, "TableService"),
        (shard_pb2, "ShardService"),
        (checkpoint_pb2, "CheckpointService"),
    )
)
"""Full names of the services a shard offers beside health and reflection."""

EXIT_GRACE_S = 5.0
"""After drain_s, the time left to give the name back and to end."""


def run_shard(settings: ShardSettings) -> int:
    """Runs a shard until it is told to stop; returns the process's exit status.

    Raises:
        UsageError: it cannot start with these settings or this state.
        CommandError: it cannot start, or another process has taken its place.
    """
    keep_freed_memory(settings.keep_free_mib * 2**20)
    garbage.look_seldom()
    check_bind(settings.host, has_token=settings.token is not None, insecure=settings.insecure)
    identity = ShardIdentity(settings.index, lineage=0)
    configure_logging(settings, shard=settings.index, incarnation=identity.incarnation)
    # Each counter would have a second series with its time of creation.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    choice = choose_device(settings.device, settings.index)
    if choice.reason:
        logger.info("%s", choice.reason)
    try:
        return asyncio.run(_run(settings, identity, open_device(choice.name, settings.threads)))
    except (InvalidArgument, VersionMismatch, JournalDamaged) as error:
        raise UsageError(error.message) from error  # tells a supervisor that no other start would end otherwise
    except ShardamError as error:
        raise CommandError(error.message) from error


async def _run(settings: ShardSettings, identity: ShardIdentity, device: Device) -> int:
    return await ShardProcess(settings, identity, device).run()


def open_device(name: str, num_threads: int) -> Device:
    """Opens a device that choose_device has chosen; torch and Triton are loaded only for a GPU.

    Raises:
        CommandError: torch or triton is missing, or the GPU cannot be used.
    """
    if name == "cpu":
        return CpuDevice(num_threads)
    from shardam_server.shard.gpu_records import open_gpu  # loads torch

    return open_gpu(name, num_threads)


class ShardProcess:
    """One shard from start to end; made on the event loop that it runs on.

    Args:
        settings: its settings.
        identity: who it is.
        device: holds its rows.
    """

    def __init__(self, settings: ShardSettings, identity: ShardIdentity, device: Device) -> None:
        self._settings = settings
        loop = asyncio.get_running_loop()
        self._half_applied = asyncio.Event()
        self._end_half_applied = lambda: _wake(loop, self._half_applied)
        self._shard = shard = ShardContext(
            identity=identity,
            state=self._make_state(device),
            sequencer=Sequencer(settings.max_queue_mib * 2**20),
            metrics=ShardMetrics(settings.cluster, settings.index),
            device=device,
            tenure=Tenure(settings.lease_s),
            client_lease_s=settings.client_lease_s,
            streams=Streams(settings.max_parked, settings.max_reserved_mib * 2**20),
        )
        shard.metrics.watch(self._gauges)
        with starting_batch_threads():
            self._server = grpc.aio.server(
                options=SERVER_OPTIONS, interceptors=[ShardFront(shard.metrics, settings.plain_token)]
            )
        self._health = health_aio.HealthServicer()
        self._stop = asyncio.Event()
        self._replaced = asyncio.Event()
        self._peers = Peers(identity, settings.plain_token)
        self._registration = Registration(settings.redis, settings.cluster, settings.redis_timeout_s)
        self._membership = Membership(
            shard,
            self._registration,
            settings.lease_s,
            lambda found: _call(loop, self._notice_map, found),
            lambda plan: _call(loop, self._checkpoints.adoption.notice, plan),
            accepts_loss=settings.truncate_journal,
        )
        self._renewal = Renewal(shard.tenure, self._membership.renew, settings.lease_s, lambda: _wake(loop, self._replaced))
        directory = PeerDirectory(self._registration.view)
        self._groups = HomeGroups(shard, Delivery(shard, self._peers, directory), settings.step_timeout_s)
        self._closing = ClientClosing(shard, self._peers, directory, self._groups)
        self._groups.close_client = self._closing.close
        client_watch = ClientWatch(shard, self._closing, Silence(settings.client_lease_s))
        self._serving = Serving(shard, self._groups, client_watch, self._set_health)

        def make_state() -> ShardState:
            return self._make_state(device)

        self._checkpoints = Checkpoints(
            shard,
            settings,
            self._registration,
            self._membership,
            self._peers,
            directory,
            self._serving,
            make_state,
        )
        self._serving.when_serving = self._checkpoints.start
        adopt = self._checkpoints.adoption.adopt
        self._joining = Joining(shard, settings, self._registration, self._membership, make_state, adopt)
        self._lost = LostShard(shard, self._registration, self._membership, self._peers, make_state, self._serving.serve)

    def _make_state(self, device: Device) -> ShardState:
        state = ShardState(device, self._settings.max_rows, self._settings.max_clients)
        state.when_half_applied = self._end_half_applied
        return state

    async def run(self) -> int:
        """Serves until SIGTERM, SIGINT, the end of the parent, or the loss of name or state; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        watch_lifeline(lambda: _wake(loop, self._stop), grace_s=self._settings.drain_s + EXIT_GRACE_S)
        with self._listening_http():
            await self._bind()
            work = asyncio.create_task(self._work())
            events = (
                self._stop,
                self._replaced,
                self._half_applied,
                self._checkpoints.leaving.begun,
                self._checkpoints.adoption.failed,
            )
            ends = [asyncio.create_task(event.wait()) for event in events]
            await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            failed = work.done()
            work.cancel()  # it must not go on joining while the shard leaves
            await asyncio.wait({work})
            await self._drain()
            if failed:
                work.result()  # raises why the shard could not start
            self._checkpoints.leaving.check()
            failures = (self._replaced, self._half_applied, self._checkpoints.adoption.failed)
            return 1 if any(event.is_set() for event in failures) else 0

    async def _work(self) -> None:
        """Joins the cluster and serves, until it is cancelled.

        Raises:
            ShardamError, CommandError: the shard cannot start.
        """
        shard = self._shard
        await recover(shard, self._settings, self._registration, lambda: self._make_state(shard.device))
        await self._checkpoints.check_folder()
        async with self._checkpoints.adoption.turn:
            await self._joining.register()
            shard.tenure.tick()
            shard.tenure.confirm()
            self._renewal.start()
            await self._joining.finish()
            if shard.serving == shard_pb2.SERVING_STATE_STARTING and not self._checkpoints.leaving.begun.is_set():
                await self._serving.serve()
        await shard.kept.keep_bases(shard.sequencer.change)

    def _notice_map(self, found: RouteMap) -> None:
        """Takes over a route map of a higher epoch."""
        shard = self._shard
        own = shard.identity.route_map
        if own is not None and found.epoch > own.epoch:
            shard.identity.route_map = found
            logger.info("route map of epoch %d replaces that of epoch %d", found.epoch, own.epoch)
            shard.sequencer.submit(lambda: shard.kept.note_epoch(found.epoch))

    async def _bind(self) -> None:
        settings, shard = self._settings, self._shard
        check_port_free(settings.host, settings.bound_port, "--port")
        try:
            port = self._server.add_insecure_port(join_address(settings.host, settings.bound_port))
        except RuntimeError as error:
            raise port_refused(settings.bound_port, "--port") from error
        shard.address = settings.advertise or join_address(reachable_host(settings.host), port)
        home = Home(shard, self._registration, self._peers)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(
            EmbeddingServicer(shard, self._closing, self._groups), self._server
        )
        row_pb2_grpc.add_RowServiceServicer_to_server(RowServicer(shard), self._server)
        table_pb2_grpc.add_TableServiceServicer_to_server(TableServicer(shard, home), self._server)
        shard_pb2_grpc.add_ShardServiceServicer_to_server(
            ShardServicer(shard, self._lost, self._closing, self._groups, self._checkpoints.cuts, self._checkpoints.home),
            self._server,
        )
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(
            CheckpointServicer(shard, self._checkpoints.home), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    @contextlib.contextmanager
    def _listening_http(self) -> Iterator[None]:
        settings = self._settings
        check_port_free(settings.host, settings.http_port, "--http-port")
        try:
            http = HttpListener(self._shard, settings.host, settings.http_port, settings.plain_token)
        except OSError as error:
            raise port_refused(settings.http_port, "--http-port", error) from error
        self._shard.http_address = join_address(reachable_host(settings.host), http.port)
        http.start()
        try:
            yield
        finally:
            http.close()

    async def _drain(self) -> None:
        """Refuses new calls, finishes accepted ones, brings the state to disk, gives the name back."""
        shard = self._shard
        await self._checkpoints.adoption.stop()  # or it would have the shard serve again
        registered = self._membership.registered and not shard.tenure.fenced
        shard.serving = shard_pb2.SERVING_STATE_DRAINING
        shard.holding.end()
        shard.streams.drain()
        logger.info("drains: no new calls, %d changes to finish", shard.sequencer.queue_depth)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._renewal.stop()
        if registered:
            await self._membership.withdraw()
        # A fenced shard answers nobody any more: what waits is refused by its tenure, and the connections are closed at once.
        await self._server.stop(None if shard.tenure.fenced else self._settings.drain_s)
        await self._checkpoints.stop()
        await self._serving.suspend()
        await self._peers.close()
        await asyncio.to_thread(shard.sequencer.close)
        await asyncio.to_thread(shard.kept.close)
        if registered:
            await self._membership.leave()
        self._registration.close()
        logger.info("stopped")

    async def _set_health(self, status: int) -> None:
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    def _gauges(self) -> ShardGauges:
        tables, clients = self._shard.state.tables(), self._shard.state.clients
        parts = self._shard.state.groups.parts()
        journal = self._shard.kept.status()
        base = journal.last_base
        return ShardGauges(
            {table.spec.name: (table.num_rows, table.step) for table in tables},
            queue_depth=self._shard.sequencer.queue_depth,
            queue_bytes=self._shard.sequencer.queue_bytes,
            reserved_bytes=self._shard.streams.open_parts.reserved_bytes,
            parked_requests=self._shard.streams.parking.num_parked,
            streams=self._shard.streams.num_open,
            staged_parts=len(parts),
            staged_bytes=sum(part.num_bytes for part in parts),
            pre_image_bytes=self._shard.state.snapshots.kept_bytes,
            pre_image_wait_s=self._shard.state.snapshots.waited_s,
            memory={
                "records": sum(table.storage.record_bytes for table in tables),
                "index": sum(table.storage.index_bytes for table in tables),
                "resident": resident_bytes(),
                "device": self._shard.device.memory_bytes,
            },
            clients={"open": clients.num_open, "closed": len(clients) - clients.num_open},
            journal_state=JOURNAL_STATES[journal.state],
            journal_bytes=journal.size_bytes,
            base_seconds={} if base is None else {"held": base.held_s, "whole": base.seconds},
            base_bytes=0 if base is None else base.size_bytes,
        )


def _call(loop: asyncio.AbstractEventLoop, action: Callable[[Found], None], found: Found) -> None:
    """Has a loop do something from another thread."""
    loop.call_soon_threadsafe(action, found)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop from another thread."""
    loop.call_soon_threadsafe(event.set)
