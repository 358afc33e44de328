"""Row indexes against a dict, for any ids and any order of calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardam_kernels.hashing import mix64, unmix64
from shardam_kernels.native import ArrayIndex, HashIndex, RowIndex
from shardam_proto.routing import buckets_of

BOUND = 50

Int64s = npt.NDArray[np.int64]


class Driver:
    """An index beside the dict that it should equal."""

    def __init__(self, index: RowIndex) -> None:
        self.index = index
        self.slots: dict[int, int] = {}
        self.most_rows = 0

    def insert(self, row_ids: list[int]) -> None:
        ids = np.array(row_ids, np.int64)
        out_slots, out_is_new = np.full(len(ids), -9, np.int64), np.full(len(ids), 9, np.uint8)
        new = list(dict.fromkeys(row_id for row_id in row_ids if row_id not in self.slots))
        assert self.index.insert(ids, out_slots, out_is_new) == len(new)
        for row_id, slot, is_new in zip(row_ids, out_slots.tolist(), out_is_new.tolist(), strict=True):
            assert is_new == (row_id not in self.slots)
            if is_new:
                assert slot not in self.slots.values()
                self.slots[row_id] = slot
            assert slot == self.slots[row_id]
        self.most_rows = max(self.most_rows, len(self.slots))

    def remove(self, row_ids: list[int]) -> None:
        ids = np.array(row_ids, np.int64)
        out_slots = np.full(len(ids), -9, np.int64)
        removed = self.index.remove(ids, out_slots)
        expected = [self.slots.pop(row_id, -1) for row_id in row_ids]
        assert out_slots.tolist() == expected
        assert removed == sum(slot >= 0 for slot in expected)

    def check(self, row_ids: list[int]) -> None:
        ids = np.array(row_ids, np.int64)
        out_slots = np.full(len(ids), -9, np.int64)
        expected = [self.slots.get(row_id, -1) for row_id in row_ids]
        assert self.index.lookup(ids, out_slots) == sum(slot >= 0 for slot in expected)
        assert out_slots.tolist() == expected
        assert len(self.index) == len(self.slots)
        assert self.index.num_slots == self.most_rows, "freed slots are given again before new ones"

    def check_scan(self, max_rows: int) -> None:
        rows = scan_all(self.index, max_rows)
        assert dict(rows) == self.slots
        assert len(rows) == len(self.slots)


def scan_all(index: RowIndex, max_rows: int) -> list[tuple[int, int]]:
    """All (row id, slot) pairs, page by page."""
    rows: list[tuple[int, int]] = []
    key: int | None = 0
    while key is not None:
        row_ids, slots, key = index.scan(key, max_rows)
        assert len(row_ids) == len(slots) <= max_rows
        assert key is None or len(row_ids) == max_rows
        rows += zip(row_ids.tolist(), slots.tolist(), strict=True)
    return rows


EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**32 + 3, 3]
# Ids whose mixed ids are close together, at the low end, in the middle and at the very end of the order.
CROWDED = unmix64(np.array([0, 1, 2, 3, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2, 2**64 - 3], np.uint64)).view(np.int64).tolist()

any_ids = st.lists(st.one_of(st.sampled_from(EDGES + CROWDED), st.integers(-(2**63), 2**63 - 1)), max_size=40)
bounded_ids = st.lists(st.integers(0, BOUND - 1), max_size=40)


def calls(ids: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    return st.lists(st.tuples(st.sampled_from(["insert", "insert", "remove", "check"]), ids), max_size=12)


def _run(index: RowIndex, steps: list[tuple[str, list[int]]], max_rows: int) -> None:
    driver = Driver(index)
    for call, row_ids in steps:
        getattr(driver, call)(row_ids)
        driver.check(list(driver.slots) + row_ids)
    driver.check_scan(max_rows)


@settings(max_examples=300)
@given(calls(any_ids), st.integers(1, 50))
def test_a_hash_index_is_a_dict_for_any_ids(steps: list[tuple[str, list[int]]], max_rows: int) -> None:
    _run(HashIndex(), steps, max_rows)


@settings(max_examples=200)
@given(calls(bounded_ids), st.integers(1, 50))
def test_an_array_index_is_a_dict_for_bounded_ids(steps: list[tuple[str, list[int]]], max_rows: int) -> None:
    _run(ArrayIndex(BOUND), steps, max_rows)


@pytest.mark.parametrize("make", [HashIndex, lambda: ArrayIndex(400_000)])
def test_growth_and_reuse_of_slots_over_many_rows(make: Callable[[], RowIndex]) -> None:
    rng = np.random.default_rng(0)
    index = make()
    alive: dict[int, int] = {}
    for _ in range(12):
        row_ids = rng.integers(0, 400_000, 30_000)
        slots, is_new = np.empty_like(row_ids), np.empty(len(row_ids), np.uint8)
        index.insert(row_ids, slots, is_new)
        alive.update(zip(row_ids.tolist(), slots.tolist(), strict=True))
        gone = rng.choice(row_ids, 8_000)
        index.remove(gone, np.empty_like(gone))
        for row_id in gone.tolist():
            alive.pop(row_id, None)
    assert dict(scan_all(index, 10_000)) == alive
    assert len(set(alive.values())) == len(alive)


@pytest.mark.parametrize("end", [2**64 - 1, 2**52 - 1, 5000])
def test_thousands_of_ids_that_share_one_home_are_kept_apart(end: int) -> None:
    mixed = np.array([end - k for k in range(4000)], np.uint64)
    row_ids = np.random.default_rng(0).permutation(unmix64(mixed).view(np.int64))
    driver = Driver(HashIndex())
    driver.insert(row_ids.tolist())
    driver.check(row_ids.tolist())
    driver.remove(row_ids[::2].tolist())
    driver.check(row_ids.tolist())
    driver.check_scan(100)


def ids_of_a_shard(num_rows: int, index: int, num_shards: int) -> Int64s:
    """Ids in the index's order, all of the one range of mixed ids that a shard has."""
    width = 2**64 // num_shards
    mixed = np.unique(np.random.default_rng(2).integers(index * width, (index + 1) * width - 1, num_rows, np.uint64))
    return unmix64(mixed).view(np.int64)


