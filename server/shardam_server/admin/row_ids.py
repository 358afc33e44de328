"""Row ids as they stand in URLs and JSON: decimal int64 strings, so that no reader rounds them to a double."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardam_proto.errors import TooManyIds, WrongIdDtype

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

MAX_EXACT_JSON_INTEGER = 2**53
"""Up to here every JSON reader and writer keeps an integer exact; beyond, a double may have rounded it before it was sent."""

_DECIMAL = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_MAX_DIGITS = len(str(INT64_MIN))  # longer texts are no int64, and Python refuses to convert 5,000 digits
_MAX_SHOWN = 40  # characters of a bad id that a message repeats

REMEDY = "send an id as a decimal int64 string such as 5 or -1"


def parse_row_id(text: str) -> int:
    """Reads an id from a URL or a JSON string.

    Args:
        text: an int64 in canonical decimal form: no plus sign, no leading zeros, no spaces, no exponent.

    Raises:
        WrongIdDtype: the text is no such number.
    """
    if not _DECIMAL.fullmatch(text):
        raise _refused(text, "is no decimal integer")
    if len(text) > _MAX_DIGITS or not INT64_MIN <= int(text) <= INT64_MAX:
        raise _refused(text, "does not fit int64" + _twin(text))
    return int(text)


def parse_row_ids(values: Sequence[object], limit: int) -> npt.NDArray[np.int64]:
    """Reads the ids of a JSON array: strings, or integers that no double can have rounded.

    Args:
        values: the array's items as the JSON reader gave them.
        limit: ids that one request may name.

    Returns:
        int64 [N], in the order of `values`.

    Raises:
        TooManyIds: there are more than `limit`.
        WrongIdDtype: an item is neither an int64 string nor an exact integer.
    """
    check_num_ids(len(values), limit)
    return np.fromiter((_parse_item(value) for value in values), dtype=np.int64, count=len(values))


def check_num_ids(num_ids: int, limit: int) -> None:
    """Refuses a request that names too many ids.

    Raises:
        TooManyIds: there are more than `limit`.
    """
    if num_ids > limit:
        raise TooManyIds(
            f"a request may name at most {limit} ids, got {num_ids}; split it into several requests",
            metadata={"limit": str(limit), "num_ids": str(num_ids)},
        )


def _parse_item(value: object) -> int:
    if isinstance(value, str):
        return parse_row_id(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(repr(value), f"is a JSON {_json_type(value)}")
    if abs(value) > MAX_EXACT_JSON_INTEGER:
        raise _refused(_digits(value), "as a JSON number may have been rounded on its way (beyond 2**53)")
    return value


def _digits(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case float():
            return "number with a fraction or an exponent"
        case dict():
            return "object"
        case list():
            return "array"
        case _:
            return type(value).__name__


def _twin(text: str) -> str:
    """Says which id has the same 64 bits, for ids that were hashed to uint64."""
    if len(text) <= _MAX_DIGITS and INT64_MAX < int(text) < 2**64:
        return f"; as a uint64 its 64 bits are the id {int(text) - 2**64} (subtract 2**64)"
    return ""


def _refused(text: str, why: str) -> WrongIdDtype:
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
    return WrongIdDtype(f"row id {shown!r} {why}; {REMEDY}", metadata={"row_id": shown})
