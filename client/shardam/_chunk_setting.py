"""How large the messages are in which rows travel: a setting of the process, read when a client is opened."""

from __future__ import annotations

import os
import re

from shardam_proto.errors import BadOption

CHUNK_VARIABLE = "SHARDAM_CHUNK_KIB"

MIN_CHUNK_KIB = 64
"""Below, the cost of a message is above that of its bytes."""

MAX_CHUNK_KIB = 4096
"""Above, a message holds up those behind it for longer than a step takes, and nothing is gained."""

DEFAULT_CHUNK_BYTES = 2**21
"""Bytes of ids and rows in one message of a push or of an answer, where the variable is not set: the quickest of a sweep from
64 KiB to 4 MiB over a real shard (docs/performance.md)."""


def chunk_bytes() -> int:
    """Returns the bytes of ids and rows in one message.

    Raises:
        BadOption: the variable is set to no number from 64 to 4096.
    """
    text = os.environ.get(CHUNK_VARIABLE)
    if text is None:
        return DEFAULT_CHUNK_BYTES
    if not re.fullmatch("[0-9]{1,9}", text) or not MIN_CHUNK_KIB <= int(text) <= MAX_CHUNK_KIB:
        raise BadOption(
            f"{CHUNK_VARIABLE} must be a number of KiB from {MIN_CHUNK_KIB} to {MAX_CHUNK_KIB}, got {text!r}; unset it to use "
            f"{DEFAULT_CHUNK_BYTES // 1024}"
        )
    return int(text) * 1024