@pytest.mark.parametrize("order", ["as they come", "ascending", "descending", "reserved"])
@pytest.mark.parametrize("index", [0, 3, 7])
def test_the_ids_of_one_shard_among_many_are_found_as_quickly_as_those_of_all(index: int, order: str) -> None:
    row_ids = ids_of_a_shard(200_000, index, 8)  # for minutes, where they are spread as if they were of all shards
    expected = dict(zip(row_ids.tolist(), range(row_ids.size), strict=True))
    if order == "as they come":
        row_ids = np.random.default_rng(3).permutation(row_ids)
    elif order == "descending":
        row_ids = row_ids[::-1].copy()
    found = HashIndex()
    if order == "reserved":
        found.reserve(row_ids.size)
    for start in range(0, row_ids.size, 10_000):
        some = row_ids[start : start + 10_000]
        found.insert(some, np.empty_like(some), np.empty(some.size, np.uint8))
    found.spread()
    slots = np.empty_like(row_ids)
    assert found.lookup(row_ids, slots) == row_ids.size
    assert np.unique(slots).size == row_ids.size
    scanned = np.array([row_id for row_id, _ in scan_all(found, 50_000)])
    assert scanned.tolist() == list(expected)


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 2**64 - 2**20),
    width_bits=st.integers(9, 20),
    seed=st.integers(0, 2**32),
    outside=any_ids,
)
def test_a_hash_index_is_a_dict_for_ids_of_a_narrow_range_and_some_others(
    start: int, width_bits: int, seed: int, outside: list[int]
) -> None:
    rng, index = np.random.default_rng(seed), HashIndex()
    driver = Driver(index)
    for _ in range(6):
        mixed = np.uint64(start) + rng.integers(0, 2**width_bits, 120, np.uint64)
        row_ids = unmix64(mixed).view(np.int64).tolist()
        driver.insert(row_ids + outside)
        driver.remove(row_ids[::3])
        index.spread()
        driver.check(list(driver.slots) + row_ids)
    driver.check_scan(37)


def test_a_scan_of_a_hash_index_follows_the_mixed_id_so_that_buckets_are_contiguous() -> None:
    index = HashIndex()
    row_ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    index.insert(row_ids, np.empty_like(row_ids), np.empty(len(row_ids), np.uint8))
    scanned = np.array([row_id for row_id, _ in scan_all(index, 777)], np.int64)
    assert (np.diff(mix64(scanned.view(np.uint64)).astype(object)) > 0).all()
    assert (np.diff(buckets_of(scanned)) >= 0).all()
    first, _, _ = index.scan(17 << 52, 1)
    assert first.tolist() == scanned[buckets_of(scanned) >= 17][:1].tolist()


