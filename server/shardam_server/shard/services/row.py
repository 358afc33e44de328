"""RowService: rows with their optimizer state."""

from __future__ import annotations

import grpc.aio
import numpy as np

from shardam_proto.errors import BadOption
from shardam_proto.limits import MAX_MESSAGE_BYTES, MAX_SCAN_ROWS
from shardam_proto.v1 import common_pb2, row_pb2, row_pb2_grpc
from shardam_server.shard.context import ShardContext
from shardam_server.shard.holding import mark_of
from shardam_server.shard.reads import read_tables
from shardam_server.shard.services.decoding import FLOAT_BYTES, check_owned, decode_ids, encode
from shardam_server.shard.services.row_changes import RowChanges
from shardam_server.shard.table import RowBatch

ROW_OVERHEAD_BYTES = 64
"""Bytes of a row's id, flags and counters in a page, rounded up."""


class RowServicer(row_pb2_grpc.RowServiceServicer):
    """Row inspection and direct writes of one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._changes = RowChanges(shard)

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
            batch = table.read(row_ids, include_optimizer=request.include_optimizer)
            return row_pb2.ReadRowsResponse(header=shard.header(request.header), table_step=table.step, rows=_columns(batch))

        return await read_tables(shard, [table], read)

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
            batch, next_key = table.scan(request.from_key, max_rows, include_optimizer=request.include_optimizer)
            return row_pb2.ScanRowsResponse(
                header=shard.header(request.header), table_step=table.step, rows=_columns(batch), next_key=next_key
            )

        return await read_tables(shard, [table], scan)

    async def AssignRows(  # noqa: N802 - the service's name
        self,
        request: row_pb2.AssignRowsRequest,
        context: grpc.aio.ServicerContext[row_pb2.AssignRowsRequest, row_pb2.AssignRowsResponse],
    ) -> row_pb2.AssignRowsResponse:
        """Writes rows."""
        self._check_change(request.header)
        return await self._shard.change(lambda: self._changes.assign(request), request.ByteSize(), mark_of(request.header))

    async def DeleteRows(  # noqa: N802 - the service's name
        self,
        request: row_pb2.DeleteRowsRequest,
        context: grpc.aio.ServicerContext[row_pb2.DeleteRowsRequest, row_pb2.DeleteRowsResponse],
    ) -> row_pb2.DeleteRowsResponse:
        """Deletes rows."""
        self._check_change(request.header)
        return await self._shard.change(lambda: self._changes.delete(request), request.ByteSize(), mark_of(request.header))

    async def ClearMoments(  # noqa: N802 - the service's name
        self,
        request: row_pb2.ClearMomentsRequest,
        context: grpc.aio.ServicerContext[row_pb2.ClearMomentsRequest, row_pb2.ClearMomentsResponse],
    ) -> row_pb2.ClearMomentsResponse:
        """Sets moments to zero."""
        self._check_change(request.header)
        return await self._shard.change(
            lambda: self._changes.clear_moments(request), request.ByteSize(), mark_of(request.header)
        )

    def _check_change(self, header: common_pb2.RequestHeader) -> None:
        self._shard.check_serving(header)
        self._shard.sequencer.check_room()


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
