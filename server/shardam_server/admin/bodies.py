"""What is wrong with a request body that is no JSON, in words; FastAPI says it by position or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

JSON_REMEDY = "send Content-Type: application/json"


def explain_content_type(content_type: str | None) -> str:
    """Says that the body was not read as JSON because of its declared type; None: the request has none."""
    sent = "the request has no Content-Type" if content_type is None else f"the request's Content-Type is {content_type!r}"
    return f"{sent}, so its body is not read as JSON; {JSON_REMEDY}"


def explain_malformed(error: Mapping[str, object]) -> str:
    """Says where JSON ends to be JSON.

    Args:
        error: what FastAPI found, of type json_invalid: `loc` ends with the position, `ctx` has the decoder's words.
    """
    location, context = error["loc"], error.get("ctx")
    position = location[-1] if isinstance(location, tuple) else "?"
    why = context.get("error") if isinstance(context, Mapping) else error["msg"]
    return f"the body is no JSON (at character {position}): {why}"


def explain_unreadable(cause: BaseException | None) -> str | None:
    """Says why a body could not be read at all; None: the cause is no body's.

    Args:
        cause: what the JSON decoder raised, other than json.JSONDecodeError.
    """
    match cause:
        case UnicodeDecodeError(start=start, reason=reason):
            return f"the body is no UTF-8 (at byte {start}): {reason}"
        case RecursionError():
            return "the body's arrays or objects are nested too deeply; none of the API's bodies needs more than a few levels"
        case json.JSONDecodeError():
            return None
        case ValueError():  # the one other thing that Python's decoder refuses
            limit = sys.get_int_max_str_digits()
            return f'a number in the body has too many digits (more than {limit}); send ids as decimal strings such as "5"'
        case _:
            return None
