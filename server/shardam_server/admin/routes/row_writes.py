"""Changes of one row: PUT, DELETE and clearMoments, each a numbered change on all shards (PROTOCOL.md, section 4)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Header, Request

from shardam_proto.errors import BadOption, UnknownRow
from shardam_server.admin.answer_models import ChangedRowModel, DeletedRowModel
from shardam_server.admin.context import Admin, AdminContext, RequestNumber
from shardam_server.admin.encoding import Json, JsonResponse
from shardam_server.admin.etags import Precondition
from shardam_server.admin.problems import DetailedError
from shardam_server.admin.request_models import OptimizerStateModel, PutRowRequest
from shardam_server.admin.routes.keys import KEYED_ANSWER, Key, replayed_header
from shardam_server.admin.row_ids import parse_row_id
from shardam_server.admin.row_writes import (
    ChangedRow,
    ChangeTerms,
    RowPlace,
    RowValues,
    as_column,
    clear_moments,
    delete_row,
    place_of,
    put_row,
)
from shardam_server.admin.table_infos import find_info

router = APIRouter(tags=["rows"])

IfMatch = Annotated[str | None, Header(description="the row's ETag, or * for a row that exists; else 412 and no change")]
IfNoneMatch = Annotated[str | None, Header(description="* for a row that does not exist; else 412 and no change; only for PUT")]


async def _terms(request: Request, key: Key, if_match: IfMatch = None, if_none_match: IfNoneMatch = None) -> ChangeTerms:
    if if_none_match is not None and request.method != "PUT":
        raise BadOption("If-None-Match asks that the row does not exist, which only PUT can use; leave it out")
    return ChangeTerms(Precondition.parse(if_match, if_none_match), key)


Terms = Annotated[ChangeTerms, Depends(_terms)]
"""What the request asks of the row, and its key, as a parameter of an endpoint."""


@router.put("/v1/tables/{table}/rows/{row_id}", response_model=ChangedRowModel, responses=KEYED_ANSWER, summary="Write a row")
def put_one_row(
    table: str, row_id: str, body: PutRowRequest, admin: Admin, request_number: RequestNumber, terms: Terms
) -> JsonResponse:
    """Writes a row as it is, creating it if need be, the padding row too; no step is counted."""
    place = _find(admin, table, row_id, request_number)
    optimizer = body.optimizer or OptimizerStateModel()
    values = RowValues(
        as_column(body.weight, "weight", place),
        None if optimizer.exp_avg is None else as_column(optimizer.exp_avg, "exp_avg", place),
        None if optimizer.exp_avg_sq is None else as_column(optimizer.exp_avg_sq, "exp_avg_sq", place),
    )
    return _to_response(place, put_row(admin.calls, place, values, terms, request_number))


@router.delete(
    "/v1/tables/{table}/rows/{row_id}", response_model=DeletedRowModel, responses=KEYED_ANSWER, summary="Delete a row"
)
def delete_one_row(table: str, row_id: str, admin: Admin, request_number: RequestNumber, terms: Terms) -> JsonResponse:
    """Deletes a row; 404 if there is none. A row that comes back starts anew: initial weight, zero moments."""
    place = _find(admin, table, row_id, request_number)
    changed = delete_row(admin.calls, place, terms, request_number)
    _require_row(place, changed, "nothing was deleted")
    return JsonResponse(_place_to_json(place), headers=replayed_header(changed.replayed))


@router.post(
    "/v1/tables/{table}/rows/{row_id}:clearMoments",
    response_model=ChangedRowModel,
    responses=KEYED_ANSWER,
    summary="Set a row's moments to zero",
)
def clear_moments_of_one_row(
    table: str, row_id: str, admin: Admin, request_number: RequestNumber, terms: Terms
) -> JsonResponse:
    """Sets exp_avg and exp_avg_sq of a row to zero; its weight and step stay. 404 if there is none."""
    place = _find(admin, table, row_id, request_number)
    changed = clear_moments(admin.calls, place, terms, request_number)
    _require_row(place, changed, "its moments are zero as long as it does not exist")
    return _to_response(place, changed)


def _find(admin: AdminContext, table: str, row_id: str, request_number: int) -> RowPlace:
    number = parse_row_id(row_id)
    owner = int(admin.calls.reader.formed().route_map.shards_of(np.array([number], np.int64))[0])
    return place_of(admin.calls, find_info(admin.calls, table, owner, request_number), number)


def _require_row(place: RowPlace, changed: ChangedRow, consequence: str) -> None:
    """Refuses to call a change done that had no row to change; its number is used all the same."""
    if changed.num_rows:
        return
    error = UnknownRow(
        f"row {place.row_id} of table {place.table.spec.name!r} does not exist; {consequence}",
        metadata={"table": place.table.spec.name, "row_id": str(place.row_id)},
    )
    raise DetailedError(error, {}, replayed_header(changed.replayed))


def _place_to_json(place: RowPlace) -> dict[str, Json]:
    return {"table": place.table.spec.name, "id": str(place.row_id), "shard": place.shard, "bucket": place.bucket}


def _to_response(place: RowPlace, changed: ChangedRow) -> JsonResponse:
    body = {**_place_to_json(place), "change_number": str(changed.tag.change_number)}
    return JsonResponse(body, headers={"ETag": str(changed.tag), **replayed_header(changed.replayed)})
