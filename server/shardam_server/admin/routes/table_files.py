"""/v1/tables/{table}:export and :import: a table as one file, with its moments and steps."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from shardam_proto.table_files import TableFile
from shardam_server.admin.checkpoint_models import ImportedTableModel
from shardam_server.admin.context import Admin, RequestNumber
from shardam_server.admin.encoding import JsonResponse
from shardam_server.admin.formats import SAFETENSORS_TYPES, TABLE_STEP_HEADER
from shardam_server.admin.table_exports import export_table
from shardam_server.admin.table_imports import ImportTerms, import_table

router = APIRouter(tags=["tables"])

Format = Annotated[Literal["safetensors", "npz"], Query(description="form of the file")]

FormatOfBody = Annotated[
    Literal["safetensors", "npz"] | None, Query(description="form of the file; without it the one that its first bytes tell")
]

ONE_MOMENT_HEADER = "X-One-Moment"
"""false where the table was changed while it was read."""

_TYPES = {"safetensors": SAFETENSORS_TYPES[0], "npz": "application/zip"}
_ZIP_MAGIC = b"PK\x03\x04"
"""First bytes of an npz; as a safetensors file's they would say that its header has 67 MB or more."""

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE_ANSWER: dict[int | str, dict[str, object]] = {200: {"content": dict.fromkeys(_TYPES.values(), _BINARY)}}
_FILE_BODY: dict[str, object] = {"requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}}


@router.get("/v1/tables/{table}:export", response_class=FileResponse, responses=_FILE_ANSWER, summary="A table as one file")
def export_one_table(
    table: str,
    admin: Admin,
    request_number: RequestNumber,
    format: Format = "safetensors",  # noqa: A002 - the parameter's name
) -> FileResponse:
    """Sends ids, weight, exp_avg and exp_avg_sq of all rows in the order of their ids, with schema, step and seed beside them.

    The file is made first, in the admin host's folder for temporary files, which needs room for twice its size. Pushes go on
    meanwhile; X-One-Moment is false if one has changed the table (a checkpoint is of one moment always).
    """
    folder = Path(tempfile.mkdtemp(prefix="shardam-export-"))
    try:
        path = folder / f"{table}.{format}"
        exported = export_table(admin.calls, table, path, request_number)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    headers = {
        TABLE_STEP_HEADER: str(exported.info.table_step),
        ONE_MOMENT_HEADER: "true" if exported.info.one_moment else "false",
    }
    sent = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
    return FileResponse(path, media_type=_TYPES[format], filename=path.name, headers=headers, background=sent)


async def _received(
    request: Request,
    format: FormatOfBody = None,  # noqa: A002 - as above
) -> AsyncIterator[Path]:
    """Keeps the body in a file for as long as the request is handled."""
    with tempfile.TemporaryDirectory(prefix="shardam-import-") as folder:
        path = Path(folder) / "body"
        with path.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        with path.open("rb") as file:
            found = "npz" if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC else "safetensors"
        yield path.rename(path.with_suffix(f".{format or found}"))


@router.post(
    "/v1/tables/{table}:import", response_model=ImportedTableModel, openapi_extra=_FILE_BODY, summary="Read a table from a file"
)
def import_one_table(
    table: str,
    admin: Admin,
    request_number: RequestNumber,
    path: Annotated[Path, Depends(_received)],
    overwrite: Annotated[
        bool,
        Query(description="a table that has rows or steps becomes what the file says; rows that are not in it are deleted"),
    ] = False,
    weights_only: Annotated[bool, Query(description="read weights alone: moments begin anew, the table's step stays")] = False,
) -> JsonResponse:
    """Reads a file that an export has made (any table's name in it) and creates the table if need be.

    The whole file is checked before a row is written. A body above the limit of the admin API (--max-import-mib) is 413.
    """
    imported = import_table(admin.calls, TableFile(path), ImportTerms(table, overwrite, weights_only), request_number)
    return JsonResponse(imported.to_json())
