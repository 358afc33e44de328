"""Creating a table, also under an Idempotency-Key."""

from __future__ import annotations

import dataclasses

from shardam_proto.errors import ShardamError, UnknownTable, make_error
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, row_pb2, table_pb2
from shardam_server.admin.etags import Precondition
from shardam_server.admin.keyed_changes import IdempotencyKey, KeyedClient
from shardam_server.admin.row_changes import RowChange
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.admin.table_infos import ClusterTable, find_info, find_table

HOME = 0
"""Index of the home shard, which creates tables on all shards."""


@dataclasses.dataclass(frozen=True)
class CreatedTable:
    """A table that all shards have.

    Attributes:
        table: the table.
        replayed: an earlier request with the same key created it.
    """

    table: ClusterTable
    replayed: bool


def create_table(calls: ShardCalls, spec: TableSpec, key: IdempotencyKey | None, request_id: int) -> CreatedTable:
    """Creates a table on all shards; one that exists with the same schema is answered as it is.

    Raises:
        SchemaMismatch: the name is taken by a table of another schema.
        SequenceError: the key was used for another change; no table was created.
        ShardamError: a shard did not answer; the same request again finishes what was begun.
    """
    replayed = False
    if key is None:
        _create(calls, spec, request_id)
    else:
        replayed = _create_keyed(calls, spec, key, request_id)
    return CreatedTable(find_table(calls, spec.name, request_id), replayed)


def _create(calls: ShardCalls, spec: TableSpec, request_id: int) -> common_pb2.TableInfo:
    request = table_pb2.CreateTablesRequest(specs=[spec.to_proto()])
    return calls.call(HOME, lambda stubs: stubs.tables.CreateTables, request, request_id).tables[0]


def _create_keyed(calls: ShardCalls, spec: TableSpec, key: IdempotencyKey, request_id: int) -> bool:
    """Creates a table and has the shards remember that the key stands for it; returns whether they did before.

    Creating needs no number: the same schema again is the same table. What is numbered is a mark that tells a repeat from
    another use of the key: a write of no rows into the table, in a form that no route sends for rows.
    """
    route_map = calls.reader.formed().route_map
    client = KeyedClient(calls, route_map, key, request_id)
    if client.open(f"table {spec.name!r}") and not _exists(calls, spec, request_id):
        raise key.reused("no table was created")
    table_id = _create(calls, spec, request_id).table_id
    marks = {shard: row_pb2.AssignRowsRequest(table_id=table_id, if_absent=True) for shard in range(route_map.num_shards)}
    change = RowChange(HOME, route_map, lambda stubs: stubs.rows.AssignRows, marks, Precondition(), subject="the key's mark")
    try:
        return client.run(change).replayed
    except ShardamError as error:
        message = f"table {spec.name!r} exists, but not every shard remembers the key: {error.message}"
        raise make_error(error.reason, message, error.metadata) from error


def _exists(calls: ShardCalls, spec: TableSpec, request_id: int) -> bool:
    try:
        return TableSpec.from_proto(find_info(calls, spec.name, HOME, request_id).spec) == spec
    except UnknownTable:
        return False
