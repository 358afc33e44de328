"""What scripted shards serve by gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import numpy as np

from shardam_proto.error_details import DETAILS_KEY, pack_status
from shardam_proto.errors import ClientClosed, ShardamError, StaleState
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    row_pb2,
    row_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)
from shardam_testing.scripted_streams import BrokenConnection, ScriptedStream

if TYPE_CHECKING:
    from shardam_testing.scripted_shards import ScriptedShard

CLUSTER_ID = "scripted"


def abort(context: grpc.ServicerContext, error: ShardamError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, pack_status(error)),))
    context.abort(error.rule.code, error.message)


def add_services(shard: ScriptedShard, server: grpc.Server) -> None:
    """Has a server serve what a scripted shard serves."""
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(ScriptedEmbedding(shard), server)
    checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(ScriptedCheckpoints(shard), server)  # type: ignore[abstract]
    row_pb2_grpc.add_RowServiceServicer_to_server(ScriptedRows(shard), server)
    table_pb2_grpc.add_TableServiceServicer_to_server(ScriptedTables(shard), server)  # type: ignore[abstract]


class ScriptedEmbedding(embedding_pb2_grpc.EmbeddingServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self.shard = shard

    def Open(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.opened += 1
        self.shard.wants_heartbeats = request.heartbeats
        if self.shard.open_faults:
            abort(context, self.shard.open_faults.popleft())
        self.shard.meet(request.header.client_id)
        return embedding_pb2.OpenResponse(
            header=self.shard.header(),
            protocol_version=PROTOCOL_VERSION,
            cluster_id=CLUSTER_ID,
            num_shards=1,
            client_lease_s=self.shard.client_lease_s if request.heartbeats else 0.0,
        )

    def Pull(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return self.shard.answer_unary(request, context).pull

    def Push(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return self.shard.answer_unary(request, context).push

    def CloseNumber(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return self.shard.answer_unary(request, context).close_number

    def Exchange(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.num_streams += 1
        if self.shard.stream_faults:
            abort(context, self.shard.stream_faults.popleft())
        stream = ScriptedStream(self.shard)
        for message in request_iterator:
            try:
                answers = stream.take(message)
            except BrokenConnection:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is cut")
            yield from answers

    def JoinGroup(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        try:
            return self.shard.require_group().join(self.shard, request)
        except ShardamError as error:
            abort(context, error)
            raise

    def Heartbeat(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        if self.shard.beat_faults:
            abort(context, self.shard.beat_faults.popleft())
        if request.header.incarnation != self.shard.incarnation:
            abort(context, StaleState("another life", reason="NEW_INCARNATION"))
        if self.shard.is_closed:
            abort(context, ClientClosed("client has left or was dropped"))
        self.shard.beats += 1
        return embedding_pb2.HeartbeatResponse(header=self.shard.header())

    def Leave(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        self.shard.left.append(request.header.client_id)
        return embedding_pb2.LeaveResponse(header=self.shard.header())


class ScriptedCheckpoints(checkpoint_pb2_grpc.CheckpointServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self.shard = shard

    def ListJobs(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return checkpoint_pb2.ListJobsResponse(header=self.shard.header(), jobs=self.shard.jobs)


class ScriptedRows(row_pb2_grpc.RowServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self.shard = shard

    def ReadRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        rows = self._rows("read", request.header, request.row_ids, context)
        return row_pb2.ReadRowsResponse(header=self.shard.header(), rows=rows)

    def ScanRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        row_ids = np.array(sorted(self.shard.changed), "<i8").tobytes()  # rows that nobody has changed do not exist
        rows = self._rows("scan", request.header, row_ids, context)
        return row_pb2.ScanRowsResponse(header=self.shard.header(), rows=rows)

    def AssignRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return self.shard.answer_unary(request, context).assign_rows

    def DeleteRows(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return self.shard.answer_unary(request, context).delete_rows

    def ClearMoments(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        return self.shard.answer_unary(request, context).clear_moments

    def _rows(
        self, method: str, header: common_pb2.RequestHeader, row_ids: bytes, context: grpc.ServicerContext
    ) -> row_pb2.RowColumns:
        """Returns rows as they are, with moments and counters of zero."""
        try:
            self.shard.enter(method, header, row_ids)
        except ShardamError as error:
            abort(context, error)
            raise
        weight = self.shard.weights(np.frombuffer(row_ids, "<i8"))
        zeros = bytes(weight.nbytes)
        found = b"\x01" * (len(row_ids) // 8)
        return row_pb2.RowColumns(
            row_ids=row_ids, found=found, weight=weight.tobytes(), exp_avg=zeros, exp_avg_sq=zeros, step=bytes(len(row_ids))
        )


class ScriptedTables(table_pb2_grpc.TableServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self.shard = shard

    def ListTables(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - the service's name
        try:
            self.shard.enter("list", request.header, b"")
        except ShardamError as error:
            abort(context, error)
            raise
        table = common_pb2.TableInfo(num_rows=len(self.shard.changed))
        return table_pb2.ListTablesResponse(header=self.shard.header(), tables=[table])
