"""Gradients grouped by id, unsummed: the runs that a GPU's update takes, and which rows are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardam_testing.kernels import assert_same_bits

from shardam_kernels import native, reference
from shardam_kernels.factors import AdamOptions, factors

STEP = factors(AdamOptions(), 1)


@given(st.lists(st.integers(-3, 6), max_size=60), st.integers(1, 3))
def test_native_runs_are_the_reference_s(ids: list[int], num_threads: int) -> None:
    row_ids = np.array(ids, np.int64)
    gradients = np.arange(len(ids) * 2, dtype=np.float32).reshape(len(ids), 2)
    expected = reference.group_gradients(row_ids, gradients, STEP)
    actual = native.group_gradients(row_ids, gradients, STEP, num_threads)
    for name in ("row_ids", "starts", "order", "bad_rows"):
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)


def test_runs_name_every_gradient_once_in_the_order_of_the_push_and_short_runs_come_first() -> None:
    rng = np.random.default_rng(0)
    row_ids = rng.geometric(0.01, 20_000)
    runs = native.group_gradients(row_ids, np.ones((20_000, 3), np.float32), STEP, 2)
    lengths = np.diff(runs.starts)
    assert (np.diff(lengths) >= 0).all()
    assert sorted(runs.order.tolist()) == list(range(20_000))
    for row, row_id in enumerate(runs.row_ids):
        run = runs.order[runs.starts[row] : runs.starts[row + 1]]
        assert run.tolist() == np.flatnonzero(row_ids == row_id).tolist()


@pytest.mark.case("C019")
@pytest.mark.parametrize("grad_scale", [1.0, 0.5, 2.0**20])
def test_bad_rows_are_those_of_the_merge(grad_scale: float) -> None:
    step = factors(AdamOptions(), 1, grad_scale=grad_scale)
    row_ids = np.array([7, 7, 8, 8, 9, 9, 5, 6, 6, 6])
    gradients = np.ones((10, 2), np.float32)
    gradients[:8, 1] = [2.0**63, 2.0**63, 2.0**80, -(2.0**80), 3e38, 3e38, np.nan, np.inf]
    merged = native.merge_gradients(row_ids, gradients, step)
    for module in (native, reference):
        runs = module.group_gradients(row_ids, gradients, step)
        bad = set(runs.row_ids[runs.bad_rows].tolist())
        assert bad == set(merged.row_ids[merged.bad_rows].tolist())
        assert 5 in bad
        assert 8 not in bad
        assert runs.bad_rows.tolist() == sorted(runs.bad_rows.tolist())


def test_a_step_without_ids_has_no_runs() -> None:
    for module in (native, reference):
        for shape in ((0, 3), (0, 0)):
            runs = module.group_gradients(np.empty(0, np.int64), np.empty(shape, np.float32), STEP)
            assert runs.starts.tolist() == [0]
            assert runs.row_ids.size == runs.order.size == runs.bad_rows.size == 0
