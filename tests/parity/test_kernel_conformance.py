"""Every implementation gives the reference's bits, over free-running steps from a non-zero state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardam_testing.kernels import (
    DIMS,
    IMPLEMENTATIONS,
    Make,
    ReferenceTable,
    State,
    assert_same_bits,
    push,
    random_state,
    table_bytes,
)

from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.row_steps import RowSteps

NUM_ROWS = 64

DECAYS = {
    "no decay": (0.0, False),
    "coupled": (0.03, False),
    "decoupled": (0.03, True),
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def make(request: pytest.FixtureRequest) -> Make:
    return IMPLEMENTATIONS[str(request.param)]


def _skewed_slots(rng: np.random.Generator, count: int, num_rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A few rows often, most rows seldom: long runs and single ones in one push."""
    return np.minimum(rng.geometric(0.15, count) - 1, num_rows - 1)


@pytest.mark.case("C027")
@pytest.mark.parametrize("dim", DIMS)
def test_steps_from_a_trained_state_leave_the_reference_s_bits_in_every_record(make: Make, dim: int) -> None:
    rng = np.random.default_rng(dim)
    state = random_state(rng, NUM_ROWS, dim)
    actual, expected = make(dim, NUM_ROWS), ReferenceTable(dim, NUM_ROWS)
    state.write_to(actual)
    state.write_to(expected)
    options = AdamOptions(lr=0.01)
    for t in range(7, 13):
        slots = _skewed_slots(rng, 3 * t, NUM_ROWS)
        gradients = rng.standard_normal((len(slots), dim)).astype(np.float32)
        gradients[rng.random(len(slots)) < 0.2] = 0
        step = factors(options, t)
        push(actual, slots, gradients, step)
        push(expected, slots, gradients, step)
        assert_same_bits(table_bytes(actual), table_bytes(expected), f"step {t}")


@pytest.mark.parametrize("dim", [1, 3, 64, 513])
def test_pushes_large_enough_for_every_thread_leave_the_reference_s_bits(make: Make, dim: int) -> None:
    rng = np.random.default_rng(dim)
    num_rows = 2_500_000 // (dim * 12) + 1  # four threads have more to do than starting them costs
    count = 600_000 // dim + 1
    state = random_state(rng, num_rows, dim)
    actual, expected = make(dim, num_rows), ReferenceTable(dim, num_rows)
    state.write_to(actual)
    state.write_to(expected)
    for t in (3, 4):
        slots = rng.integers(0, num_rows, count)
        slots[rng.random(count) < 0.4] = 0
        gradients = rng.standard_normal((count, dim)).astype(np.float32)
        step = factors(AdamOptions(), t, grad_scale=8.0)
        push(actual, slots, gradients, step)
        push(expected, slots, gradients, step)
    every_slot = np.arange(num_rows)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert_same_bits(actual.read(name, every_slot), expected.read(name, every_slot), name)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", list(DECAYS))
def test_every_combination_of_options_leaves_the_reference_s_bits(make: Make, decay: str, maximize: bool) -> None:
    dim, rng = 19, np.random.default_rng(5)
    weight_decay, decoupled = DECAYS[decay]
    combinations = itertools.product([0.0, 0.02], [(0.9, 0.999), (0.0, 0.5), (0.6, 0.0)], [1e-8, 1e-3], [1.0, 1024.0], [1, 3])
    state = random_state(rng, NUM_ROWS, dim)
    for lr, betas, eps, grad_scale, contributions in combinations:
        options = AdamOptions(lr, betas, eps, weight_decay, decoupled, maximize)
        actual, expected = make(dim, NUM_ROWS), ReferenceTable(dim, NUM_ROWS)
        state.write_to(actual)
        state.write_to(expected)
        for t in (1, 2):
            slots = _skewed_slots(rng, 90, NUM_ROWS)
            gradients = (rng.standard_normal((90, dim)) * grad_scale).astype(np.float32)
            step = factors(options, t, grad_scale=grad_scale, contributions=contributions)
            push(actual, slots, gradients, step)
            push(expected, slots, gradients, step)
        assert_same_bits(table_bytes(actual), table_bytes(expected), f"{options}, scale {grad_scale}, K {contributions}")


