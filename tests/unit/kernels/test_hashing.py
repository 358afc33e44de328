"""The hashes against plain integers, and against figures that must never change: stored state depends on them."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardam_kernels.hashing import element_hashes, mix64, row_keys, table_seed, unmix64

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

UINT64 = st.integers(0, MASK)
INT64 = st.integers(-(2**63), 2**63 - 1)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@given(st.lists(UINT64, min_size=1, max_size=20))
def test_mix64_is_splitmix64_s_finalizer_and_unmix64_undoes_it(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    assert mix64(array).tolist() == [_mix(value) for value in values]
    assert unmix64(mix64(array)).tolist() == values
    assert mix64(unmix64(array)).tolist() == values


@given(UINT64, st.text(max_size=40))
def test_table_seed_mixes_the_cluster_s_seed_with_the_name(cluster_seed: int, name: str) -> None:
    expected = _mix((cluster_seed + GOLDEN * xxhash.xxh3_64_intdigest(name.encode())) & MASK)
    assert table_seed(cluster_seed, name) == expected


@given(UINT64, st.lists(INT64, min_size=1, max_size=5), st.integers(0, 2**60), st.integers(1, 20))
def test_element_hashes_are_the_upper_halves_of_the_contract_s_formula(seed: int, ids: list[int], t: int, dim: int) -> None:
    actual = element_hashes(row_keys(seed, np.array(ids, np.int64)), t, dim)
    assert actual.dtype == np.uint32
    for row, row_id in zip(actual.tolist(), ids, strict=True):
        row_key = _mix((seed + GOLDEN * _mix(row_id & MASK)) & MASK)
        assert row == [_mix(((row_key ^ _mix(t)) + GOLDEN * (column + 1)) & MASK) >> 32 for column in range(dim)]


def test_the_hashes_of_the_first_release_are_kept() -> None:
    assert mix64(np.array([1, MASK], np.uint64)).tolist() == [0x5692161D100B05E5, 0xB4D055FCF2CBBD7B]
    assert table_seed(0, "items") == 0xFAFAAAA4A81129B0
    hashes = element_hashes(row_keys(table_seed(0, "items"), np.array([-1])), 0, 3)
    assert hashes.tolist() == [[0x3667A6F4, 0xE1F062C4, 0x93279D99]]
