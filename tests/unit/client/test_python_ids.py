"""Ids handed in as Python objects: integers are taken to the last digit, all else is refused by name with a remedy."""

from __future__ import annotations

import datetime
import re
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from shardam_testing.scripted_shards import INFO

from shardam._arrays import as_row_ids
from shardam._push_checks import as_gradient
from shardam.errors import WrongIdDtype, WrongShape

EXTREMES = [2**53 + 1, -1, 0, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    "values",
    [
        np.array(EXTREMES, object),
        np.array([np.int64(value) for value in EXTREMES], object),
        [np.uint64(2**53 + 1), np.int64(-1), 0, 2**63 - 1, -(2**63)],
        tuple(EXTREMES),
        [torch.tensor(value) for value in EXTREMES],
    ],
)
def test_integers_as_objects_keep_every_digit(values: npt.ArrayLike) -> None:
    row_ids = as_row_ids(values)
    assert row_ids.dtype == np.int64
    assert row_ids.tolist() == EXTREMES


def test_objects_and_lists_keep_their_shape() -> None:
    assert as_row_ids(np.array([[1, 2], [3, 4]], object)).tolist() == [[1, 2], [3, 4]]
    assert as_row_ids(cast("npt.ArrayLike", [[np.uint64(1), -2]])).tolist() == [[1, -2]]
    assert as_row_ids(np.array([], object)).shape == (0,)
    assert as_row_ids([[], []]).shape == (2, 0)


def refusal(values: object) -> str:
    with pytest.raises(WrongIdDtype) as caught:
        as_row_ids(cast("npt.ArrayLike", values))
    return caught.value.message


@pytest.mark.parametrize(
    ("values", "got", "remedy"),
    [
        (None, "None", "[] names no row"),
        ({3, 1}, "a set", "sorted(row_ids)"),
        (frozenset({3}), "a frozenset", "sorted(row_ids)"),
        ((row_id for row_id in (1, 2)), "a generator", "list(row_ids)"),
        ({1: "a"}, "a dict", "list(row_ids) for its keys"),
        ({1: "a"}.keys(), "a dict_keys", "list(row_ids)"),
        (object(), "an object", "a list of integers"),
        ([1, "a"], "a list of int and str", "hash strings to int64"),
        ([[1], ["a"]], "a list of int and str", "hand in integers only"),
        ([1, None], "a list of NoneType and int", "leave missing ids out"),
        ([True, 2], "a list of bool and int", "a bool is no id"),
        (np.array([True, 2], object), "an object array of bool and int", "a bool is no id"),
        (np.array([True], object), "an object array of bool", "a bool is no id"),
        (np.array(["a"], object), "an object array of str", "hash strings to int64"),
        (np.array([1, 2.5], object), "an object array of float and int", "hand in integers only"),
        ([datetime.date(2026, 1, 1)], "a list of date", "map what is no integer"),
        (np.array(["2026-01-01"], "datetime64[D]"), "datetime64[D]", "np.asarray(times, 'datetime64[s]').astype(np.int64)"),
        (np.array([1], "timedelta64[ms]"), "timedelta64[ms]", "np.asarray(times, 'timedelta64[s]').astype(np.int64)"),
    ],
)
def test_what_is_no_integer_is_named_with_a_remedy(values: object, got: str, remedy: str) -> None:
    message = refusal(values)
    assert message.startswith(f"row_ids must be integers that fit int64, got {got}; ")
    assert remedy in message


def test_ragged_lists_are_refused_by_shape_in_every_call() -> None:
    for ragged in ([[1], [2, 3]], [1, [2]], [np.array([1, 2]), np.array([3])]):
        with pytest.raises(WrongShape, match=r"row_ids is a ragged list .*EmbeddingBag"):
            as_row_ids(cast("npt.ArrayLike", ragged))
        with pytest.raises(WrongShape, match="row_ids is a ragged list"):
            as_gradient(INFO, cast("npt.ArrayLike", ragged), np.zeros((2, 2), np.float32))


def test_a_list_that_numpy_cannot_read_is_refused() -> None:
    with pytest.raises(WrongIdDtype, match="got a list that NumPy cannot read"):
        as_row_ids([torch.zeros((), dtype=torch.int64, device="meta")])


@pytest.mark.parametrize("value", [10**60, -(10**5000)], ids=["60 digits", "5000 digits"])
def test_the_first_integer_outside_int64_is_named_and_shortened_when_long(value: int) -> None:
    for values in ([1, value, 2**64], np.array([1, value, 2**64], object)):
        message = refusal(values)
        assert re.search(rf"got {hex(value)[:12]}\.\.\. \(an integer of {value.bit_length()} bits\); hash ids outside", message)
        assert len(message) < 300
