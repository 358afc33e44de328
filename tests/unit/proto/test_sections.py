"""Sections and steps encoded from columns: the bytes that protobuf makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_kernels import native
from shardam_proto.sections import SECTIONS_FIELD, STEPS_FIELD, section_columns, step_columns
from shardam_proto.v1 import common_pb2, embedding_pb2

U64 = st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.sampled_from([2**7, 2**14 - 1, 2**14, 2**63])
U32 = st.integers(0, 2**32 - 1) | st.integers(0, 300)


@given(st.lists(st.tuples(U64, U64, U32), max_size=40))
def test_sections_are_encoded_as_protobuf_does(rows: list[tuple[int, int, int]]) -> None:
    message = embedding_pb2.PushRequest()
    for table_id, num_rows, options_index in rows:
        message.sections.add(table_id=table_id, num_rows=num_rows, options_index=options_index, dtype=common_pb2.DTYPE_FLOAT32)
    columns = [[row[place] for row in rows] for place in range(3)]
    assert native.encode_messages(SECTIONS_FIELD, section_columns(*columns)) == message.SerializeToString()
    for section in message.sections:
        section.options_index = 0
    assert native.encode_messages(SECTIONS_FIELD, section_columns(*columns[:2])) == message.SerializeToString()


@given(st.lists(st.tuples(U64, U64), max_size=40))
def test_steps_are_encoded_as_protobuf_does(rows: list[tuple[int, int]]) -> None:
    message = embedding_pb2.PullResponse()
    for table_id, table_step in rows:
        message.steps.add(table_id=table_id, table_step=table_step)
    columns = step_columns([row[0] for row in rows], [row[1] for row in rows])
    assert native.encode_messages(STEPS_FIELD, columns) == message.SerializeToString()


def test_eleven_columns_of_the_longest_varints_have_a_length_of_one_byte() -> None:
    column = np.full(2, 2**64 - 1, np.uint64)
    encoded = native.encode_messages(15, [(field << 3, column) for field in range(1, 12)])
    assert len(encoded) == 2 * (2 + 11 * 11)
    assert encoded[:2] == bytes([15 << 3 | 2, 121])


@pytest.mark.parametrize(
    ("field", "tags", "lengths"),
    [(0, [8], [1]), (16, [8], [1]), (1, [], []), (1, [8] * 12, [1] * 12), (1, [7], [1]), (1, [128], [1]), (1, [10], [1]),
     (1, [8, 16], [1, 2])],
)  # fmt: skip
def test_what_does_not_fit_the_encoding_is_refused(field: int, tags: list[int], lengths: list[int]) -> None:
    columns = [(tag, np.ones(length, np.uint64)) for tag, length in zip(tags, lengths, strict=True)]
    with pytest.raises(ValueError, match=r"field|columns|tag|length"):
        native.encode_messages(field, columns)


def test_columns_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError):
        native.encode_messages(1, [(8, np.ones(1, np.float32))])
