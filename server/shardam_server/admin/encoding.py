"""JSON of rows: float32 values that read back to the same float32, non-finite ones spelled out, ids as strings.

orjson prints the shortest decimals of a float32 but writes NaN as null; so arrays with non-finite values go through lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import orjson
from starlette.responses import Response

JSON_TYPE = "application/json"

Float32s = npt.NDArray[np.float32]
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | Float32s | orjson.Fragment
"""What `encode` takes; a float32 array must be finite (see `float32_values`)."""


def float32_values(values: Float32s, *, finite: bool) -> Json:
    """Returns float32 [dim] in a form that `encode` prints exactly.

    Args:
        values: float32 [dim].
        finite: no value is NaN or infinite, as the caller has found for many rows at once.
    """
    if finite:
        return np.ascontiguousarray(values)
    return [number(value) for value in values]


def number(value: np.float32 | float) -> Json:
    """Returns a finite value as it is, and "NaN", "Infinity" or "-Infinity" for the others."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, np.float32):
        return orjson.Fragment(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    return float(value)


def encode(value: Json) -> bytes:
    """Returns the UTF-8 JSON text."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_items(items: Iterable[Json]) -> orjson.Fragment:
    """Encodes a long array item by item, so that other threads get the interpreter between two of them."""
    return orjson.Fragment(b"[" + b",".join(encode(item) for item in items) + b"]")


class JsonResponse(Response):
    """A response whose body was encoded by `encode`.

    Args:
        content: the value.
        status_code: HTTP status.
        headers: further headers.
        media_type: content type.
    """

    media_type = JSON_TYPE

    def render(self, content: Json) -> bytes:
        """Encodes the body, in the endpoint's thread rather than in the event loop."""
        return encode(content)
