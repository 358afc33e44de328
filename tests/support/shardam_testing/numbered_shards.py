"""Shards that keep numbers by the product's own book of clients, and fail as a test tells them: for tests of keyed changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import numpy as np

from shardam_proto.error_details import DETAILS_KEY, pack_status
from shardam_proto.errors import EtagMismatch, ShardamError, StaleState, UnknownTable
from shardam_proto.limits import PROTOCOL_VERSION, SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, ClusterView, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import (
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    row_pb2,
    row_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)
from shardam_server.shard.clients import Clients, Origin, Outcome

LOSE_ANSWER = "lose answer"
"""The shard does what it is asked, and the caller sees the connection fail."""

FAIL_BEFORE = "fail before"
"""The caller sees the connection fail; the shard has done nothing."""

_Change = row_pb2.AssignRowsRequest | row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest
Fault = ShardamError | str


@dataclasses.dataclass
class NumberedShard:
    """One shard: its clients, and the change number of each of its rows.

    Attributes:
        faults: used up one per row change.
        seen: row ids of each row change that came, applied or not.
        rows: row id -> its change number.
        before_change: runs before each row change.
    """

    index: int
    lineage: int = 21
    incarnation: int = 11
    clients: Clients = dataclasses.field(default_factory=Clients)
    change_number: int = 0
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    faults: collections.deque[Fault] = dataclasses.field(default_factory=collections.deque)
    seen: list[list[int]] = dataclasses.field(default_factory=list)
    left: list[bytes] = dataclasses.field(default_factory=list)
    tables: dict[str, common_pb2.TableInfo] = dataclasses.field(default_factory=dict)
    before_change: Callable[[], None] = lambda: None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def last(self, client_id: bytes) -> int:
        """Returns the client's last number here; 0 also if it is not known."""
        entry = self.clients.find(client_id)
        return 0 if entry is None else entry.last_number

    def lose_state(self) -> None:
        """Becomes a shard that starts empty on a new lineage."""
        self.lineage, self.incarnation = self.lineage + 1, self.incarnation + 1
        self.clients, self.change_number, self.rows = Clients(), 0, {}

    def restart(self) -> None:
        """Becomes another process life that has kept everything."""
        self.incarnation += 1

    def header(self, last_number: int = 0) -> common_pb2.ResponseHeader:
        return common_pb2.ResponseHeader(
            shard=self.index, incarnation=self.incarnation, lineage=self.lineage, timeline=1, last_number=last_number
        )

    def change(self, request: _Change, context: grpc.ServicerContext) -> tuple[Outcome, bool]:
        """Runs a row change as its number, once."""
        self.before_change()
        with self.lock:
            row_ids = np.frombuffer(request.row_ids, "<i8").tolist()
            self.seen.append(row_ids)
            if request.header.incarnation != self.incarnation:
                refuse(context, StaleState("another life", reason="NEW_INCARNATION"))
            fault = self.faults.popleft() if self.faults else None
            if fault == FAIL_BEFORE:
                context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
            content = type(request)()
            content.CopyFrom(request)  # type: ignore[arg-type]  # the same type on both sides
            content.ClearField("header")
            digest = type(request).__name__.encode() + content.SerializeToString(deterministic=True)
            result = self.run(Origin(request.header.client_id, 1, digest), lambda: self.apply(request, row_ids, fault), context)
            if fault == LOSE_ANSWER:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
            return result

    def run(self, origin: Origin, apply: Callable[[], Outcome], context: grpc.ServicerContext) -> tuple[Outcome, bool]:
        try:
            former = self.clients.former(origin)
            outcome = apply() if former is None else former
        except ShardamError as error:
            refuse(context, error)
        if former is None:
            self.clients.get(origin.client_id).record(origin, outcome)
        return outcome, former is not None

    def apply(self, request: _Change, row_ids: list[int], fault: Fault | None) -> Outcome:
        if isinstance(fault, ShardamError):
            raise fault
        wanted = request.condition.change_number if request.condition.HasField("change_number") else None
        if wanted is not None and any(self.rows.get(row_id) != wanted for row_id in row_ids):
            raise EtagMismatch("the row has changed")
        self.change_number += 1
        known = [row_id for row_id in row_ids if row_id in self.rows]
        if isinstance(request, row_pb2.DeleteRowsRequest):
            self.rows = {row_id: number for row_id, number in self.rows.items() if row_id not in row_ids}
            return Outcome(num_rows=len(known), change_number=self.change_number)
        changed = row_ids if isinstance(request, row_pb2.AssignRowsRequest) else known
        self.rows.update(dict.fromkeys(changed, self.change_number))
        return Outcome(num_rows=len(changed), change_number=self.change_number)


