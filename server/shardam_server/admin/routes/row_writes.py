"""Changes of one row: PUT, DELETE and clearMoments, each a numbered change on all shards (PROTOCOL.md, section 4)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Header, Request

from shardam_proto.errors import BadOption
from shardam_server.admin.answer_models import ChangedRowModel, DeletedRowModel
from shardam_server.admin.context import Admin, AdminContext, RequestNumber
from shardam_server.admin.encoding import Json, JsonResponse
from shardam_server.admin.etags import Precondition, RowTag
from shardam_server.admin.request_models import OptimizerStateModel, PutRowRequest
from shardam_server.admin.row_ids import parse_row_id
from shardam_server.admin.row_writes import RowPlace, RowValues, as_column, clear_moments, delete_row, place_of, put_row
from shardam_server.admin.table_infos import find_info

router = APIRouter(tags=["rows"])

IfMatch = Annotated[str | None, Header(description="the row's ETag, or * for a row that exists; else 412 and no change")]
IfNoneMatch = Annotated[str | None, Header(description="* for a row that does not exist; else 412 and no change; only for PUT")]


async def _precondition(request: Request, if_match: IfMatch = None, if_none_match: IfNoneMatch = None) -> Precondition:
    if if_none_match is not None and request.method != "PUT":
        raise BadOption("If-None-Match asks that the row does not exist, which only PUT can use; leave it out")
    if "idempotency-key" in request.headers:
        raise BadOption(
            "Idempotency-Key is not supported; leave it out. A repeated PUT writes the same row again; to change a row only "
            "once, send its ETag as If-Match"
        )
    return Precondition.parse(if_match, if_none_match)


Asked = Annotated[Precondition, Depends(_precondition)]
"""What the request asks of the row, as a parameter of an endpoint."""


@router.put("/v1/tables/{table}/rows/{row_id}", response_model=ChangedRowModel, summary="Write a row")
def put_one_row(
    table: str, row_id: str, body: PutRowRequest, admin: Admin, request_number: RequestNumber, asked: Asked
) -> JsonResponse:
    """Writes a row as it is, creating it if need be, the padding row too; no step is counted."""
    place = _find(admin, table, row_id, request_number)
    optimizer = body.optimizer or OptimizerStateModel()
    values = RowValues(
        as_column(body.weight, "weight", place),
        None if optimizer.exp_avg is None else as_column(optimizer.exp_avg, "exp_avg", place),
        None if optimizer.exp_avg_sq is None else as_column(optimizer.exp_avg_sq, "exp_avg_sq", place),
    )
    return _changed(place, put_row(admin.calls, place, values, asked, request_number))


@router.delete("/v1/tables/{table}/rows/{row_id}", response_model=DeletedRowModel, summary="Delete a row")
def delete_one_row(table: str, row_id: str, admin: Admin, request_number: RequestNumber, asked: Asked) -> JsonResponse:
    """Deletes a row; 404 if there is none. A row that comes back starts anew: initial weight, zero moments."""
    place = _find(admin, table, row_id, request_number)
    delete_row(admin.calls, place, asked, request_number)
    return JsonResponse(_place_to_json(place))


@router.post(
    "/v1/tables/{table}/rows/{row_id}:clearMoments", response_model=ChangedRowModel, summary="Set a row's moments to zero"
)
def clear_moments_of_one_row(
    table: str, row_id: str, admin: Admin, request_number: RequestNumber, asked: Asked
) -> JsonResponse:
    """Sets exp_avg and exp_avg_sq of a row to zero; its weight and step stay. 404 if there is none."""
    place = _find(admin, table, row_id, request_number)
    return _changed(place, clear_moments(admin.calls, place, asked, request_number))


def _find(admin: AdminContext, table: str, row_id: str, request_number: int) -> RowPlace:
    number = parse_row_id(row_id)
    owner = int(admin.calls.reader.formed().route_map.shards_of(np.array([number], np.int64))[0])
    return place_of(admin.calls, find_info(admin.calls, table, owner, request_number), number)


def _place_to_json(place: RowPlace) -> dict[str, Json]:
    return {"table": place.table.spec.name, "id": str(place.row_id), "shard": place.shard, "bucket": place.bucket}


def _changed(place: RowPlace, tag: RowTag) -> JsonResponse:
    body = {**_place_to_json(place), "change_number": str(tag.change_number)}
    return JsonResponse(body, headers={"ETag": str(tag)})
