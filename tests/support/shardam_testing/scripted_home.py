"""A home shard's checkpoints by script: for tests of what a client does when home is busy, waits or is started anew."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
import xxhash

from shardam_proto.errors import BadOption, ShardamError, UnknownCheckpoint
from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2
from shardam_testing.scripted_services import CLUSTER_ID, abort

WAITING, RUNNING = job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_RUNNING
DONE, FAILED = job_pb2.JOB_STATE_DONE, job_pb2.JOB_STATE_FAILED


class ScriptedHome(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """What home does.

    Attributes:
        faults: errors of the next calls, by method.
        creates: all requests for a checkpoint.
        created: jobs that are answered to them, one after the other; the last one stays.
        jobs: what GetJob answers, one after the other; the last one stays; none: it knows no job.
        brought: parts of additions, by their id.
        restores: all requests to restore.
        headers: of all calls.
        complete: names of complete checkpoints.
        asked_for: names of checkpoints that were read.
        extra: what ranks 0 and 1 added to the newest checkpoint.
        extra_written: what it was when that was made; None: the same.
    """

    def __init__(self) -> None:
        self.faults: dict[str, collections.deque[ShardamError]] = collections.defaultdict(collections.deque)
        self.creates: list[checkpoint_pb2.CreateCheckpointRequest] = []
        self.created: list[job_pb2.Job] = []
        self.jobs: list[job_pb2.Job] = []
        self.brought: dict[bytes, bytes] = {}
        self.restores: list[checkpoint_pb2.RestoreCheckpointRequest] = []
        self.headers: list[common_pb2.RequestHeader] = []
        self.complete: list[str] = []
        self.asked_for: set[str] = set()
        self.extra = b""
        self.extra_written: bytes | None = None
        self.address = ""

    def _enter(self, method: str, request, context) -> None:  # type: ignore[no-untyped-def]
        self.headers.append(request.header)
        if self.faults[method]:
            abort(context, self.faults[method].popleft())

    def CreateCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("create", request, context)
        self.creates.append(request)
        if request.extra_id and request.extra_id not in self.brought:
            abort(context, BadOption("nothing was brought under the id"))
        return checkpoint_pb2.CreateCheckpointResponse(job=_next(self.created))

    def PutExtra(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("put", request, context)
        have = self.brought.get(request.extra_id, b"")
        if request.offset > len(have):
            abort(context, BadOption(f"a part at {request.offset} came after {len(have)} bytes"))
        self.brought[request.extra_id] = have[: request.offset] + request.data
        return checkpoint_pb2.PutExtraResponse(received_bytes=len(self.brought[request.extra_id]))

    def GetExtra(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("extra", request, context)
        self.asked_for.add(request.name)
        part = self.extra[request.offset : request.offset + 1000]
        return checkpoint_pb2.GetExtraResponse(total_bytes=len(self.extra), name="newest", data=part)

    def GetCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("get", request, context)
        self.asked_for.add(request.name)
        written = self.extra if self.extra_written is None else self.extra_written
        found = checkpoint_pb2.CheckpointInfo(name=request.name, folder="/c", complete=True)
        for rank in range(2):
            name = f"extra-rank-{rank}.safetensors"
            file = checkpoint_pb2.CheckpointFile(name=name, xxh3=xxhash.xxh3_128_hexdigest(written))
            found.extra.add(rank=rank, file=file)
        return checkpoint_pb2.GetCheckpointResponse(checkpoint=found)

    def ListCheckpoints(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("list", request, context)
        found = [checkpoint_pb2.CheckpointInfo(name=name, complete=True) for name in self.complete]
        return checkpoint_pb2.ListCheckpointsResponse(checkpoints=found)

    def RestoreCheckpoint(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("restore", request, context)
        self.restores.append(request)
        return checkpoint_pb2.RestoreCheckpointResponse(job=_next(self.created))

    def GetJob(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self._enter("job", request, context)
        if not self.jobs:
            abort(context, UnknownCheckpoint(f"no job has the id {request.id!r}"))
        return checkpoint_pb2.GetJobResponse(job=_next(self.jobs))


def _next(jobs: list[job_pb2.Job]) -> job_pb2.Job:
    return jobs.pop(0) if len(jobs) > 1 else jobs[0]


@dataclasses.dataclass
class HomeProcess:
    """A home that is registered.

    Attributes:
        home: it.
        restart: ends it and starts it elsewhere.
    """

    home: ScriptedHome
    restart: Callable[[], None]


@contextlib.contextmanager
def scripted_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[HomeProcess]:
    """Starts a scripted home, and has clients find it."""
    home, servers = ScriptedHome(), []  # type: ignore[abstract]  # what no test calls is not there

    def start() -> None:
        server = grpc.server(futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(home, server)
        home.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)

    def restart() -> None:
        servers.pop().stop(None).wait()
        home.brought.clear()
        start()

    def view(*_: object) -> ClusterView:
        entry = ShardEntry(0, home.address, home.address, 1, 1, "cpu", 1, ready=True)
        return ClusterView(ClusterEntry(CLUSTER_ID, 1, 0), RouteMap(1, 1), {0: entry})

    monkeypatch.setattr("shardam._home_calls.read_cluster", view)
    start()
    try:
        yield HomeProcess(home, restart)
    finally:
        servers.pop().stop(None).wait()