@pytest.mark.parametrize("run_length", [1, 2, 3, 17, 1000, 5000])
@pytest.mark.parametrize("dim", [1, 5, 33])
def test_a_run_of_duplicates_is_summed_left_to_right_whatever_its_length(make: Make, run_length: int, dim: int) -> None:
    rng = np.random.default_rng(run_length)
    row_ids = np.concatenate([np.full(run_length, -7), np.array([3, 2**62])])
    rng.shuffle(row_ids)
    gradients = (rng.standard_normal((len(row_ids), dim)) * 10.0 ** rng.integers(-6, 6, (len(row_ids), 1))).astype(np.float32)
    merged = make(dim, 1).merge(row_ids, gradients, factors(AdamOptions(), 1))
    assert list(merged.row_ids) == list(dict.fromkeys(row_ids.tolist()))
    for row_id, actual in zip(merged.row_ids, merged.gradients, strict=True):
        terms = gradients[row_ids == row_id]
        total = terms[0].copy()
        for term in terms[1:]:
            total = total + term
        assert_same_bits(actual, total)


def test_per_row_step_factors_move_each_row_by_its_own(make: Make) -> None:
    dim, rng = 12, np.random.default_rng(2)
    state = random_state(rng, 8, dim)
    actual, expected = make(dim, 8), ReferenceTable(dim, 8)
    gradients = rng.standard_normal((8, dim)).astype(np.float32)
    step_factors = rng.random(8).astype(np.float32)
    step_factors[3] = 0
    for table in (actual, expected):
        state.write_to(table)
        table.update(np.arange(8), gradients, factors(AdamOptions(), 4), RowSteps(step_factors))
    assert_same_bits(table_bytes(actual), table_bytes(expected))
    assert_same_bits(State.of(actual).weight[3], state.weight[3])


@pytest.mark.parametrize("dim", [1, 3, 8, 129])
def test_gradients_whose_squares_are_denormal_or_vanish_keep_the_reference_s_bits(make: Make, dim: int) -> None:
    rng = np.random.default_rng(0)
    actual, expected = make(dim, 40), ReferenceTable(dim, 40)
    magnitudes = 10.0 ** rng.uniform(-23, -20, (40, dim)) * rng.choice([-1, 1], (40, dim))
    for t in range(1, 6):
        step = factors(AdamOptions(lr=0.1, eps=1e-20), t)
        for table in (actual, expected):
            push(table, np.arange(40), (magnitudes * t).astype(np.float32), step)
    assert_same_bits(table_bytes(actual), table_bytes(expected))
    second = State.of(actual).exp_avg_sq
    assert ((second > 0) & (second < np.finfo(np.float32).smallest_normal)).any(), "the case has no denormal moment"


@pytest.mark.case("C004")
def test_an_empty_step_merges_to_nothing_and_changes_no_bit(make: Make) -> None:
    table = make(7, 5)
    random_state(np.random.default_rng(1), 5, 7).write_to(table)
    before = table_bytes(table)
    merged = push(table, np.empty(0, np.int64), np.empty((0, 7), np.float32), factors(AdamOptions(), 1))
    assert merged.row_ids.shape == (0,)
    assert merged.gradients.shape == (0, 7)
    assert merged.bad_rows.shape == (0,)
    without_columns = table.merge(np.empty(0, np.int64), np.empty((0, 0), np.float32), factors(AdamOptions(), 1))
    assert without_columns.gradients.shape == (0, 0)
    assert_same_bits(table_bytes(table), before)


def test_rows_not_named_keep_every_bit_while_zero_gradients_move_theirs(make: Make) -> None:
    dim, table = 9, make(9, 30)
    random_state(np.random.default_rng(1), 30, dim).write_to(table)
    before = table_bytes(table)
    named = np.array([28, 0, 13])
    for t in (1, 2):
        push(
            table, named, np.zeros((3, dim), np.float32), factors(AdamOptions(weight_decay=0.1, decoupled_weight_decay=True), t)
        )
    after = table_bytes(table)
    others = np.setdiff1d(np.arange(30), named)
    assert_same_bits(after[others], before[others])
    assert (after[named, : 4 * dim] != before[named, : 4 * dim]).any(axis=1).all()


