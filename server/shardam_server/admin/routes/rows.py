"""/v1/tables/{table}/rows: rows with their optimizer state, by page, by id and by many ids. Reading never creates a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Query

from shardam_proto.errors import UnknownRow
from shardam_proto.v1 import common_pb2
from shardam_server.admin.answer_models import RowPageModel, RowsModel, SingleRowModel
from shardam_server.admin.context import Admin, AdminContext, RequestNumber
from shardam_server.admin.encoding import Json, JsonResponse, encode_items
from shardam_server.admin.problems import DetailedError
from shardam_server.admin.request_models import BatchGetRequest
from shardam_server.admin.row_ids import parse_row_id, parse_row_ids
from shardam_server.admin.row_reads import MAX_PAGE_ROWS, Cursor, read_rows, scan_rows
from shardam_server.admin.rows import Int64s, Rows
from shardam_server.admin.table_infos import find_info

router = APIRouter(tags=["rows"])

MAX_IDS_IN_ERROR = 8
"""Ids that an error names at most."""

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_ROWS, description="rows of the page at most; wide rows give shorter pages")]
Include = Annotated[Literal["optimizer"] | None, Query(description="optimizer: with exp_avg, exp_avg_sq and step")]
CursorText = Annotated[str, Query(max_length=64, description="next_cursor of the page before; empty: from the beginning")]


@router.get("/v1/tables/{table}/rows", response_model=RowPageModel, summary="Existing rows, a page at a time")
def get_rows(
    table: str,
    admin: Admin,
    request_number: RequestNumber,
    cursor: CursorText = "",
    limit: Limit = 100,
    include: Include = None,
) -> JsonResponse:
    """Shows existing rows shard by shard, each shard's in its own order; a row that stays appears exactly once in a walk."""
    start = Cursor.parse(cursor, admin.calls.reader.formed().route_map) if cursor else Cursor()
    info = find_info(admin.calls, table, start.shard, request_number)
    page = scan_rows(admin.calls, info, start, limit, include == "optimizer", request_number)
    body = _rows_to_json(info.spec, page.rows, page.table_steps)
    return JsonResponse({**body, "next_cursor": page.next_cursor})


@router.get("/v1/tables/{table}/rows/{row_id}", response_model=SingleRowModel, summary="One row with its optimizer state")
def get_row(table: str, row_id: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows a row; 404 with its initial weight and its shard if it does not exist. The ETag is its change number."""
    row_ids = np.array([parse_row_id(row_id)], dtype=np.int64)
    info = _find_info_for(admin, table, row_ids, request_number)
    rows, steps = read_rows(admin.calls, info, row_ids, include_optimizer=True, request_id=request_number)
    (row,) = rows.to_json()
    assert isinstance(row, Mapping)
    if not rows.found[0]:
        raise _unknown_row(table, row)
    body: dict[str, Json] = {"table": table, "dim": info.spec.dim, "table_step": max(steps.values()), **row}
    return JsonResponse(body, headers={"ETag": rows.etag(0)})


@router.post("/v1/tables/{table}/rows:batchGet", response_model=RowsModel, summary="Many rows by id")
def batch_get_rows(table: str, request: BatchGetRequest, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows rows in the order of `ids`, duplicates included; all of them or an error, never a part."""
    row_ids = parse_row_ids(request.ids, admin.max_batch_ids)
    info = _find_info_for(admin, table, row_ids, request_number)
    rows, steps = read_rows(admin.calls, info, row_ids, request.include == "optimizer", request_number)
    if request.missing == "error" and not rows.found.all():
        raise _unknown_rows(table, rows)
    if request.missing == "zero":
        rows = dataclasses.replace(rows, weight=np.where(rows.found[:, None], rows.weight, np.float32(0)))
    if not steps:  # no id, so no shard was asked; the step is known from the table itself
        steps = {0: info.table_step}
    return JsonResponse(_rows_to_json(info.spec, rows, steps))


def _find_info_for(admin: AdminContext, table: str, row_ids: Int64s, request_number: int) -> common_pb2.TableInfo:
    """Looks the table up on a shard that will be asked for rows anyway."""
    owners = admin.calls.reader.formed().route_map.shards_of(row_ids[:1])
    return find_info(admin.calls, table, int(owners[0]) if len(owners) else 0, request_number)


def _rows_to_json(spec: common_pb2.TableSpec, rows: Rows, table_steps: Mapping[int, int]) -> dict[str, Json]:
    return {
        "table": spec.name,
        "dim": spec.dim,
        "table_step": max(table_steps.values()),
        "table_steps": {str(shard): step for shard, step in table_steps.items()},
        "rows": encode_items(rows.to_json()),
    }


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
