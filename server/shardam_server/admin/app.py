"""The admin API as an ASGI application; starts nothing."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Depends, FastAPI
from fastapi_offline import FastAPIOffline

from shardam_proto.schema import MAX_DIM
from shardam_server.admin import problems
from shardam_server.admin.access import AccessLog
from shardam_server.admin.answer_models import ProblemModel
from shardam_server.admin.auth import Gate
from shardam_server.admin.body_limit import BodyLimit
from shardam_server.admin.context import AdminContext
from shardam_server.admin.query_parameters import check_query_parameters
from shardam_server.admin.routes import checkpoints, cluster, health, page, row_writes, rows, table_files, tables, workers

DESCRIPTION = """Shows a shardam cluster and changes its rows: shards, workers, tables, rows and their SparseAdam state.

Ids are strings in JSON. Numbers that JSON cannot write are the strings NaN, Infinity and -Infinity.
Errors are application/problem+json with the same `reason` as over gRPC."""

_BODY_BASE_BYTES = 2**20
_BODY_BYTES_PER_ROW = MAX_DIM * 3 * 26  # a row of the largest dim with its moments, each a double with all its digits
_BODY_BYTES_PER_ID = 256  # a wrong request with ten times too many ids is still read, so that the answer can name the limit


def create_app(context: AdminContext, *, token: str | None, host: str) -> FastAPI:
    """Builds the application.

    Args:
        context: what the routes use.
        token: the token that every route but health needs; None: no token.
        host: the host that the server is bound to.
    """
    new_app: Callable[..., FastAPI] = FastAPIOffline
    app = new_app(
        title="shardam admin API",
        version=context.version,
        description=DESCRIPTION,
        redirect_slashes=False,
        responses={
            "4XX": {"model": ProblemModel, "description": "The request is wrong; `reason` says how."},
            "503": {
                "model": ProblemModel,
                "description": "A shard or Redis does not answer; Retry-After says when to ask again.",
            },
        },
    )
    app.state.context = context
    # table_files first: /v1/tables/{table} would take `items:export` for a table's name.
    for module in (cluster, workers, table_files, tables, rows, row_writes, checkpoints):
        app.include_router(module.router, dependencies=[Depends(check_query_parameters)])
    app.include_router(health.router)
    page.install(app)
    problems.install(app)
    largest = max(_BODY_BYTES_PER_ROW, _BODY_BYTES_PER_ID * context.max_batch_ids)
    app.add_middleware(BodyLimit, max_bytes=_BODY_BASE_BYTES + largest, max_import_bytes=context.max_import_mib * 2**20)
    app.add_middleware(page.PagePolicy)
    app.add_middleware(Gate, token=token, host=host)
    app.add_middleware(AccessLog, metrics=context.metrics)
    return app
