"""In which form rows are answered: JSON, npy or safetensors, chosen by the Accept header."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from starlette.responses import Response

from shardam_proto.errors import BadOption
from shardam_server.admin.encoding import JSON_TYPE, Float32s, Json, JsonResponse, encode_items
from shardam_server.admin.problems import HttpOnlyError
from shardam_server.admin.rows import Rows

NPY_TYPE = "application/x-npy"
SAFETENSORS_TYPES = ("application/vnd.safetensors", "application/octet-stream")
"""Two names of the same form; the first is safetensors' own, the second is what generic clients can ask for."""

ONE_TABLE_TYPES = (JSON_TYPE, NPY_TYPE, *SAFETENSORS_TYPES)
MANY_TABLES_TYPES = (JSON_TYPE, *SAFETENSORS_TYPES)
"""What is offered, the default first; npy holds one array, so one table."""

TABLE_STEP_HEADER = "X-Table-Step"
NEXT_CURSOR_HEADER = "X-Next-Cursor"
"""Absent on the last page."""

_QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?", re.ASCII)


def choose_type(accept: str, offered: Sequence[str]) -> str:
    """Picks the offered media type that the Accept header likes best; of equals, the first offered.

    Args:
        accept: the header; empty: anything.
        offered: media types.

    Raises:
        BadOption: a quality is no number from 0 to 1.
        HttpOnlyError: NOT_ACCEPTABLE: none of them; the message lists them.
    """
    ranges = dict(_parse_range(part) for part in accept.split(",") if part.strip()) or {"*/*": 1.0}
    qualities = [_quality_of(media_type, ranges) for media_type in offered]
    best = max(qualities)
    if best == 0:
        raise HttpOnlyError(
            "NOT_ACCEPTABLE",
            f"Accept {accept[:200]!r} names nothing that is offered here: {', '.join(offered)}",
            {"offered": ", ".join(offered)},
        )
    return offered[qualities.index(best)]


def _parse_range(part: str) -> tuple[str, float]:
    media_range, *parameters = [piece.strip().lower() for piece in part.split(";")]
    quality = next((text.partition("=")[2].strip() for text in parameters if text.partition("=")[0].strip() == "q"), "1")
    if not _QUALITY.fullmatch(quality):
        raise BadOption(f"Accept: q={quality[:40]!r} of {media_range[:80]!r} must be a number from 0 to 1, such as 0.5")
    return media_range, float(quality)


def _quality_of(media_type: str, ranges: Mapping[str, float]) -> float:
    """Returns the quality of the most specific range that fits."""
    group = media_type.partition("/")[0]
    return next((ranges[fitting] for fitting in (media_type, f"{group}/*", "*/*") if fitting in ranges), 0.0)


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rows of one table, to be answered.

    Attributes:
        table: its name.
        dim: its dim.
        rows: the rows.
        table_steps: its step on each shard that was asked.
    """

    table: str
    dim: int
    rows: Rows
    table_steps: Mapping[int, int]

    @property
    def table_step(self) -> int:
        """The highest step of the shards that were asked."""
        return max(self.table_steps.values())

    def to_json(self) -> dict[str, Json]:
        """Returns the table's step and its rows as objects."""
        return {**self._facts(), "rows": encode_items(self.rows.to_json())}

    def tensors(self, prefix: str = "") -> dict[str, npt.NDArray[np.generic]]:
        """Returns ids, found and weight by name, and the optimizer's state if it was asked for."""
        rows = self.rows
        columns: dict[str, npt.NDArray[np.generic]] = {"ids": rows.row_ids, "found": rows.found, "weight": rows.weight}
        if rows.exp_avg is not None and rows.exp_avg_sq is not None:
            columns |= {"exp_avg": rows.exp_avg, "exp_avg_sq": rows.exp_avg_sq, "step": rows.step}
        return {f"{prefix}{name}": np.ascontiguousarray(column) for name, column in columns.items()}

    def _facts(self) -> dict[str, Json]:
        steps: dict[str, Json] = {str(shard): step for shard, step in self.table_steps.items()}
        return {"table": self.table, "dim": self.dim, "table_step": self.table_step, "table_steps": steps}

    def facts(self) -> str:
        """Returns what stands beside the rows, as JSON text."""
        return json.dumps(self._facts())


def one_table_response(media_type: str, answer: TableRows, page: Mapping[str, str | None] | None = None) -> Response:
    """Answers rows of one table.

    Args:
        media_type: one of ONE_TABLE_TYPES.
        answer: the rows.
        page: {"next_cursor": ...} if the rows are a page of a walk; None: they are not.
    """
    if media_type == JSON_TYPE:
        return _varying(JsonResponse({**answer.to_json(), **(page or {})}))
    known = {name: value for name, value in (page or {}).items() if value is not None}
    if media_type == NPY_TYPE:
        response = Response(npy_bytes(answer.rows.weight), media_type=NPY_TYPE)
    else:
        metadata = {"tables": f"[{answer.facts()}]", **known}
        response = Response(safetensors.numpy.save(answer.tensors(), metadata), media_type=media_type)
    response.headers[TABLE_STEP_HEADER] = str(answer.table_step)
    if "next_cursor" in known:
        response.headers[NEXT_CURSOR_HEADER] = known["next_cursor"]
    return _varying(response)


def many_tables_response(media_type: str, answers: Sequence[TableRows]) -> Response:
    """Answers rows of several tables; in safetensors the tensors of table t are t/ids, t/found and so on.

    Args:
        media_type: one of MANY_TABLES_TYPES.
        answers: rows by table, in the order asked for.
    """
    if media_type == JSON_TYPE:
        return _varying(JsonResponse({"tables": [answer.to_json() for answer in answers]}))
    tensors = {name: tensor for answer in answers for name, tensor in answer.tensors(f"{answer.table}/").items()}
    metadata = {"tables": f"[{', '.join(answer.facts() for answer in answers)}]"}
    return _varying(Response(safetensors.numpy.save(tensors, metadata), media_type=media_type))


def check_include(media_type: str, *, include_optimizer: bool) -> None:
    """Refuses optimizer state in a form that has no place for it.

    Raises:
        BadOption: npy with include=optimizer.
    """
    if media_type == NPY_TYPE and include_optimizer:
        raise BadOption(
            f"{NPY_TYPE} holds weights alone; leave include out, or ask for {SAFETENSORS_TYPES[0]} or {JSON_TYPE}",
            metadata={"accept": NPY_TYPE},
        )


def npy_bytes(weight: Float32s) -> bytes:
    """Returns an array as an .npy file."""
    file = io.BytesIO()
    np.save(file, weight, allow_pickle=False)
    return file.getvalue()


def _varying(response: Response) -> Response:
    response.headers["Vary"] = "Accept"  # a cache must not answer one form to who asked for another
    return response