@pytest.mark.parametrize("make", [HashIndex, lambda: ArrayIndex(10**6)])
def test_rows_that_exist_throughout_a_scan_are_met_exactly_once_while_others_come_and_go(make: Callable[[], RowIndex]) -> None:
    rng = np.random.default_rng(1)
    index = make()
    stay = np.arange(0, 10_000, 2)

    def insert(row_ids: Int64s) -> None:
        index.insert(row_ids, np.empty_like(row_ids), np.empty(len(row_ids), np.uint8))

    insert(stay)
    seen: list[int] = []
    key: int | None = 0
    while key is not None:
        row_ids, _, key = index.scan(key, 300)
        seen += row_ids.tolist()
        insert(rng.integers(0, 200_000, 2_000) * 2 + 1)  # odd ids; the index grows several times meanwhile
        index.remove(np.arange(1, 10_000, 2), np.empty(5_000, np.int64))
    counts = dict.fromkeys(stay.tolist(), 0)
    for row_id in seen:
        if row_id in counts:
            counts[row_id] += 1
    assert set(counts.values()) == {1}


def test_a_large_sparse_array_index_is_scanned_by_skipping_empty_ranges_and_costs_no_resident_memory() -> None:
    index = ArrayIndex(2**33)  # 64 GiB if it were resident
    row_ids = np.array([2**33 - 1, 0, 2**32 + 5], np.int64)
    index.insert(row_ids, np.empty(3, np.int64), np.empty(3, np.uint8))
    assert [row_id for row_id, _ in scan_all(index, 2)] == [0, 2**32 + 5, 2**33 - 1]


@pytest.mark.case("C030")
@pytest.mark.parametrize("bad", [10, 11, -1, 2**40, -(2**63)])
def test_an_id_out_of_bounds_is_named_and_nothing_has_changed(bad: int) -> None:
    index = ArrayIndex(10)
    row_ids = np.array([9, 3, bad], np.int64)
    out, is_new = np.empty(3, np.int64), np.empty(3, np.uint8)
    attempts: list[Callable[[], int]] = [
        lambda: index.insert(row_ids, out, is_new),
        lambda: index.lookup(row_ids, out),
        lambda: index.remove(row_ids, out),
    ]
    for attempt in attempts:
        with pytest.raises(IndexError, match=f"row id {bad} lies outside 0 to 9"):
            attempt()
    assert len(index) == 0
    assert index.insert(row_ids[:2], out[:2], is_new[:2]) == 2


@pytest.mark.case("C033")
def test_ids_that_agree_in_their_lower_32_bits_are_different_rows() -> None:
    index = HashIndex()
    slots = np.empty(2, np.int64)
    assert index.insert(np.array([3, 2**32 + 3]), slots, np.empty(2, np.uint8)) == 2
    assert slots[0] != slots[1]


def test_after_reserve_inserting_that_many_ids_needs_no_memory() -> None:
    index = HashIndex()
    index.reserve(100_000)
    reserved = index.memory_bytes
    row_ids = np.arange(100_000)
    index.insert(row_ids, np.empty_like(row_ids), np.empty(len(row_ids), np.uint8))
    assert index.memory_bytes == reserved


def test_a_reservation_that_no_machine_can_hold_is_a_memory_error_and_changes_nothing() -> None:
    driver = Driver(HashIndex())
    driver.insert(EDGES)
    for num_new in (2**45, 2**61, 2**63 - 1):
        with pytest.raises(MemoryError):
            driver.index.reserve(num_new)
    driver.check(EDGES)
    with pytest.raises(MemoryError):
        ArrayIndex(2**62)


def test_calls_that_make_no_sense_are_refused() -> None:
    index = HashIndex()
    ids, slots = np.arange(3), np.empty(2, np.int64)
    with pytest.raises(ValueError, match="out_slots has length 2, row_ids has 3"):
        index.lookup(ids, slots)
    with pytest.raises(ValueError, match="out_is_new has length 1"):
        index.insert(ids, np.empty(3, np.int64), np.empty(1, np.uint8))
    with pytest.raises(ValueError, match="num_new must not be negative, got -1"):
        index.reserve(-1)
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        index.scan(0, 0)
    with pytest.raises(ValueError, match="num_embeddings must be at least 1, got 0"):
        ArrayIndex(0)
    with pytest.raises(TypeError):
        index.lookup(ids.astype(np.int32), np.empty(3, np.int64))
