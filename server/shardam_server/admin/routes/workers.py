"""/v1/workers: the clients that send heartbeats, with their groups, ranks and steps, as home knows them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from shardam_server.admin.answer_models import WorkerPageModel
from shardam_server.admin.context import Admin, RequestNumber
from shardam_server.admin.encoding import JsonResponse
from shardam_server.admin.workers import Place, read_workers
from shardam_server.worker_words import waiting_to_json, worker_to_json

router = APIRouter(tags=["cluster"])

MAX_PAGE_SIZE = 1000
"""Workers of one page at most."""

PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE, description="workers of the page at most")]
CursorText = Annotated[str, Query(max_length=256, description="next_cursor of the page before; empty: from the beginning")]


@router.get("/v1/workers", response_model=WorkerPageModel, summary="Workers, a page at a time")
def get_workers(
    admin: Admin, request_number: RequestNumber, page_size: PageSize = 100, cursor: CursorText = ""
) -> JsonResponse:
    """Shows members of groups by group and rank, then async workers; and for which ranks a sync group waits.

    Only home, shard 0, knows them: while it does not answer this is 503.
    """
    after = Place.parse(cursor) if cursor else None
    page = read_workers(admin.calls, after, page_size, request_number)
    return JsonResponse(
        {
            "workers": [worker_to_json(worker) for worker in page.workers],
            "waiting_groups": [waiting_to_json(waiting) for waiting in page.waiting],
            "next_cursor": None if page.next_place is None else str(page.next_place),
        }
    )
