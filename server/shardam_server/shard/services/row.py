"""RowService: rows with their optimizer state."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio
import numpy as np
import xxhash

from shardam_proto.errors import BadOption
from shardam_proto.limits import MAX_MESSAGE_BYTES, MAX_SCAN_ROWS
from shardam_proto.v1 import common_pb2, row_pb2, row_pb2_grpc
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.conditions import RowCondition
from shardam_server.shard.context import ShardContext
from shardam_server.shard.records import Int64s
from shardam_server.shard.services.decoding import FLOAT_BYTES, check_owned, decode_ids, decode_rows, encode
from shardam_server.shard.table import RowBatch, RowWrite, Table

RowChangeRequest = row_pb2.AssignRowsRequest | row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest

ROW_OVERHEAD_BYTES = 64
"""Bytes of a row's id, flags and counters in a page, rounded up."""


class RowServicer(row_pb2_grpc.RowServiceServicer):
    """Row inspection and direct writes of one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    async def ReadRows(  # noqa: N802 - the service's name
        self,
        request: row_pb2.ReadRowsRequest,
        context: grpc.aio.ServicerContext[row_pb2.ReadRowsRequest, row_pb2.ReadRowsResponse],
    ) -> row_pb2.ReadRowsResponse:
        """Reads rows by id."""
        shard = self._shard
        shard.check_serving(request.header)
        table = shard.state.table(request.table_id)
        row_ids = decode_ids(request.row_ids)

        def read() -> row_pb2.ReadRowsResponse:
            table.check_ids(row_ids)
            check_owned(shard.identity, table, row_ids)
            with table.lock.read():
                batch = table.read(row_ids, include_optimizer=request.include_optimizer)
                step = table.step
            return row_pb2.ReadRowsResponse(header=shard.header(request.header), table_step=step, rows=_columns(batch))

        return await shard.sequencer.read(read)

    async def ScanRows(  # noqa: N802 - the service's name
        self,
        request: row_pb2.ScanRowsRequest,
        context: grpc.aio.ServicerContext[row_pb2.ScanRowsRequest, row_pb2.ScanRowsResponse],
    ) -> row_pb2.ScanRowsResponse:
        """Reads a page of existing rows; a page is shorter than asked for where it would not fit a message."""
        shard = self._shard
        shard.check_serving(request.header)
        if not 1 <= request.max_rows <= MAX_SCAN_ROWS:
            raise BadOption(f"max_rows must be 1 to {MAX_SCAN_ROWS}, got {request.max_rows}")
        table = shard.state.table(request.table_id)
        columns = 3 if request.include_optimizer else 1
        fitting = MAX_MESSAGE_BYTES // (table.spec.dim * FLOAT_BYTES * columns + ROW_OVERHEAD_BYTES)
        max_rows = max(1, min(request.max_rows, fitting))

        def scan() -> row_pb2.ScanRowsResponse:
            with table.lock.read():
                batch, next_key = table.scan(request.from_key, max_rows, include_optimizer=request.include_optimizer)
                step = table.step
            return row_pb2.ScanRowsResponse(
                header=shard.header(request.header), table_step=step, rows=_columns(batch), next_key=next_key
            )

        return await shard.sequencer.read(scan)

    async def AssignRows(  # noqa: N802 - the service's name
        self,
        request: row_pb2.AssignRowsRequest,
        context: grpc.aio.ServicerContext[row_pb2.AssignRowsRequest, row_pb2.AssignRowsResponse],
    ) -> row_pb2.AssignRowsResponse:
        """Writes rows."""
        self._shard.check_serving(request.header)
        outcome, repeated = await self._run_number(request, lambda origin: self._assign(request, origin))
        return row_pb2.AssignRowsResponse(
            header=self._shard.header(request.header, request.header.number),
            num_assigned=outcome.num_rows,
            repeated_number=repeated,
            change_number=outcome.change_number,
        )

    def _assign(self, request: row_pb2.AssignRowsRequest, origin: Origin) -> Outcome:
        table = self._shard.state.table(request.table_id)
        row_ids = decode_ids(request.row_ids)
        num_rows, dim = row_ids.size, table.spec.dim
        check_owned(self._shard.identity, table, row_ids)
        write = RowWrite(
            row_ids,
            decode_rows(request.weight, num_rows, dim, "weight"),
            decode_rows(request.exp_avg, num_rows, dim, "exp_avg") if request.HasField("exp_avg") else None,
            decode_rows(request.exp_avg_sq, num_rows, dim, "exp_avg_sq") if request.HasField("exp_avg_sq") else None,
            request.if_absent,
        )
        return self._shard.state.assign(table, write, decode_condition(request.condition), origin)

    async def DeleteRows(  # noqa: N802 - the service's name
        self,
        request: row_pb2.DeleteRowsRequest,
        context: grpc.aio.ServicerContext[row_pb2.DeleteRowsRequest, row_pb2.DeleteRowsResponse],
    ) -> row_pb2.DeleteRowsResponse:
        """Deletes rows."""
        self._shard.check_serving(request.header)
        outcome, repeated = await self._run_number(request, lambda origin: self._delete(request, origin))
        return row_pb2.DeleteRowsResponse(
            header=self._shard.header(request.header, request.header.number),
            num_deleted=outcome.num_rows,
            repeated_number=repeated,
            change_number=outcome.change_number,
        )

    def _delete(self, request: row_pb2.DeleteRowsRequest, origin: Origin) -> Outcome:
        table, row_ids = self._named_rows(request)
        return self._shard.state.delete(table, row_ids, decode_condition(request.condition), origin)

    async def ClearMoments(  # noqa: N802 - the service's name
        self,
        request: row_pb2.ClearMomentsRequest,
        context: grpc.aio.ServicerContext[row_pb2.ClearMomentsRequest, row_pb2.ClearMomentsResponse],
    ) -> row_pb2.ClearMomentsResponse:
        """Sets moments to zero."""
        self._shard.check_serving(request.header)
        outcome, repeated = await self._run_number(request, lambda origin: self._clear_moments(request, origin))
        return row_pb2.ClearMomentsResponse(
            header=self._shard.header(request.header, request.header.number),
            num_cleared=outcome.num_rows,
            repeated_number=repeated,
            change_number=outcome.change_number,
        )

    def _clear_moments(self, request: row_pb2.ClearMomentsRequest, origin: Origin) -> Outcome:
        table, row_ids = self._named_rows(request)
        return self._shard.state.clear_moments(table, row_ids, decode_condition(request.condition), origin)

    def _named_rows(self, request: row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest) -> tuple[Table, Int64s]:
        table = self._shard.state.table(request.table_id)
        row_ids = decode_ids(request.row_ids)
        table.check_ids(row_ids)
        check_owned(self._shard.identity, table, row_ids)
        return table, row_ids

    async def _run_number(self, request: RowChangeRequest, apply: Callable[[Origin], Outcome]) -> tuple[Outcome, bool]:
        """Runs a row change as the client's number; its content is everything but the header."""
        shard, header = self._shard, request.header

        def run() -> tuple[Outcome, bool]:
            content = type(request)()
            content.CopyFrom(request)  # type: ignore[arg-type]  # the same type on both sides
            content.header.CopyFrom(common_pb2.RequestHeader())
            digest = type(request).__name__.encode() + xxhash.xxh3_128_digest(content.SerializeToString(deterministic=True))
            origin = Origin(header.client_id, header.number, digest)
            return shard.state.run_number(origin, lambda: apply(origin))

        shard.sequencer.check_room()
        return await shard.change(run, request.ByteSize())


def decode_condition(message: row_pb2.RowCondition) -> RowCondition:
    """Converts what a change asks of its rows; an absent message asks nothing."""
    match message.WhichOneof("condition"):
        case "change_number":
            return RowCondition(change_number=message.change_number)
        case "exists":
            return RowCondition(exists=message.exists)
        case _:
            return RowCondition()


def _columns(batch: RowBatch) -> row_pb2.RowColumns:
    return row_pb2.RowColumns(
        row_ids=encode(batch.row_ids),
        found=encode(batch.found.astype(np.uint8)),
        weight=encode(batch.weight),
        exp_avg=b"" if batch.exp_avg is None else encode(batch.exp_avg),
        exp_avg_sq=b"" if batch.exp_avg_sq is None else encode(batch.exp_avg_sq),
        step=encode(batch.step),
        last_touched_step=encode(batch.last_touched_step),
        change_number=encode(batch.change_number),
    )
