"""JSON of rows is strict, keeps every float32, and spells out what JSON cannot write."""

from __future__ import annotations

import json
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_server.admin.encoding import encode, encode_items, float32_values, number


def strict_loads(text: bytes) -> object:
    def refuse(token: str) -> NoReturn:
        raise AssertionError(f"{token} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.integers(0, 2**32 - 1))
def test_every_finite_float32_reads_back_to_the_same_bits(bits: int) -> None:
    values = np.array([bits], np.uint32).view(np.float32)
    if not np.isfinite(values[0]):
        return
    for finite in (True, False):  # the array's own encoder, and the one that goes value by value
        read = strict_loads(encode(float32_values(values, finite=finite)))
        assert np.array(read, np.float64).astype(np.float32).view(np.uint32).tolist() == [bits]


def test_random_rows_read_back_to_the_same_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    read = strict_loads(encode(float32_values(values, finite=True)))
    np.testing.assert_array_equal(np.array(read).astype(np.float32).view(np.uint32), values.view(np.uint32))


@pytest.mark.case("C124")
def test_non_finite_values_are_told_apart_as_strings() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.1], np.float32)
    assert encode(float32_values(values, finite=False)) == b'["NaN","Infinity","-Infinity",0.1]'
    assert [number(float("nan")), number(float("-inf")), number(0.1)] == ["NaN", "-Infinity", 0.1]


def test_items_are_one_array() -> None:
    assert encode({"rows": encode_items([{"a": 1}, {"b": np.zeros(2, np.float32)}])}) == b'{"rows":[{"a":1},{"b":[0.0,0.0]}]}'
    assert encode({"rows": encode_items([])}) == b'{"rows":[]}'
