"""Ids in URLs and JSON are exact int64s or refused with ID_DTYPE."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto.errors import TooManyIds, WrongIdDtype
from shardam_server.admin.row_ids import INT64_MAX, INT64_MIN, parse_row_id, parse_row_ids


@given(st.integers(INT64_MIN, INT64_MAX))
def test_every_int64_reads_back_from_its_decimal_text(row_id: int) -> None:
    assert parse_row_id(str(row_id)) == row_id
    assert parse_row_ids([str(row_id)], 1).tolist() == [row_id]


@pytest.mark.case("C127")
@pytest.mark.parametrize(
    "text",
    [
        "abc",
        "1e3",
        " ",
        "",
        "92233720368547760001",
        "1" * 5000,
        "-" + "1" * 5000,
        "+5",
        "05",
        "-0",
        "1.0",
        "0x1",
        "5 ",
        "५",
        "--1",
    ],
)
def test_a_text_that_is_no_canonical_int64_is_refused(text: str) -> None:
    with pytest.raises(WrongIdDtype) as caught:
        parse_row_id(text)
    assert "decimal int64 string" in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.case("C032")
@pytest.mark.parametrize(("text", "twin"), [(str(2**63), INT64_MIN), (str(2**64 - 1), -1)])
def test_an_unsigned_id_is_refused_and_the_message_maps_it(text: str, twin: int) -> None:
    with pytest.raises(WrongIdDtype, match=f"its 64 bits are the id {twin} "):
        parse_row_id(text)


@pytest.mark.case("C038")
@pytest.mark.parametrize("value", [1.0, 6221888200042590280.0, True, None, [1], {"id": 1}, float("nan")])
def test_a_json_item_that_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(WrongIdDtype):
        parse_row_ids([value], 10)


def test_json_integers_are_taken_while_every_reader_keeps_them_exact() -> None:
    assert parse_row_ids([2**53, -(2**53), 0], 3).tolist() == [2**53, -(2**53), 0]
    for value in (2**53 + 1, -(2**53) - 1, 10**4000):
        with pytest.raises(WrongIdDtype, match="rounded") as caught:
            parse_row_ids([value], 1)
        assert len(caught.value.message) < 300


def test_the_limit_is_named_when_there_are_too_many_ids() -> None:
    with pytest.raises(TooManyIds, match="at most 3 ids, got 4"):
        parse_row_ids(json.loads('["1","2","3","4"]'), 3)
