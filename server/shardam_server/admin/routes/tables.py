"""/v1/tables: schemas, steps, sizes and counters of tables, and their creation."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from shardam_server.admin.answer_models import TableModel, TablePageModel
from shardam_server.admin.context import Admin, RequestNumber
from shardam_server.admin.encoding import JsonResponse
from shardam_server.admin.request_models import TableSpecModel
from shardam_server.admin.routes.keys import KEYED_ANSWER, Key, replayed_header
from shardam_server.admin.table_infos import find_table, list_tables
from shardam_server.admin.table_writes import create_table

router = APIRouter(tags=["tables"])

MAX_PAGE_SIZE = 1000
"""Tables of one page at most."""

PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE, description="tables of the page at most")]
AfterName = Annotated[str, Query(max_length=128, description="name after which the page starts; empty: from the beginning")]


@router.get("/v1/tables", response_model=TablePageModel, summary="Tables by name, a page at a time")
def get_tables(
    admin: Admin, request_number: RequestNumber, page_size: PageSize = 100, after_name: AfterName = ""
) -> JsonResponse:
    """Shows tables; `next_after_name` is null on the last page."""
    tables, next_after_name = list_tables(admin.calls, after_name, page_size, request_number)
    return JsonResponse({"tables": [table.to_json() for table in tables], "next_after_name": next_after_name or None})


@router.post("/v1/tables", response_model=TableModel, responses=KEYED_ANSWER, summary="Create a table")
def post_table(spec: TableSpecModel, admin: Admin, request_number: RequestNumber, key: Key) -> JsonResponse:
    """Creates a table on all shards; one that exists with the same schema is answered as it is, with or without a key."""
    checked = spec.to_spec()
    created = create_table(admin.calls, checked, key, request_number)
    headers = {"Location": f"/v1/tables/{checked.name}", **replayed_header(created.replayed)}
    return JsonResponse(created.table.to_json(), headers=headers)


@router.get("/v1/tables/{table}", response_model=TableModel, summary="One table")
def get_table(table: str, admin: Admin, request_number: RequestNumber) -> JsonResponse:
    """Shows a table's schema, step, rows per shard, memory, last hyper-parameters and counters."""
    return JsonResponse(find_table(admin.calls, table, request_number).to_json())
