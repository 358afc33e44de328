"""TableService: creation (home) and listing."""

from __future__ import annotations

import bisect

import grpc.aio

from shardam_proto.errors import BadOption, UnknownTable
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, table_pb2, table_pb2_grpc
from shardam_server.shard.context import ShardContext
from shardam_server.shard.home import Home
from shardam_server.shard.option_messages import encode_options
from shardam_server.shard.table import Table

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
"""A table's description has about 200 bytes: 2 MB a page at most."""


def table_info(table: Table) -> common_pb2.TableInfo:
    """Describes a table as this shard sees it."""
    return common_pb2.TableInfo(
        spec=table.spec.to_proto(),
        table_id=table.table_id,
        table_seed=table.table_seed,
        table_step=table.step,
        num_rows=table.num_rows,
        record_bytes=table.storage.record_bytes,
        index_bytes=table.storage.index_bytes,
        last_options=None if table.last_options is None else encode_options(table.last_options),
        saturated_values=table.storage.saturated_values,
        nonfinite_pushes=table.nonfinite_pushes,
        read_only=table.read_only,
    )


class TableServicer(table_pb2_grpc.TableServiceServicer):
    """Tables of one shard; on home, of the cluster.

    Args:
        shard: the shard.
        home: creates tables.
    """

    def __init__(self, shard: ShardContext, home: Home) -> None:
        self._shard = shard
        self._home = home

    async def CreateTables(  # noqa: N802 - the service's name
        self,
        request: table_pb2.CreateTablesRequest,
        context: grpc.aio.ServicerContext[table_pb2.CreateTablesRequest, table_pb2.CreateTablesResponse],
    ) -> table_pb2.CreateTablesResponse:
        """Creates tables on all shards."""
        self._shard.check_serving(request.header)
        specs = [TableSpec.from_proto(message) for message in request.specs]
        tables = await self._home.create_tables(specs, request.table_seeds)
        return table_pb2.CreateTablesResponse(
            header=self._shard.header(request.header), tables=[table_info(table) for table in tables]
        )

    async def ListTables(  # noqa: N802 - the service's name
        self,
        request: table_pb2.ListTablesRequest,
        context: grpc.aio.ServicerContext[table_pb2.ListTablesRequest, table_pb2.ListTablesResponse],
    ) -> table_pb2.ListTablesResponse:
        """Lists tables by name, a page at a time."""
        self._shard.check_serving(request.header)
        page_size = request.page_size or DEFAULT_PAGE_SIZE
        if page_size > MAX_PAGE_SIZE:
            raise BadOption(f"page_size must be at most {MAX_PAGE_SIZE}, got {page_size}")
        tables, next_after = (
            (self._named(list(request.names)), "") if request.names else self._page(request.after_name, page_size)
        )
        return table_pb2.ListTablesResponse(
            header=self._shard.header(request.header),
            tables=[table_info(table) for table in tables],
            next_after_name=next_after,
        )

    def _named(self, names: list[str]) -> list[Table]:
        tables = []
        for name in names:
            table = self._shard.state.find_table(name)
            if table is None:
                raise UnknownTable(
                    f"no table is called {name!r}; `shardam table list` or GET /v1/tables shows what there is",
                    metadata={"table": name},
                )
            tables.append(table)
        return tables

    def _page(self, after_name: str, page_size: int) -> tuple[list[Table], str]:
        tables = self._shard.state.tables()
        start = bisect.bisect_right([table.spec.name for table in tables], after_name)
        page = tables[start : start + page_size]
        more = start + page_size < len(tables)
        return page, page[-1].spec.name if more else ""
