"""Rows of live shards as they show them over gRPC, in the oracle's form."""

from __future__ import annotations

import contextlib

import numpy as np

from shardam_proto.registry import ClusterView
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_testing.faults.comparison import joined
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.sequence import TABLES
from shardam_testing.raw_client import RawClient, raw_client

PAGE_ROWS = 10_000
"""Rows of one page."""


def read_table(client: RawClient, table: common_pb2.TableInfo) -> TableRows:
    """Reads all rows of a table on one shard, with their optimizer state."""
    pages, key = [], 0
    while True:
        request = row_pb2.ScanRowsRequest(
            header=client.header(), table_id=table.table_id, include_optimizer=True, from_key=key, max_rows=PAGE_ROWS
        )
        page = client.call(client.row.ScanRows, request)
        pages.append(_rows(page.rows, table.spec.dim))
        if not page.HasField("next_key"):
            return joined(pages)
        key = page.next_key


def read_rows(view: ClusterView) -> dict[str, TableRows]:
    """Reads all rows of the tables of a sequence over all shards."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw_client(view, index)) for index in sorted(view.shards)]
        tables = {spec.name: clients[0].info(spec.name) for spec in TABLES}
        return {name: joined([read_table(client, table) for client in clients]) for name, table in tables.items()}


def _rows(columns: row_pb2.RowColumns, dim: int) -> TableRows:
    weight, exp_avg, exp_avg_sq = (
        np.frombuffer(data, "<f4").astype(np.float32).reshape(-1, dim)
        for data in (columns.weight, columns.exp_avg, columns.exp_avg_sq)
    )
    return TableRows(
        np.frombuffer(columns.row_ids, "<i8").astype(np.int64),
        weight,
        exp_avg,
        exp_avg_sq,
        np.frombuffer(columns.step, "<i8").astype(np.int64),
        np.frombuffer(columns.last_touched_step, "<i8").astype(np.int64),
        np.frombuffer(columns.change_number, "<u8").astype(np.int64),
    )
