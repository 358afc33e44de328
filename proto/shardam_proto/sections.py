"""Sections and steps of a message that may name thousands of tables, as columns, without an object for each of them.

What native.encode_messages of shardam_kernels makes of them is what protobuf makes of Section and TableStep (common.proto).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardam_proto.v1 import common_pb2

SECTIONS_FIELD = 3
"""Number of the field `sections` in every message that carries rows."""

STEPS_FIELD = 2
"""Number of the field `steps` in the answers that carry rows."""

Columns = list[tuple[int, npt.NDArray[np.uint64]]]
"""Of each field its tag (number << 3 | wire type), and its value in each message; a zero is left out."""

_VARINT, _FIXED64 = 0, 1
"""Wire types of protobuf's encoding."""

_TABLE_ID = 1 << 3 | _FIXED64
_NUM_ROWS = 2 << 3 | _VARINT
_OPTIONS_INDEX = 3 << 3 | _VARINT
_DTYPE = 4 << 3 | _VARINT
_TABLE_STEP = 2 << 3 | _VARINT
"""Tags of the fields of Section and TableStep."""


def section_columns(table_ids: Sequence[int], num_rows: Sequence[int], options_indexes: Sequence[int] = ()) -> Columns:
    """Returns the columns of sections of float32 rows.

    Args:
        table_ids: of each section its table.
        num_rows: its rows.
        options_indexes: its position in a push's options; none: zero for all.
    """
    columns = [(_TABLE_ID, np.array(table_ids, np.uint64)), (_NUM_ROWS, np.array(num_rows, np.uint64))]
    if options_indexes:
        columns.append((_OPTIONS_INDEX, np.array(options_indexes, np.uint64)))
    return [*columns, (_DTYPE, np.full(len(table_ids), common_pb2.DTYPE_FLOAT32, np.uint64))]


def step_columns(table_ids: Sequence[int], table_steps: Sequence[int]) -> Columns:
    """Returns the columns of steps.

    Args:
        table_ids: the tables.
        table_steps: the step of each.
    """
    return [(_TABLE_ID, np.array(table_ids, np.uint64)), (_TABLE_STEP, np.array(table_steps, np.uint64))]
