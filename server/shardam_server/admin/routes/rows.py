"""Rows with their optimizer state, by page, by id and by many ids of one or more tables. Reading never creates a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from shardam_proto.errors import BadOption, UnknownRow
from shardam_server.admin.answer_models import ManyTablesModel, RowPageModel, RowsModel, SingleRowModel
from shardam_server.admin.context import Admin, AdminContext, RequestNumber
from shardam_server.admin.encoding import Json, JsonResponse
from shardam_server.admin.formats import (
    MANY_TABLES_TYPES,
    ONE_TABLE_TYPES,
    TableRows,
    check_include,
    choose_type,
    many_tables_response,
    one_table_response,
)
from shardam_server.admin.problems import DetailedError
from shardam_server.admin.request_models import BatchGetRequest, ManyTablesRequest, MissingRule
from shardam_server.admin.row_ids import check_num_ids, parse_row_id, parse_row_ids
from shardam_server.admin.row_reads import MAX_PAGE_ROWS, Cursor, RowQuery, read_rows, read_tables, scan_rows
from shardam_server.admin.rows import Int64s, Rows
from shardam_server.admin.table_infos import find_info, find_infos

router = APIRouter(tags=["rows"])

MAX_IDS_IN_ERROR = 8
"""Ids that an error names at most."""

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_ROWS, description="rows of the page at most; wide rows give shorter pages")]
Include = Annotated[Literal["optimizer"] | None, Query(description="optimizer: with exp_avg, exp_avg_sq and step")]
CursorText = Annotated[str, Query(max_length=64, description="next_cursor of the page before; empty: from the beginning")]

_BINARY = {"schema": {"type": "string", "format": "binary"}}
Forms = dict[int | str, dict[str, object]]
_ONE_TABLE_FORMS: Forms = {200: {"content": dict.fromkeys(ONE_TABLE_TYPES[1:], _BINARY)}}
_MANY_TABLES_FORMS: Forms = {200: {"content": dict.fromkeys(MANY_TABLES_TYPES[1:], _BINARY)}}


async def _one_table_type(request: Request) -> str:
    return choose_type(", ".join(request.headers.getlist("accept")), ONE_TABLE_TYPES)


async def _many_tables_type(request: Request) -> str:
    return choose_type(", ".join(request.headers.getlist("accept")), MANY_TABLES_TYPES)


OneTableType = Annotated[str, Depends(_one_table_type)]
ManyTablesType = Annotated[str, Depends(_many_tables_type)]


@router.get(
    "/v1/tables/{table}/rows",
    response_model=RowPageModel,
    responses=_ONE_TABLE_FORMS,
    summary="Existing rows, a page at a time",
)
def get_rows(
    table: str,
    admin: Admin,
    request_number: RequestNumber,
    media_type: OneTableType,
    cursor: CursorText = "",
    limit: Limit = 100,
    include: Include = None,
) -> Response:
    """Shows existing rows shard by shard, each shard's in its own order; a row that stays appears exactly once in a walk.

    As npy (weights) and safetensors (ids, found, weight and, with include=optimizer, exp_avg, exp_avg_sq, step) the next
    page's cursor stands in X-Next-Cursor, the table's step in X-Table-Step.
    """
    check_include(media_type, include_optimizer=include == "optimizer")
    route_map = admin.calls.reader.formed().route_map
    start = Cursor.parse(cursor, route_map) if cursor else Cursor(route_map.epoch)
    info = find_info(admin.calls, table, start.shard, request_number)
    page = scan_rows(admin.calls, info, start, limit, include == "optimizer", request_number)
    answer = TableRows(table, info.spec.dim, page.rows, page.table_steps)
    return one_table_response(media_type, answer, {"next_cursor": page.next_cursor})


@router.get("/v1/tables/{table}/rows/{row_id}", response_model=SingleRowModel, summary="One row with its optimizer state")
def get_row(table: str, row_id: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows a row; 404 with its initial weight and its shard if it does not exist.

    Its ETag names this state of the row; If-Match takes it when the row is changed.
    """
    row_ids = np.array([parse_row_id(row_id)], dtype=np.int64)
    info = find_info(admin.calls, table, _owner_of_first(admin, row_ids), request_number)
    rows, steps = read_rows(admin.calls, RowQuery(info, row_ids), include_optimizer=True, request_id=request_number)
    (row,) = rows.to_json()
    assert isinstance(row, Mapping)
    if not rows.found[0]:
        raise _unknown_row(table, row)
    body: dict[str, Json] = {"table": table, "dim": info.spec.dim, "table_step": max(steps.values()), **row}
    return JsonResponse(body, headers={"ETag": str(rows.tag(0))})


