"""How raw values become ids and features: stable row ids, buckets, calendar fields, scaled numbers, the test split.

Every rule is a pure function of its input, the same on every machine and in every run.
"""

from __future__ import annotations

import datetime

import numpy as np
import xxhash
from numpy.typing import NDArray

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

AGE_BOUNDS = (18, 25, 35, 45, 50, 56)
"""Lower bounds of the age buckets 1 to 6, the customary ones for movie ratings; bucket 0 is below 18."""

ZIP_PREFIX = 3
"""Characters of a zip code that name a region (a US sectional centre)."""

TEST_DIVISOR = 10
"""The last tenth is the test set."""


def row_id(text: str) -> int:
    """Returns the row id of a categorical value: an int64 in decimal stands for itself, any other text is hashed.

    The hash is xxh3-64 of the UTF-8 text, read as int64; never Python's `hash()`, which differs from process to process.
    """
    if text.isascii() and text.removeprefix("-").isdigit() and str(int(text)) == text and INT64_MIN <= int(text) <= INT64_MAX:
        return int(text)
    unsigned = xxhash.xxh3_64_intdigest(text.encode())
    return unsigned - 2**64 if unsigned > INT64_MAX else unsigned


def age_bucket(age: int) -> int:
    """Returns 0 to 6."""
    return sum(age >= bound for bound in AGE_BOUNDS)


def hour_and_weekday(timestamp_s: int) -> tuple[int, int]:
    """Returns the hour (0 to 23) and the weekday (0 = Monday) of a Unix time, in UTC."""
    moment = datetime.datetime.fromtimestamp(timestamp_s, datetime.UTC)
    return moment.hour, moment.weekday()


def last_tenth_per_user(users: NDArray[np.int64], timestamps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the last tenth (at least one) of each user's samples by time as test samples.

    Args:
        users: int64 [N].
        timestamps: int64 [N]; among equal ones the order of the input counts.

    Returns:
        bool [N], True for a test sample.
    """
    order = np.lexsort((timestamps, users))
    _, starts, counts = np.unique(users[order], return_index=True, return_counts=True)
    position = np.arange(len(users)) - np.repeat(starts, counts)
    first_test = np.repeat(counts - np.maximum(1, counts // TEST_DIVISOR), counts)
    is_test = np.zeros(len(users), dtype=np.bool_)
    is_test[order] = position >= first_test
    return is_test


def last_tenth(num_samples: int) -> NDArray[np.bool_]:
    """Marks the last tenth (at least one) of the samples in their order, as of a log in order of time."""
    is_test = np.zeros(num_samples, dtype=np.bool_)
    is_test[num_samples - max(1, num_samples // TEST_DIVISOR) :] = True
    return is_test


def scale_dense(values: NDArray[np.float64], is_test: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Squeezes heavy tails by sign(x) * log(1 + |x|), then shifts and scales each column to mean 0 and std 1.

    Mean and std are those of the training samples alone; a column that is constant there is only shifted.

    Args:
        values: float64 [N, K].
        is_test: bool [N].

    Returns:
        float32 [N, K].
    """
    squeezed = np.sign(values) * np.log1p(np.abs(values))
    train = squeezed[~is_test]
    constant = train.max(axis=0) == train.min(axis=0)  # its std is not exactly 0, as the mean is rounded
    scaled: NDArray[np.float64] = (squeezed - train.mean(axis=0)) / np.where(constant, 1.0, train.std(axis=0))
    return scaled.astype(np.float32)