def refuse(context: grpc.ServicerContext, error: ShardamError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, pack_status(error)),))
    context.abort(error.rule.code, error.message)


class _Embedding(embedding_pb2_grpc.EmbeddingServiceServicer):
    def __init__(self, shard: NumberedShard) -> None:
        self.shard = shard

    def Open(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        client_id = request.header.client_id
        with self.shard.lock:
            if self.shard.clients.find(client_id) is None:
                self.shard.clients.add(client_id, heartbeats=request.heartbeats)
        return embedding_pb2.OpenResponse(
            header=self.shard.header(self.shard.last(client_id)), protocol_version=PROTOCOL_VERSION, cluster_id="c1"
        )

    def CloseNumber(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        origin = Origin(request.header.client_id, request.header.number, f"close {request.kind}".encode())
        with self.shard.lock:
            _, repeated = self.shard.run(origin, Outcome, context)
        return embedding_pb2.CloseNumberResponse(header=self.shard.header(), repeated_number=repeated)

    def Leave(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.left.append(request.header.client_id)
        return embedding_pb2.LeaveResponse(header=self.shard.header())


class _Rows(row_pb2_grpc.RowServiceServicer):
    def __init__(self, shard: NumberedShard) -> None:
        self.shard = shard

    def AssignRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        outcome, repeated = self.shard.change(request, context)
        return row_pb2.AssignRowsResponse(
            num_assigned=outcome.num_rows, repeated_number=repeated, change_number=outcome.change_number
        )

    def DeleteRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        outcome, repeated = self.shard.change(request, context)
        return row_pb2.DeleteRowsResponse(
            num_deleted=outcome.num_rows, repeated_number=repeated, change_number=outcome.change_number
        )

    def ClearMoments(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        outcome, repeated = self.shard.change(request, context)
        return row_pb2.ClearMomentsResponse(
            num_cleared=outcome.num_rows, repeated_number=repeated, change_number=outcome.change_number
        )


class _Tables(table_pb2_grpc.TableServiceServicer):
    def __init__(self, shard: NumberedShard, cluster: list[NumberedShard]) -> None:
        self.shard = shard
        self.cluster = cluster

    def ListTables(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        for name in request.names:
            if name not in self.shard.tables:
                refuse(context, UnknownTable(f"table {name!r} does not exist", metadata={"table": name}))
        return table_pb2.ListTablesResponse(tables=[self.shard.tables[name] for name in request.names])

    def CreateTables(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        for spec in request.specs:
            for shard in self.cluster:
                shard.tables.setdefault(spec.name, table_info(spec, 2**62 + len(shard.tables)))
        return table_pb2.CreateTablesResponse(tables=[self.shard.tables[spec.name] for spec in request.specs])


def table_info(spec: common_pb2.TableSpec, table_id: int) -> common_pb2.TableInfo:
    return common_pb2.TableInfo(spec=spec, table_id=table_id, table_seed=1)


@contextlib.contextmanager
def numbered_cluster(count: int) -> Iterator[tuple[ClusterView, list[NumberedShard]]]:
    """Starts shards with a table `items` of dim 2, and yields the view of them that Redis would give."""
    spec = TableSpec("items", 2).to_proto()
    shards = [NumberedShard(index, tables={"items": table_info(spec, 77)}) for index in range(count)]
    servers, entries = [], {}
    for shard in shards:
        # Methods that are not here are the generated base's, which answer UNIMPLEMENTED.
        server = grpc.server(futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(_Embedding(shard), server)  # type: ignore[abstract]
        row_pb2_grpc.add_RowServiceServicer_to_server(_Rows(shard), server)  # type: ignore[abstract]
        table_pb2_grpc.add_TableServiceServicer_to_server(_Tables(shard, shards), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        entries[shard.index] = ShardEntry(shard.index, address, address, 11, 21, "cpu", 1, ready=True)
    try:
        yield ClusterView(ClusterEntry("c1", count, seed=0), RouteMap(epoch=1, num_shards=count), entries), shards
    finally:
        for server in servers:
            server.stop(None).wait()
