"""Shards for tests of the admin API alone: gRPC servers in this process that answer from dictionaries."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import numpy as np
import numpy.typing as npt
import redis

from shardam_proto.channels import TOKEN_KEY
from shardam_proto.error_details import DETAILS_KEY, pack_status
from shardam_proto.errors import BadToken, ShardamError, ShardLost, ShardNotReady, UnknownTable
from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, ClusterView, Keys, ShardEntry, route_map_to_json
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, row_pb2, row_pb2_grpc, shard_pb2, shard_pb2_grpc, table_pb2, table_pb2_grpc
from shardam_proto.v1.checkpoint_pb2_grpc import add_CheckpointServiceServicer_to_server
from shardam_testing.scripted_checkpoints import ScriptedCheckpoints, ScriptedCheckpointService

INITIAL_WEIGHT = 0.5
"""Weight of a row that does not exist."""


_MAX_CALLS = 64
"""Calls that a shard handles at once: more than the admin API makes, so that a test may hold up all of them."""


@dataclasses.dataclass
class FakeRow:
    """A row's state."""

    weight: npt.NDArray[np.float32]
    exp_avg: npt.NDArray[np.float32]
    exp_avg_sq: npt.NDArray[np.float32]
    change_number: int = 1
    last_touched_step: int = 1


@dataclasses.dataclass
class FakeShard:
    """One shard: its tables, its rows, and what a test may break.

    Attributes:
        status: fields of its GetStatusResponse beside header and state.
        checkpoints: what it says of checkpoints, as home.
        token: what its callers must send; None: nothing.
        workers: what it says of the workers; None: it is of a version that does not list them.
        before_answer: runs before it answers about rows, tables and workers.
    """

    index: int
    tables: dict[str, common_pb2.TableInfo] = dataclasses.field(default_factory=dict)
    rows: dict[tuple[int, int], FakeRow] = dataclasses.field(default_factory=dict)
    state: shard_pb2.ServingState.ValueType = shard_pb2.SERVING_STATE_SERVING
    status: shard_pb2.GetStatusResponse = dataclasses.field(default_factory=shard_pb2.GetStatusResponse)
    workers: shard_pb2.ListWorkersResponse | None = dataclasses.field(default_factory=shard_pb2.ListWorkersResponse)
    checkpoints: ScriptedCheckpoints = dataclasses.field(default_factory=ScriptedCheckpoints)
    token: str | None = None
    metrics_text: str = ""
    fail_with: ShardamError | None = None
    crash: bool = False
    before_answer: Callable[[], None] = lambda: None
    seen_request_ids: list[int] = dataclasses.field(default_factory=list)
    seen_metadata: list[dict[str, str | bytes]] = dataclasses.field(default_factory=list)
    peers: list[FakeShard] = dataclasses.field(default_factory=list)

    def answer_header(self, request_header: common_pb2.RequestHeader) -> common_pb2.ResponseHeader:
        self.seen_request_ids.append(request_header.request_id)
        return common_pb2.ResponseHeader(shard=self.index, incarnation=1, lineage=2, timeline=1, epoch=1, change_number=9)

    def check(self, context: grpc.ServicerContext) -> None:
        self.check_token(context)
        self.seen_metadata.append(dict(context.invocation_metadata()))
        self.before_answer()
        if self.crash:
            raise RuntimeError("a fault of the test")
        error = self.fail_with
        if error is None and self.state == shard_pb2.SERVING_STATE_LOST:
            error = ShardLost(f"shard {self.index} is LOST: `shardam forget-shard --index {self.index}`")
        if error is None and self.state != shard_pb2.SERVING_STATE_SERVING:
            error = ShardNotReady(f"shard {self.index} does not serve")
        if error is not None:
            refuse(context, error)

    def check_token(self, context: grpc.ServicerContext) -> None:
        if self.token is not None and dict(context.invocation_metadata()).get(TOKEN_KEY) != f"Bearer {self.token}":
            refuse(context, BadToken("this cluster needs a token: set SHARDAM_TOKEN"))

    def table_of(self, table_id: int) -> common_pb2.TableInfo:
        return next(info for info in self.tables.values() if info.table_id == table_id)

    def columns(self, table: common_pb2.TableInfo, row_ids: list[int], include_optimizer: bool) -> row_pb2.RowColumns:
        dim = table.spec.dim
        zeros = np.zeros(dim, np.float32)
        missing = FakeRow(np.full(dim, INITIAL_WEIGHT, np.float32), zeros, zeros, 0, 0)
        found = [(table.table_id, row_id) in self.rows for row_id in row_ids]
        rows = [self.rows.get((table.table_id, row_id), missing) for row_id in row_ids]
        columns = row_pb2.RowColumns(
            row_ids=np.array(row_ids, "<i8").tobytes(),
            found=np.array(found, np.uint8).tobytes(),
            weight=b"".join(row.weight.astype("<f4").tobytes() for row in rows),
            step=np.array([table.table_step if known else 0 for known in found], "<i8").tobytes(),
            last_touched_step=np.array([row.last_touched_step for row in rows], "<i8").tobytes(),
            change_number=np.array([row.change_number for row in rows], "<u8").tobytes(),
        )
        if include_optimizer:
            columns.exp_avg = b"".join(row.exp_avg.astype("<f4").tobytes() for row in rows)
            columns.exp_avg_sq = b"".join(row.exp_avg_sq.astype("<f4").tobytes() for row in rows)
        return columns


