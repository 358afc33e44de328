"""Folding of initializers, and the checked-in pairs of the normal distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shardam_kernels import normal_pairs as generator
from shardam_kernels.factors import OptionError
from shardam_kernels.initializers import (
    FoldedInit,
    fold_constant,
    fold_normal,
    fold_uniform,
    normal_pairs,
    xavier_normal_std,
    xavier_uniform_bound,
)

FLOAT32_MAX = float(np.finfo(np.float32).max)


def _approximate(u: int) -> float:
    """|z| of u by the pairs, as CONTRACT.md words it."""
    position = u.bit_length() - 1
    right = max(position - 6, 0)
    next_bits = ((u >> right) << max(6 - position, 0)) & 63
    interval = 0 if u == 0 else (position + 1) * 64 + next_bits
    a, b = normal_pairs()[interval]
    return float(a + b * ((u & ((1 << right) - 1)) / 2**right))


def test_the_checked_in_pairs_are_what_the_script_makes() -> None:
    checked_in, made = normal_pairs().astype(np.float32), generator.fit_pairs()
    assert checked_in.shape == (2048, 2)
    # One unit of slack: the script's log and quantile may differ between C libraries.
    assert (np.abs(checked_in - made) <= np.spacing(np.abs(made))).all()


def test_the_pairs_follow_the_exact_quantile_within_1_3e_5() -> None:
    rng = np.random.default_rng(0)
    evenly = rng.integers(0, 2**31, 20_000)
    by_octave = (2.0 ** rng.uniform(0, 31, 40_000)).astype(np.int64)
    ends = np.concatenate([2 ** np.arange(31) - 1, 2 ** np.arange(31), [2**31 - 1], np.arange(3000)])
    errors = [abs(_approximate(u) - generator.exact_quantile(u)) for u in np.concatenate([evenly, by_octave, ends]).tolist()]
    assert max(errors) < 1.3e-5


def test_the_tail_reaches_6_3() -> None:
    assert 6.3 < _approximate(0) < 6.4
    assert abs(_approximate(2**31 - 1)) < 1e-6


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0, 1), (0.1, 0.7), (-FLOAT32_MAX, FLOAT32_MAX), (5, 5 + 2**-10)])
def test_the_ends_of_a_uniform_range_stay_inside_it(low: float, high: float) -> None:
    folded = fold_uniform(low, high)
    ends = folded.a + folded.b * np.array([-(2**23), 2**23 - 1], np.float32)
    assert np.float32(low) <= ends[0] < ends[1] < np.float32(high)
    assert ends[1] - np.float64(ends[0]) > 0.9 * (np.float32(high) - np.float64(np.float32(low)))


@pytest.mark.parametrize("low", [1.0, -1.0, 0.0, 2.0**-126, -(2.0**-126), 1 - 2.0**-24, -FLOAT32_MAX])
def test_a_uniform_range_of_one_value_gives_that_value(low: float) -> None:
    next_value = float(np.nextafter(np.float32(low), np.float32(np.inf)))
    for high in (low, next_value):
        folded = fold_uniform(low, high)
        ends = folded.a + folded.b * np.array([-(2**23), 2**23 - 1], np.float32)
        assert (ends == np.float32(low)).all()


def test_folds_are_shared_and_cannot_be_written() -> None:
    assert fold_normal(0.0, 1.0) is fold_normal(0.0, 1.0)
    with pytest.raises(ValueError, match="read-only"):
        fold_normal(0.0, 1.0).a[0] = 1


@pytest.mark.parametrize(
    ("fold", "arguments", "named"),
    [
        (fold_normal, (0.0, -1.0), "std"),
        (fold_normal, (math.nan, 1.0), "mean"),
        (fold_normal, (0.0, 1e38), "tails|within float32"),
        (fold_normal, (1e39, 1.0), "mean"),
        (fold_uniform, (1.0, 0.0), "high must be >= low"),
        (fold_uniform, (-math.inf, 0.0), "low"),
        (fold_constant, (1e39,), "value"),
        (fold_constant, (True,), "value"),
    ],
)
def test_an_initializer_that_float32_cannot_hold_is_refused(
    fold: Callable[..., FoldedInit], arguments: tuple[float, ...], named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        fold(*arguments)


def test_xavier_s_bound_and_std_are_torch_s() -> None:
    weight = torch.empty(3000, 500)
    torch.nn.init.xavier_uniform_(weight)
    assert float(weight.abs().max()) == pytest.approx(xavier_uniform_bound(3000, 500), rel=1e-4)
    torch.nn.init.xavier_normal_(weight)
    assert float(weight.std()) == pytest.approx(xavier_normal_std(3000, 500), rel=5e-3)
