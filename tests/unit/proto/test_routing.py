"""Which shard owns a row: the same everywhere, and even."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto.registry import route_map_from_json, route_map_to_json
from shardam_proto.routing import NUM_BUCKETS, RouteMap, buckets_of

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, min_size=1), st.integers(1, NUM_BUCKETS))
def test_every_id_has_one_owner_within_range(row_ids: list[int], num_shards: int) -> None:
    owners = RouteMap(1, num_shards).shards_of(np.array(row_ids, np.int64))
    assert ((owners >= 0) & (owners < num_shards)).all()


@given(INT64)
def test_a_bucket_is_the_top_12_bits_of_the_mixed_id(row_id: int) -> None:
    mask = 2**64 - 1
    mixed = row_id & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    assert buckets_of(np.array([row_id], np.int64))[0] == mixed >> 52


@given(st.integers(1, 64))
def test_shards_own_ranges_of_buckets_that_differ_by_at_most_one(num_shards: int) -> None:
    buckets = np.arange(NUM_BUCKETS)
    owners = (buckets * num_shards) // NUM_BUCKETS
    assert (np.diff(owners) >= 0).all()
    counts = np.bincount(owners, minlength=num_shards)
    assert counts.max() - counts.min() <= 1


@pytest.mark.case("C049")
@pytest.mark.parametrize("num_shards", [2, 3, 7])
@pytest.mark.parametrize("kind", ["sequential", "even", "multiples of the shard count"])
def test_regular_ids_spread_over_the_shards_within_ten_percent(kind: str, num_shards: int) -> None:
    factor = {"sequential": 1, "even": 2, "multiples of the shard count": num_shards}[kind]
    row_ids = np.arange(1_000_000, dtype=np.int64) * factor
    counts = np.bincount(RouteMap(1, num_shards).shards_of(row_ids), minlength=num_shards)
    assert counts.max() / counts.min() < 1.1


@pytest.mark.case("C050")
@pytest.mark.case("C032")
def test_processes_with_different_hash_seeds_agree_on_owners() -> None:
    program = (
        "import json, numpy as np; from shardam_proto.routing import RouteMap;"
        "ids = np.array([-5, 2**63 - 1, -2**63, -1, 0, 2**53 + 1], np.int64);"
        "print(json.dumps(RouteMap(1, 3).shards_of(ids).tolist()))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    owners = json.loads(answers.pop())
    assert all(0 <= owner < 3 for owner in owners)
    unsigned = np.array([2**63, 2**64 - 1], np.uint64).view(np.int64)  # the signed twins are the same rows
    assert unsigned.tolist() == [-(2**63), -1]
    assert RouteMap(1, 3).shards_of(unsigned).tolist() == owners[2:4]


def test_a_route_map_keeps_its_version_and_refuses_an_unknown_one() -> None:
    route_map = RouteMap(epoch=3, num_shards=5)
    assert route_map_from_json(route_map_to_json(route_map)) == route_map
    text = route_map_to_json(route_map).replace('"version": 1', '"version": 2')
    with pytest.raises(ValueError, match="routing version 2"):
        route_map_from_json(text)
    with pytest.raises(ValueError, match="num_shards"):
        RouteMap(1, 0)
