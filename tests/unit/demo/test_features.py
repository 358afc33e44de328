"""Row ids, buckets, calendar fields, scaling and the test split of the demo."""

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardam.demo.features import age_bucket, hour_and_weekday, last_tenth, last_tenth_per_user, row_id, scale_dense


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_int64_in_decimal_is_its_own_row_id(value: int) -> None:
    assert row_id(str(value)) == value


@pytest.mark.parametrize(
    "text", ["", "007", "-0", "+5", "1e3", "9223372036854775808", "-9223372036854775809", "851x", "²", "٣", "-"]
)
def test_any_other_text_is_hashed_to_an_int64(text: str) -> None:
    hashed = xxhash.xxh3_64_intdigest(text.encode())
    assert row_id(text) % 2**64 == hashed
    assert -(2**63) <= row_id(text) < 2**63


def test_a_hashed_row_id_is_the_same_in_every_process() -> None:
    program = "from shardam.demo.features import row_id; print(row_id('student'))"
    ids = {
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
    assert ids == {f"{row_id('student')}\n"}


@pytest.mark.parametrize(
    ("age", "bucket"), [(7, 0), (17, 0), (18, 1), (24, 1), (25, 2), (35, 3), (45, 4), (50, 5), (55, 5), (56, 6), (73, 6)]
)
def test_ages_fall_into_seven_buckets(age: int, bucket: int) -> None:
    assert age_bucket(age) == bucket


def test_hour_and_weekday_are_of_utc_whatever_the_machine_s_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert hour_and_weekday(0) == (0, 3)  # 1970-01-01 was a Thursday
    assert hour_and_weekday(4 * 86_400 - 1) == (23, 6)


def test_the_last_tenth_of_each_user_s_samples_by_time_is_the_test_set() -> None:
    random = np.random.default_rng(3)
    users = np.repeat(np.array([7, -2, 30], dtype=np.int64), [40, 5, 19])
    times = random.permutation(len(users)).astype(np.int64)
    order = random.permutation(len(users))
    users, times = users[order], times[order]
    is_test = last_tenth_per_user(users, times)
    for user, expected in ((7, 4), (-2, 1), (30, 1)):
        mine = users == user
        assert np.count_nonzero(is_test & mine) == expected
        assert times[mine & is_test].min() > times[mine & ~is_test].max()


def test_of_samples_at_one_time_the_later_in_the_file_is_the_test_sample() -> None:
    is_test = last_tenth_per_user(np.zeros(20, dtype=np.int64), np.zeros(20, dtype=np.int64))
    assert is_test.tolist() == [False] * 18 + [True] * 2


def test_the_last_tenth_of_a_log_is_its_end() -> None:
    assert last_tenth(25).tolist() == [False] * 23 + [True] * 2
    assert last_tenth(3).tolist() == [False, False, True]


def test_dense_features_are_scaled_by_the_training_part_alone() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate([np.exp(random.normal(0, 2, (200, 2))), np.full((200, 1), 5.0)], axis=1)
    is_test = last_tenth(200)
    scaled = scale_dense(values, is_test)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[~is_test].mean(axis=0), 0.0, atol=1e-6)
    np.testing.assert_allclose(scaled[~is_test][:, :2].std(axis=0), 1.0, atol=1e-5)
    np.testing.assert_allclose(scaled[:, 2], 0.0, atol=1e-6)
    changed = values.copy()
    changed[is_test] = 1e9
    np.testing.assert_array_equal(scale_dense(changed, is_test)[~is_test], scaled[~is_test])
