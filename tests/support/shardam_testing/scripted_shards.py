"""Shards that keep PROTOCOL.md section 4 and fail as a test tells them: for tests of the client's side of numbered changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np

from shardam._backoff import Deadline
from shardam._session import Session, SessionOptions
from shardam._values import TableInfo
from shardam_proto.errors import DETAILS_KEY, ShardamError, StaleState, pack_status
from shardam_proto.limits import PROTOCOL_VERSION, SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, ClusterView, Keys, ShardEntry, connect_redis
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc, row_pb2, row_pb2_grpc

CLUSTER_ID = "scripted"

LOSE_ANSWER = "lose answer"
"""The shard does what it is asked, and the caller sees the connection fail."""

FAIL_BEFORE = "fail before"
"""The caller sees the connection fail; the shard has done nothing."""

INFO = TableInfo(TableSpec("t", 2), table_id=77, table_seed=1)

Fault = ShardamError | str


@dataclasses.dataclass
class ScriptedShard:
    """One shard; `faults` are used up one per call of Push, a row change, CloseNumber or Pull.

    Attributes:
        seen: (method, number, row ids) of each such call.
        closed: (number, how it ended: "push", "assign", "delete", "clear", "skip" or "void", tables).
    """

    index: int
    incarnation: int = 11
    lineage: int = 21
    timeline: int = 1
    last: int = 0
    faults: collections.deque[Fault] = dataclasses.field(default_factory=collections.deque)
    seen: list[tuple[str, int, list[int]]] = dataclasses.field(default_factory=list)
    closed: list[tuple[int, str, list[int]]] = dataclasses.field(default_factory=list)
    opened: int = 0
    left: list[bytes] = dataclasses.field(default_factory=list)
    headers: list[common_pb2.RequestHeader] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def header(self) -> common_pb2.ResponseHeader:
        return common_pb2.ResponseHeader(
            shard=self.index, incarnation=self.incarnation, lineage=self.lineage, timeline=self.timeline, last_number=self.last
        )

    def change(self, method: str, request: _Change, row_ids: bytes, ending: tuple[str, list[int]], context: _Context) -> bool:
        """Runs a numbered call; returns whether it is a repeat, or aborts."""
        with self.lock:
            number = request.header.number
            fault = self.enter(method, request.header, row_ids, context)
            repeated = number == self.last
            if number > self.last + 1:
                abort(context, StaleState("gap", reason="SEQUENCE_GAP", metadata={"last": str(self.last)}))
            if not repeated:
                self.last = number
                self.closed.append((number, *ending))
            if fault == LOSE_ANSWER:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
            return repeated

    def enter(self, method: str, header: common_pb2.RequestHeader, row_ids: bytes, context: _Context) -> Fault | None:
        self.seen.append((method, header.number, np.frombuffer(row_ids, "<i8").tolist()))
        self.headers.append(header)
        if header.incarnation != self.incarnation:
            abort(context, StaleState("another life", reason="NEW_INCARNATION"))
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, ShardamError):
            abort(context, fault)
        if fault == FAIL_BEFORE:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
        return fault

    def restart(self, *, lineage: int | None = None) -> None:
        """Becomes another process life; with another lineage, one that knows nothing."""
        self.incarnation += 1
        if lineage is not None:
            self.lineage, self.last = lineage, 0


_RowChange = row_pb2.AssignRowsRequest | row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest
_Change = embedding_pb2.PushRequest | embedding_pb2.CloseNumberRequest | _RowChange
_Context = grpc.ServicerContext


def abort(context: _Context, error: ShardamError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, pack_status(error)),))
    context.abort(error.rule.code, error.message)


class _Embedding(embedding_pb2_grpc.EmbeddingServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self.shard = shard

    def Open(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.opened += 1
        return embedding_pb2.OpenResponse(
            header=self.shard.header(), protocol_version=PROTOCOL_VERSION, cluster_id=CLUSTER_ID, num_shards=1
        )

    def Pull(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.enter("pull", request.header, request.row_ids, context)
        rows = np.repeat(np.frombuffer(request.row_ids, "<i8").astype("<f4"), INFO.spec.dim)
        return embedding_pb2.PullResponse(header=self.shard.header(), sections=request.sections, rows=rows.tobytes())

    def Push(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        tables = [section.table_id for section in request.sections]
        repeated = self.shard.change("push", request, request.row_ids, ("push", tables), context)
        steps = [common_pb2.TableStep(table_id=table, table_step=request.header.number) for table in tables]
        return embedding_pb2.PushResponse(header=self.shard.header(), steps=steps, repeated_number=repeated)

    def CloseNumber(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        kind = {embedding_pb2.CLOSE_KIND_SKIP: "skip", embedding_pb2.CLOSE_KIND_VOID: "void"}[request.kind]
        repeated = self.shard.change("close", request, b"", (kind, list(request.table_ids)), context)
        return embedding_pb2.CloseNumberResponse(header=self.shard.header(), repeated_number=repeated)

    def Leave(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.left.append(request.header.client_id)
        return embedding_pb2.LeaveResponse(header=self.shard.header())


class _Rows(row_pb2_grpc.RowServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self.shard = shard

    def ReadRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        raise NotImplementedError  # no test reads rows here

    def ScanRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        raise NotImplementedError

    def AssignRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        repeated = self.shard.change("assign", request, request.row_ids, ("assign", []), context)
        num_assigned = len(request.row_ids) // 8
        return row_pb2.AssignRowsResponse(header=self.shard.header(), num_assigned=num_assigned, repeated_number=repeated)

    def DeleteRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        repeated = self.shard.change("delete", request, request.row_ids, ("delete", []), context)
        return row_pb2.DeleteRowsResponse(header=self.shard.header(), num_deleted=1, repeated_number=repeated)

    def ClearMoments(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        repeated = self.shard.change("clear", request, request.row_ids, ("clear", []), context)
        return row_pb2.ClearMomentsResponse(header=self.shard.header(), num_cleared=1, repeated_number=repeated)


@contextlib.contextmanager
def scripted_cluster(count: int) -> Iterator[tuple[ClusterView, list[ScriptedShard]]]:
    """Starts scripted shards and yields the view of them that Redis would give."""
    shards = [ScriptedShard(index) for index in range(count)]
    servers, entries = [], {}
    for shard in shards:
        server = grpc.server(futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(_Embedding(shard), server)
        row_pb2_grpc.add_RowServiceServicer_to_server(_Rows(shard), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        entries[shard.index] = ShardEntry(shard.index, address, address, 11, 21, "cpu", 1, ready=True)
    try:
        yield ClusterView(ClusterEntry(CLUSTER_ID, count, seed=0), RouteMap(epoch=1, num_shards=count), entries), shards
    finally:
        for server in servers:
            server.stop(None).wait()


@contextlib.contextmanager
def scripted_session(count: int, shard_timeout_s: float = 20.0) -> Iterator[tuple[Session, list[ScriptedShard]]]:
    """Starts scripted shards and opens a client on them. There is no Redis behind it: addresses stay as they are."""
    nowhere = "redis://127.0.0.1:1/0"
    with scripted_cluster(count) as (view, shards):
        session = Session(SessionOptions(nowhere, "scripted", None, shard_timeout_s), connect_redis(nowhere), Keys("scripted"))
        session.start(view, Deadline(shard_timeout_s))
        try:
            yield session, shards
        finally:
            session.close()
