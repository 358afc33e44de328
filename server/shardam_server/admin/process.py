"""The process of the admin API: it listens at once, says in /readyz what it waits for, and drains on a signal."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import math
import signal
import socket
import threading

import uvicorn

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import Keys, connect_redis, display_url, read_cluster
from shardam_server.admin.app import create_app
from shardam_server.admin.cluster import MAX_AGE_S, ClusterReader
from shardam_server.admin.context import AdminContext
from shardam_server.admin.metrics import RestMetrics
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.bind import check_bind, check_port_free, join_address, port_refused
from shardam_server.lifeline import watch_lifeline
from shardam_server.settings import AdminSettings

logger = logging.getLogger(__name__)

_CLOSE_S = 1  # after the drain: requests that a shard held up are answered; then connections that hold on are cut
_LIFELINE_GRACE_S = 5.0  # beyond the drain, for closing what is left
_MAX_REDIS_WAIT_S = 2.0  # longest pause between two attempts to reach Redis
_BACKLOG = 128  # connections that wait to be accepted


class _Server(uvicorn.Server):
    """uvicorn that says by one line of our own log where it listens, and waits for no shard longer than it may.

    Args:
        config: uvicorn's settings.
        calls: are ended when the drain is over.
        drain_s: time for requests under way.
    """

    def __init__(self, config: uvicorn.Config, calls: ShardCalls, drain_s: float) -> None:
        super().__init__(config)
        self._calls = calls
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            logger.info("admin API serves on http://%s", join_address(host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops to serve."""
        # A request that waits for a shard runs in a thread, which nothing but the end of its call can end.
        asyncio.get_running_loop().call_later(self._drain_s, self._calls.close)
        await super().shutdown(sockets)


class ClusterWatch:
    """A thread that keeps the view fresh, so that requests find it and the log shows changes when they happen.

    Args:
        reader: the view.
    """

    def __init__(self, reader: ClusterReader) -> None:
        self._reader = reader
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a read of Redis that is under way is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        pause_s = MAX_AGE_S
        while not self._stopping.is_set():
            try:
                self._reader.view()
            except RedisUnreachable as error:
                logger.debug("waiting for Redis: %s", error.message)
            failed = self._reader.redis_error is not None
            pause_s = min(pause_s * 2, _MAX_REDIS_WAIT_S) if failed else MAX_AGE_S
            self._stopping.wait(pause_s)


def run_admin(settings: AdminSettings) -> int:
    """Serves the admin API until a signal, or until the parent that holds its lifeline is gone.

    Args:
        settings: the process's settings; logging is configured already.

    Returns:
        The exit code: 0 after an orderly end.

    Raises:
        UsageError: the host may not be bound without a token, or is unknown.
        PortInUse: the port is taken; the message names `--port`.
        BadOption: the cluster's name is outside the alphabet.
    """
    check_bind(settings.host, has_token=settings.token is not None, insecure=settings.insecure)
    check_port_free(settings.host, settings.port, "--port")
    keys = Keys(settings.cluster)
    connection = connect_redis(settings.redis, settings.redis_timeout_s)
    reader = ClusterReader(lambda: read_cluster(connection, keys), settings.cluster)
    calls = ShardCalls(reader, settings.plain_token, settings.shard_timeout_s)
    context = AdminContext(
        cluster=settings.cluster,
        redis=display_url(settings.redis),
        version=importlib.metadata.version("shardam"),
        calls=calls,
        metrics=RestMetrics(settings.cluster),
        max_batch_ids=settings.max_batch_ids,
        max_import_mib=settings.max_import_mib,
    )
    app = create_app(context, token=settings.plain_token, host=settings.host)
    config = uvicorn.Config(
        app,
        log_config=None,  # __main__ has configured logging
        log_level="warning",  # what it says of its start and end, process.py says
        access_log=False,  # access.py logs requests, with their id
        server_header=False,
        ws="none",  # there is no WebSocket route
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + _CLOSE_S,
    )
    listener = _bind(settings.host, settings.port)
    watch = ClusterWatch(reader)
    logger.info("admin API of cluster %s starts; Redis at %s", settings.cluster, context.redis)
    try:
        watch.start()
        _serve(config, listener, settings.drain_s, calls)
    finally:
        watch.stop()
        calls.close()
        connection.close()
        listener.close()
    logger.info("admin API ends")
    return 0


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise port_refused(port, "--port", error) from error
    return listener


def _serve(config: uvicorn.Config, listener: socket.socket, drain_s: float, calls: ShardCalls) -> None:
    server = _Server(config, calls, drain_s)

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            server.should_exit = True

        def stop_from_thread() -> None:
            loop.call_soon_threadsafe(stop)

        # uvicorn puts these handlers back when it has drained and raises the signal again; the default ones would
        # end the process there, with another exit code than 0.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: stop())
        watch_lifeline(stop_from_thread, grace_s=drain_s + _LIFELINE_GRACE_S)
        await server.serve(sockets=[listener])

    asyncio.run(serve())
