"""Hyper-parameters: what is legal, and the float32 factors made of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_kernels.factors import FLOAT32_MAX, AdamOptions, OptionError, check_grad_scale, factors, row_step_factors

OPTIONS = st.builds(
    AdamOptions,
    lr=st.floats(0, 1e6),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.floats(1e-40, 1e6),
    weight_decay=st.floats(0, 1e6),
    decoupled_weight_decay=st.booleans(),
    maximize=st.booleans(),
)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1e-9),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", 1e39),
        ("lr", True),
        ("lr", "0.1"),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("betas", (0.9, math.nan)),
        ("betas", (0.9,)),
        ("betas", 0.9),
        ("eps", 0.0),
        ("eps", 1e-46),
        ("eps", -1e-8),
        ("eps", math.nan),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("decoupled_weight_decay", 1),
        ("maximize", None),
    ],
)
def test_a_bad_option_is_refused_by_name_and_value(option: str, value: object) -> None:
    with pytest.raises(OptionError) as raised:
        dataclasses.replace(AdamOptions(), **{option: value}).check()  # type: ignore[arg-type]
    assert option in str(raised.value)
    shown = bad_beta if (bad_beta := _bad_beta(value)) is not None else value
    assert repr(shown) in str(raised.value)


def _bad_beta(value: object) -> float | None:
    """The beta outside [0, 1) of a pair."""
    if not isinstance(value, tuple) or len(value) != 2:
        return None
    return next(float(beta) for beta in value if not 0 <= beta < 1)


def test_options_that_leave_float32_together_are_refused() -> None:
    with pytest.raises(OptionError, match="step beyond float32"):
        AdamOptions(lr=1e30, betas=(1 - 1e-12, 0.9)).check()
    with pytest.raises(OptionError, match=r"lr \* weight_decay"):
        AdamOptions(lr=1e20, weight_decay=1e20).check()


@pytest.mark.parametrize("options", [AdamOptions(lr=0), AdamOptions(eps=1e-44), AdamOptions(betas=(0, 0)), AdamOptions(lr=1)])
def test_the_ends_of_what_is_legal_pass(options: AdamOptions) -> None:
    options.check()


@pytest.mark.parametrize("grad_scale", [0.0, -1.0, math.nan, math.inf, 1e-40, 5e-324, 1e39, True])
def test_a_bad_grad_scale_is_refused(grad_scale: float) -> None:
    with pytest.raises(OptionError, match="grad_scale"):
        check_grad_scale(grad_scale)
    with pytest.raises(OptionError, match="grad_scale"):
        factors(AdamOptions(), 1, grad_scale=grad_scale)


def test_a_step_below_one_and_no_contribution_are_refused() -> None:
    with pytest.raises(ValueError, match="t = 1, got 0"):
        factors(AdamOptions(), 0)
    with pytest.raises(ValueError, match="contributions must be at least 1, got 0"):
        factors(AdamOptions(), 1, contributions=0)


@given(OPTIONS, st.integers(1, 2**40), st.floats(1e-30, 1e30), st.integers(1, 4096))
def test_every_factor_is_the_formula_in_float64_rounded_once(options: AdamOptions, t: int, scale: float, count: int) -> None:
    try:
        options.check()
    except OptionError:
        return
    result = factors(options, t, grad_scale=scale, contributions=count)
    beta1, beta2 = options.betas
    expected = {
        "c1": 1 - beta1,
        "c2": 1 - beta2,
        "s": options.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t),
        "d": 1 - options.lr * options.weight_decay,
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "unscale": 1 / scale,
        "divisor": count,
    }
    for name, value in expected.items():
        assert getattr(result, name) == float(np.float32(value)), name
        assert abs(getattr(result, name)) <= FLOAT32_MAX
    assert (result.maximize, result.decoupled) == (options.maximize, options.decoupled_weight_decay)


def test_step_factors_repeat_s_as_float32() -> None:
    result = factors(AdamOptions(), 3)
    assert result.step_factors(4).tolist() == [result.s] * 4
    assert result.step_factors(0).dtype == np.float32


@given(OPTIONS, st.lists(st.one_of(st.integers(1, 50), st.integers(1, 2**32 - 1)), max_size=20))
def test_a_row_s_own_step_has_the_factor_of_a_table_at_that_step(options: AdamOptions, steps: list[int]) -> None:
    try:
        options.check()
    except OptionError:
        return
    result = row_step_factors(options, np.array(steps, np.int64))
    assert result.dtype == np.float32
    assert result.tolist() == [factors(options, t).s for t in steps]


def test_a_row_step_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="the first step of a row is 1, got 0"):
        row_step_factors(AdamOptions(), np.array([3, 0]))
    with pytest.raises(OptionError, match="lr"):
        row_step_factors(AdamOptions(lr=-1.0), np.array([1]))
