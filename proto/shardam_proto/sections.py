"""Sections and steps of a message that may name thousands of tables, encoded from columns, without an object for each of them.

The bytes are those that protobuf makes of the messages Section and TableStep (common.proto).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardam_kernels import native
from shardam_proto.v1 import common_pb2

SECTIONS_FIELD = 3
"""Number of the field `sections` in every message that carries rows."""

STEPS_FIELD = 2
"""Number of the field `steps` in the answers that carry rows."""

_VARINT, _FIXED64 = 0, 1
"""Wire types of protobuf's encoding."""

_TABLE_ID = 1 << 3 | _FIXED64
_NUM_ROWS = 2 << 3 | _VARINT
_OPTIONS_INDEX = 3 << 3 | _VARINT
_DTYPE = 4 << 3 | _VARINT
_TABLE_STEP = 2 << 3 | _VARINT
"""Tags of the fields of Section and TableStep."""


def encode_sections(table_ids: Sequence[int], num_rows: Sequence[int], options_indexes: Sequence[int] = ()) -> bytes:
    """Encodes the field `sections`, of float32 rows.

    Args:
        table_ids: of each section its table.
        num_rows: its rows.
        options_indexes: its position in a push's options; none: zero for all.
    """
    columns = [(_TABLE_ID, np.array(table_ids, np.uint64)), (_NUM_ROWS, np.array(num_rows, np.uint64))]
    if options_indexes:
        columns.append((_OPTIONS_INDEX, np.array(options_indexes, np.uint64)))
    columns.append((_DTYPE, np.full(len(table_ids), common_pb2.DTYPE_FLOAT32, np.uint64)))
    return native.encode_messages(SECTIONS_FIELD, columns)


def encode_steps(table_ids: Sequence[int], table_steps: Sequence[int]) -> bytes:
    """Encodes the field `steps`.

    Args:
        table_ids: the tables.
        table_steps: the step of each.
    """
    columns = [(_TABLE_ID, np.array(table_ids, np.uint64)), (_TABLE_STEP, np.array(table_steps, np.uint64))]
    return native.encode_messages(STEPS_FIELD, columns)
