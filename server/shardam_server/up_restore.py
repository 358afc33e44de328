"""`shardam up --restore`: a cluster without tables goes on from a checkpoint before `up` says that it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TypeVar

from shardam_proto.channels import UnaryCall, call, open_channel
from shardam_proto.errors import ShardamError, StaleState, Unavailable, UnknownCheckpoint
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2
from shardam_server.command_errors import CommandError
from shardam_server.readiness import ClusterProbe

_log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

POLL_S = 0.2
"""How often home is asked how far it is."""

CALL_TIMEOUT_S = 10.0
"""Deadline of a call to home; it answers from memory, but may be loading on few cores."""

SHOW_S = 10.0
"""A phase that lasts is logged this often."""


KEY_BYTES = 16
"""Random bytes of the key by which home knows a repeat."""


class StartRestore:
    """Restores a checkpoint at the start of a cluster.

    Args:
        probe: looks at the cluster.
        name: the checkpoint's name, "latest", or a path below the root folder.
        token: the cluster's token, or None.
    """

    def __init__(self, probe: ClusterProbe, name: str, token: str | None) -> None:
        self._probe = probe
        self._name = name
        self._token = token
        self._key = secrets.token_bytes(KEY_BYTES)
        self._shown: tuple[str, float] = "", 0.0

    async def run(self) -> None:
        """Restores it, and waits until all shards serve it. A home that dies in between is asked again, or has done its part.

        Raises:
            CommandError: it cannot be restored; what was there is untouched.
        """
        timeline = await self._timeline()  # before anything is asked for
        while True:
            try:
                job = await self._ask()
                while job.state not in (job_pb2.JOB_STATE_DONE, job_pb2.JOB_STATE_FAILED):
                    self._show(job)
                    await asyncio.sleep(POLL_S)
                    job = await self._look(job.id)
            except (Unavailable, StaleState, UnknownCheckpoint) as error:
                if isinstance(error, UnknownCheckpoint) and "job" not in error.metadata:
                    raise CommandError(f"--restore {self._name}: {error.message}") from error
                _log.info("home does not answer now (%s); asks again", error.message)
                await asyncio.sleep(POLL_S)
                if await self._is_decided(timeline):
                    await self._until_ready()
                    _log.info("all shards have taken checkpoint %s over", self._name)
                    return
                continue
            except ShardamError as error:
                raise CommandError(f"--restore {self._name}: {error.message}") from error
            break
        if job.state == job_pb2.JOB_STATE_FAILED:
            raise CommandError(f"--restore {self._name}: {job.problem}")
        _log.info("%s", describe_report(job.report))

    async def _view(self) -> ClusterView:
        while True:
            with contextlib.suppress(Unavailable):
                return await self._probe.view()
            await asyncio.sleep(POLL_S)

    async def _timeline(self) -> int:
        while True:
            with contextlib.suppress(Unavailable):
                return await self._probe.plan_timeline()
            await asyncio.sleep(POLL_S)

    async def _is_decided(self, before: int) -> bool:
        return await self._timeline() > before

    async def _until_ready(self) -> None:
        while True:
            view = await self._view()
            count = 0 if view.entry is None else view.entry.num_shards
            if count and all(index in view.shards and view.shards[index].ready for index in range(count)):
                return
            await asyncio.sleep(POLL_S)

    async def _ask(self) -> job_pb2.Job:
        request = checkpoint_pb2.RestoreCheckpointRequest(
            header=_header(), name=self._name, only_if_empty=True, request_key=self._key
        )
        address = await self._home()

        def ask() -> job_pb2.Job:
            with open_channel(address) as channel:
                stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
                return self._call(stub.RestoreCheckpoint, request, address).job

        return await asyncio.to_thread(ask)

    async def _look(self, job_id: str) -> job_pb2.Job:
        request = checkpoint_pb2.GetJobRequest(header=_header(), id=job_id)
        address = await self._home()

        def look() -> job_pb2.Job:
            with open_channel(address) as channel:
                stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
                return self._call(stub.GetJob, request, address).job

        return await asyncio.to_thread(look)

    def _call(self, method: UnaryCall[RequestT, ResponseT], request: RequestT, address: str) -> ResponseT:
        return call(method, request, timeout_s=CALL_TIMEOUT_S, token=self._token, peer=f"shard 0 at {address}")

    async def _home(self) -> str:
        while True:
            home = (await self._view()).shards.get(0)
            if home is not None:
                return home.address
            await asyncio.sleep(POLL_S)

    def _show(self, job: job_pb2.Job) -> None:
        """Logs each phase once, and one that lasts now and then."""
        phase, shown_at = self._shown
        now = time.monotonic()
        if job.phase == phase and now - shown_at < SHOW_S:
            return
        self._shown = job.phase, now
        share = f" ({100 * job.done_bytes // job.total_bytes} % of {job.total_bytes} bytes)" if job.total_bytes else ""
        _log.info("restore of %s: %s%s", self._name, job.phase or "begins", share)


def _header() -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(protocol_version=PROTOCOL_VERSION, budget_s=CALL_TIMEOUT_S)


def describe_report(report: job_pb2.RestoreReport) -> str:
    """Says what a restore at a start did."""
    tables = ", ".join(f"{table.table} ({table.num_rows} rows, step {table.table_step})" for table in report.tables)
    return f"goes on from checkpoint {report.name} on timeline {report.timeline}: {tables or 'no tables'}"