def refuse(context: grpc.ServicerContext, error: ShardamError) -> None:
    """Ends the call with the error, as shards do."""
    context.set_trailing_metadata(((DETAILS_KEY, pack_status(error)),))
    context.abort(error.rule.code, error.message)


class _Rows(row_pb2_grpc.RowServiceServicer):
    def __init__(self, shard: FakeShard) -> None:
        self.shard = shard

    def ReadRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.check(context)
        table = self.shard.table_of(request.table_id)
        row_ids = np.frombuffer(request.row_ids, "<i8").tolist()
        return row_pb2.ReadRowsResponse(
            header=self.shard.answer_header(request.header),
            table_step=table.table_step,
            rows=self.shard.columns(table, row_ids, request.include_optimizer),
        )

    def ScanRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.check(context)
        table = self.shard.table_of(request.table_id)
        row_ids = sorted(row_id for table_id, row_id in self.shard.rows if table_id == table.table_id)
        page = row_ids[request.from_key :][: request.max_rows]
        end = request.from_key + len(page)
        return row_pb2.ScanRowsResponse(
            header=self.shard.answer_header(request.header),
            table_step=table.table_step,
            rows=self.shard.columns(table, page, request.include_optimizer),
            next_key=end if end < len(row_ids) else None,
        )

    def AssignRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def DeleteRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def ClearMoments(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")


class _Tables(table_pb2_grpc.TableServiceServicer):
    def __init__(self, shard: FakeShard) -> None:
        self.shard = shard

    def ListTables(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.check(context)
        names = list(request.names) or sorted(name for name in self.shard.tables if name > request.after_name)
        for name in names:
            if name not in self.shard.tables:
                refuse(context, UnknownTable(f"table {name!r} does not exist", metadata={"table": name}))
        page = names[: request.page_size or 1000]
        return table_pb2.ListTablesResponse(
            header=self.shard.answer_header(request.header),
            tables=[self.shard.tables[name] for name in page],
            next_after_name=page[-1] if len(page) < len(names) else "",
        )

    def CreateTables(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.check(context)
        for spec in request.specs:
            for shard in (self.shard, *self.shard.peers):
                add_table(shard, TableSpec.from_proto(spec))
        tables = [self.shard.tables[spec.name] for spec in request.specs]
        return table_pb2.CreateTablesResponse(header=self.shard.answer_header(request.header), tables=tables)


class _Shard(shard_pb2_grpc.ShardServiceServicer):
    def __init__(self, shard: FakeShard) -> None:
        self.shard = shard

    def GetStatus(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.check_token(context)
        status = shard_pb2.GetStatusResponse(header=self.shard.answer_header(request.header), state=self.shard.state)
        status.MergeFrom(self.shard.status)
        return status

    def GetMetrics(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return shard_pb2.GetMetricsResponse(header=self.shard.answer_header(request.header), text=self.shard.metrics_text)

    def ListWorkers(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        workers = self.shard.workers
        if workers is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            raise AssertionError("abort returned")  # it never does
        self.shard.check(context)
        answer = shard_pb2.ListWorkersResponse(header=self.shard.answer_header(request.header))
        answer.MergeFrom(workers)
        return answer

    def InstallTables(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def EndClient(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def EndClients(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def SettleClient(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def UpdateGroup(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def CheckStep(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def Hold(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def Advance(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def Cut(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def Release(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def CheckFiles(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def AdoptPlan(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def GetTask(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def DropTask(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")

    def ForgetState(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        context.abort(grpc.StatusCode.INTERNAL, "fake shards only read")


def add_table(shard: FakeShard, spec: TableSpec, table_step: int = 3) -> None:
    """Puts a table on a shard."""
    table_id = 2**62 + len(shard.tables)
    shard.tables[spec.name] = common_pb2.TableInfo(
        spec=spec.to_proto(), table_id=table_id, table_seed=2**63, table_step=table_step
    )


@dataclasses.dataclass
class FakeCluster:
    """Shards, and the view of them that Redis would give."""

    shards: list[FakeShard]
    view: ClusterView
    servers: list[grpc.Server]

    @property
    def route_map(self) -> RouteMap:
        assert self.view.route_map is not None
        return self.view.route_map

    def add_table(self, spec: TableSpec) -> None:
        for shard in self.shards:
            add_table(shard, spec)

    def put(self, table: str, row_id: int, weight: npt.ArrayLike, change_number: int = 1) -> None:
        """Puts a row on the shard that owns it; exp_avg is the weight, exp_avg_sq its square."""
        shard = self.shards[int(self.route_map.shards_of(np.array([row_id], np.int64))[0])]
        values = np.asarray(weight, np.float32)
        with np.errstate(invalid="ignore"):
            row = FakeRow(values, values, values * values, change_number)
        shard.rows[shard.tables[table].table_id, row_id] = row

    def register(self, connection: redis.Redis, name: str = "test") -> None:
        """Writes the view into Redis, without leases: as a cluster of this name other processes find the shards."""
        assert self.view.entry is not None
        keys = Keys(name)
        connection.set(keys.cluster_entry, self.view.entry.to_json())
        connection.set(keys.route_map, route_map_to_json(self.route_map))
        for index, entry in self.registered.items():
            connection.set(keys.shard(index), entry.to_json())

    def move(self, index: int) -> None:
        """Stops a shard's server and starts it on another port; the view is not told (see `registered`)."""
        self.servers[index].stop(None).wait()
        self.servers[index], port = _serve(self.shards[index])
        self.registered[index] = _entry(index, port, incarnation=2)

    @property
    def registered(self) -> dict[int, ShardEntry]:
        return self.view.shards


def _entry(index: int, port: int, incarnation: int = 1) -> ShardEntry:
    address = f"127.0.0.1:{port}"
    return ShardEntry(index, address, address, incarnation, lineage=2**63 - 1, device="cpu", pid=1, ready=True)


def _serve(shard: FakeShard) -> tuple[grpc.Server, int]:
    server = grpc.server(futures.ThreadPoolExecutor(_MAX_CALLS), options=SERVER_OPTIONS)
    row_pb2_grpc.add_RowServiceServicer_to_server(_Rows(shard), server)
    table_pb2_grpc.add_TableServiceServicer_to_server(_Tables(shard), server)
    shard_pb2_grpc.add_ShardServiceServicer_to_server(_Shard(shard), server)
    add_CheckpointServiceServicer_to_server(ScriptedCheckpointService(shard.checkpoints, shard.answer_header), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


@contextlib.contextmanager
def running_fake_shards(count: int) -> Iterator[FakeCluster]:
    """Starts fake shards on free ports."""
    shards = [FakeShard(index) for index in range(count)]
    shards[0].peers = shards[1:]
    started = [_serve(shard) for shard in shards]
    entries = {index: _entry(index, port) for index, (_, port) in enumerate(started)}
    view = ClusterView(ClusterEntry("c1", count, seed=0), RouteMap(epoch=1, num_shards=count), entries)
    cluster = FakeCluster(shards, view, [server for server, _ in started])
    try:
        yield cluster
    finally:
        for server in cluster.servers:
            server.stop(None).wait()
