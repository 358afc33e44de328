"""Distinct ids, ids by shard, and messages that are filled where they lie."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_kernels import native
from shardam_proto.routing import RouteMap

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30), max_size=80)


@given(IDS, st.integers(1, 7))
def test_distinct_ids_are_by_shard_and_places_lead_back(ids: list[int], num_shards: int) -> None:
    row_ids = np.array(ids, np.int64)
    distinct, places, ends = native.distinct_ids(row_ids, num_shards)
    assert np.array_equal(distinct[places], row_ids)
    assert len(set(distinct.tolist())) == distinct.size == len(set(ids))
    owners = RouteMap(1, num_shards).shards_of(distinct)
    assert np.array_equal(np.searchsorted(owners, np.arange(num_shards), side="right"), ends)
    assert (np.diff(owners) >= 0).all()
    first = {row_id: ids.index(row_id) for row_id in ids}
    for shard in range(num_shards):
        appearances = [first[row_id] for row_id in distinct[owners == shard].tolist()]
        assert appearances == sorted(appearances)


@given(IDS, st.sampled_from([1, 2, 5, 4096]))
def test_a_split_is_that_of_the_route_map_and_keeps_what_lies_right(ids: list[int], num_shards: int) -> None:
    row_ids = np.array(ids, np.int64)
    owners = RouteMap(1, num_shards).shards_of(row_ids)
    order, ends = native.split_by_shard(row_ids, num_shards)
    expected = np.argsort(owners, kind="stable")
    assert np.array_equal(np.searchsorted(owners[expected], np.arange(num_shards), side="right"), ends)
    if order is None:
        assert np.array_equal(expected, np.arange(row_ids.size))
    else:
        assert np.array_equal(order, expected)
        assert not np.array_equal(order, np.arange(row_ids.size))


def test_ids_of_one_shard_are_checked_for_duplicates_as_quickly_as_any() -> None:
    every, _, ends = native.distinct_ids(np.arange(4_000_000), 64)
    mine = every[: ends[0]]  # they share the upper bits of their hash
    assert mine.size > 60_000
    gradients = np.zeros((mine.size, 1), np.float32)
    started = time.process_time()
    assert native.is_merged(mine, gradients, 1.0)
    assert not native.is_merged(np.append(mine, mine[-1]), np.zeros((mine.size + 1, 1), np.float32), 1.0)
    assert time.process_time() - started < 0.5, "by their upper bits it takes 2 s or more, by others 2 ms"


def test_payloads_are_written_into_the_message_itself() -> None:
    message, (first, second) = native.new_message([b"ab", b"c"], [3, 2])
    first[:] = np.frombuffer(b"xyz", np.uint8)
    second[:] = np.frombuffer(b"uv", np.uint8)
    assert message == b"abxyzcuv"
    del message
    assert bytes(first) == b"xyz"  # a payload keeps its message


@pytest.mark.parametrize("num_shards", [0, -1, 4097])
def test_a_number_of_shards_out_of_range_is_refused(num_shards: int) -> None:
    with pytest.raises(ValueError, match=f"num_shards must be 1 to 4096, got {num_shards}"):
        native.distinct_ids(np.zeros(3, np.int64), num_shards)
    with pytest.raises(ValueError, match=f"num_shards must be 1 to 4096, got {num_shards}"):
        native.split_by_shard(np.zeros(3, np.int64), num_shards)