@router.post(
    "/v1/tables/{table}/rows:batchGet", response_model=RowsModel, responses=_ONE_TABLE_FORMS, summary="Many rows by id"
)
def batch_get_rows(
    table: str, request: BatchGetRequest, admin: Admin, request_number: RequestNumber, media_type: OneTableType
) -> Response:
    """Shows rows in the order of `ids`, duplicates included; all of them or an error, never a part."""
    include_optimizer = request.include == "optimizer"
    check_include(media_type, include_optimizer=include_optimizer)
    row_ids = parse_row_ids(request.ids, admin.max_batch_ids)
    info = find_info(admin.calls, table, _owner_of_first(admin, row_ids), request_number)
    rows, steps = read_rows(admin.calls, RowQuery(info, row_ids), include_optimizer, request_number)
    rows = _settle_missing(table, rows, request.missing)
    return one_table_response(media_type, TableRows(table, info.spec.dim, rows, steps or {0: info.table_step}))


@router.post(
    "/v1/rows:batchGet", response_model=ManyTablesModel, responses=_MANY_TABLES_FORMS, summary="Many rows of many tables"
)
def batch_get_many(
    request: ManyTablesRequest, admin: Admin, request_number: RequestNumber, media_type: ManyTablesType
) -> Response:
    """Shows rows of several tables in the order asked for; all of them or an error, never a part.

    As safetensors, table t's tensors are called t/ids, t/found, t/weight and so on.
    """
    names = [entry.table for entry in request.tables]
    _check_distinct(names)
    check_num_ids(sum(len(entry.ids) for entry in request.tables), admin.max_batch_ids)
    row_ids = [parse_row_ids(entry.ids, admin.max_batch_ids) for entry in request.tables]
    infos = find_infos(admin.calls, names, _owner_of_first(admin, np.concatenate(row_ids)), request_number)
    queries = [RowQuery(info, ids) for info, ids in zip(infos, row_ids, strict=True)]
    results = read_tables(admin.calls, queries, request.include == "optimizer", request_number)
    answers = [
        TableRows(
            info.spec.name,
            info.spec.dim,
            _settle_missing(info.spec.name, rows, request.missing),
            steps or {0: info.table_step},
        )
        for info, (rows, steps) in zip(infos, results, strict=True)
    ]
    return many_tables_response(media_type, answers)


def _check_distinct(names: Sequence[str]) -> None:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise BadOption(f"table {twice!r} is named twice; name each table once, with all its ids", metadata={"table": twice})


def _owner_of_first(admin: AdminContext, row_ids: Int64s) -> int:
    """Returns a shard that will be asked for rows anyway, to look the table up on; without ids any will do."""
    owners = admin.calls.reader.formed().route_map.shards_of(row_ids[:1])
    return int(owners[0]) if len(owners) else 0


def _settle_missing(table: str, rows: Rows, missing: MissingRule) -> Rows:
    """Gives rows that do not exist the weight that the request asked for; shards answer the initial one.

    Raises:
        UnknownRow: missing=error, and a row does not exist.
    """
    if missing == "error" and not rows.found.all():
        raise _unknown_rows(table, rows)
    if missing == "zero":
        return dataclasses.replace(rows, weight=np.where(rows.found[:, None], rows.weight, np.float32(0)))
    return rows


def _unknown_row(table: str, row: Mapping[str, Json]) -> DetailedError:
    row_id, shard = row["id"], row["shard"]
    error = UnknownRow(
        f"row {row_id} of table {table!r} does not exist; its first push or assign creates it on shard {shard}. "
        "Until then training sees the initial weight given here, and its moments are zero",
        metadata={"table": table, "row_id": str(row_id)},
    )
    return DetailedError(error, {"shard": shard, "bucket": row["bucket"], "initial_weight": row["weight"]})


def _unknown_rows(table: str, rows: Rows) -> UnknownRow:
    missing = rows.row_ids[~rows.found]
    shown = ", ".join(str(row_id) for row_id in missing[:MAX_IDS_IN_ERROR])
    more = f" and {len(missing) - MAX_IDS_IN_ERROR} more" if len(missing) > MAX_IDS_IN_ERROR else ""
    return UnknownRow(
        f"rows of table {table!r} do not exist: {shown}{more}; ask with missing=init or missing=zero to be answered anyway",
        metadata={"table": table, "row_ids": shown, "num_missing": str(len(missing))},
    )