@pytest.mark.case("C023")
def test_a_hundred_thousand_ids_of_fifty_rows_give_the_same_bits_again_and_in_every_implementation(make: Make) -> None:
    rng = np.random.default_rng(3)
    slots = rng.integers(0, 50, 100_000)
    gradients = rng.standard_normal((100_000, 8)).astype(np.float32)
    results = []
    for build in (make, make, ReferenceTable):
        table = build(8, 50)
        push(table, slots, gradients, factors(AdamOptions(), 1))
        results.append(table_bytes(table))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_a_weight_beyond_float32_saturates_and_is_counted(make: Make) -> None:
    largest = np.finfo(np.float32).max
    table = make(5, 3)
    table.write("weight", np.arange(3), np.array([[largest, -largest, 1, 2, 3]] * 3, np.float32))
    gradients = np.array([[-1, 1, 1, 0, 1], [1, -1, 1, 0, 1], [-1, -1, 1, 0, 1]], np.float32)
    step_factors = np.full(3, 1e38, np.float32)
    saturated = table.update(np.arange(3), gradients, factors(AdamOptions(betas=(0.0, 0.0)), 1), RowSteps(step_factors))
    weight = table.read("weight", np.arange(3))
    assert saturated == 3
    assert np.isfinite(weight).all()
    assert weight[0, 0] == largest
    assert weight[0, 1] == -largest
    assert weight[2, 0] == largest
    assert weight[1, 0] < largest


def _matrix(low: float, high: float) -> st.SearchStrategy[list[list[float]]]:
    values = st.floats(low, high, width=32)
    return st.lists(st.lists(values, min_size=3, max_size=3), min_size=4, max_size=4)


LARGEST = float(np.finfo(np.float32).max)
BELOW_LIMIT = 2.0**64 - 2.0**40

HYPER_PARAMETERS = st.builds(
    AdamOptions,
    lr=st.floats(0, 1e10),
    betas=st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)),
    eps=st.floats(1e-44, 10),
    weight_decay=st.one_of(st.just(0.0), st.floats(0, 1e10)),
    decoupled_weight_decay=st.booleans(),
    maximize=st.booleans(),
)


@settings(max_examples=300)
@given(
    _matrix(-LARGEST, LARGEST),
    _matrix(-LARGEST, LARGEST),
    _matrix(0, LARGEST),
    _matrix(-BELOW_LIMIT, BELOW_LIMIT),
    HYPER_PARAMETERS,
)
def test_any_finite_state_and_gradient_give_the_reference_s_bits_and_stay_finite(
    weight: list[list[float]],
    exp_avg: list[list[float]],
    exp_avg_sq: list[list[float]],
    gradients: list[list[float]],
    options: AdamOptions,
) -> None:
    state = State(*(np.array(values, np.float32) for values in (weight, exp_avg, exp_avg_sq)))
    expected = ReferenceTable(3, 4)
    state.write_to(expected)
    saturated = []
    for t in (1, 2):
        step = factors(options, t)
        saturated.append(expected.update(np.arange(4), np.array(gradients, np.float32), step, RowSteps(step.step_factors(4))))
    assert all(np.isfinite(values).all() for values in vars(State.of(expected)).values())
    assert (State.of(expected).exp_avg_sq >= 0).all()
    for name, build in IMPLEMENTATIONS.items():
        actual = build(3, 4)
        state.write_to(actual)
        for t in (1, 2):
            step = factors(options, t)
            count = actual.update(np.arange(4), np.array(gradients, np.float32), step, RowSteps(step.step_factors(4)))
            assert count == saturated[t - 1]
        assert_same_bits(table_bytes(actual), table_bytes(expected), name)


def test_decay_of_huge_weights_never_makes_a_number_that_is_not_finite(make: Make) -> None:
    largest = np.finfo(np.float32).max
    for decoupled in (False, True):
        actual, expected = make(4, 2), ReferenceTable(4, 2)
        options = AdamOptions(lr=10.0, weight_decay=1e6, decoupled_weight_decay=decoupled, eps=1e-30)
        for table in (actual, expected):
            table.write("weight", np.arange(2), np.full((2, 4), largest, np.float32))
            table.write("exp_avg", np.arange(2), np.full((2, 4), -largest, np.float32))
            push(table, np.arange(2), np.zeros((2, 4), np.float32), factors(options, 1))
        assert_same_bits(table_bytes(actual), table_bytes(expected))
        assert all(np.isfinite(values).all() for values in vars(State.of(actual)).values())
