"""Figures that were written down beforehand: field cases, and what torch computes for three small programs."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from shardam_testing.kernels import IMPLEMENTATIONS, KernelTable, NativeTable, State, assert_same_bits, push, table_bytes

from shardam_kernels.factors import AdamOptions, OptionError, factors, row_step_factors
from shardam_kernels.row_steps import RowSteps

LR_TENTH = AdamOptions(lr=0.1)


@pytest.fixture(params=list(IMPLEMENTATIONS))
def table(request: pytest.FixtureRequest) -> KernelTable:
    """Ten rows of one zero."""
    return IMPLEMENTATIONS[str(request.param)](1, 10)


def _push(table: KernelTable, t: int, row_ids: list[int], gradients: list[float], options: AdamOptions = LR_TENTH) -> None:
    push(table, np.array(row_ids, np.int64), np.array(gradients, np.float32)[:, None], factors(options, t))


def _row(table: KernelTable, row_id: int) -> list[float]:
    state = State.of(table)
    return [float(values[row_id, 0]) for values in (state.weight, state.exp_avg, state.exp_avg_sq)]


@pytest.mark.case("C001")
def test_duplicates_in_a_push_are_one_summed_gradient(table: KernelTable) -> None:
    table.write("weight", np.array([5]), np.ones((1, 1), np.float32))
    _push(table, 1, [5, 5], [1, 3])
    np.testing.assert_allclose(_row(table, 5), [0.9000000079, 0.4, 0.016], rtol=1e-6)
    _push(table, 2, [5], [-1])
    np.testing.assert_allclose(_row(table, 5), [0.8530531944, 0.26, 0.016984], rtol=1e-6)


@pytest.mark.case("C009")
def test_a_row_unseen_for_99_steps_keeps_its_moments(table: KernelTable) -> None:
    _push(table, 1, [3], [1])
    for t in range(2, 101):
        _push(table, t, [4], [1])
    _push(table, 101, [3], [1])
    np.testing.assert_allclose(_row(table, 3), [-0.2317490976, 0.19, 0.001999], rtol=1e-6)


@pytest.mark.case("C010")
def test_a_row_first_seen_at_step_1000_takes_torch_s_step(table: KernelTable) -> None:
    _push(table, 1000, [3], [1])
    np.testing.assert_allclose(_row(table, 3)[0], -0.2514565917, rtol=1e-6)


@pytest.mark.case("C009")
@pytest.mark.case("C010")
@pytest.mark.parametrize(("row_steps", "expected"), [([1], -0.0999999684), ([1, 2], -0.1999999460)])
def test_a_row_that_counts_its_own_steps_takes_the_first_steps_of_a_young_table(
    table: KernelTable, row_steps: list[int], expected: float
) -> None:
    for step in row_steps:
        own = RowSteps(row_step_factors(LR_TENTH, np.array([step])))
        table.update(np.array([3]), np.ones((1, 1), np.float32), factors(LR_TENTH, 1000), own)
    np.testing.assert_allclose(_row(table, 3)[0], expected, rtol=1e-6)


@pytest.mark.case("C016")
def test_the_learning_rate_of_a_step_is_the_one_of_its_push(table: KernelTable) -> None:
    _push(table, 1, [0], [1], AdamOptions(lr=0.1))
    _push(table, 2, [0], [1], AdamOptions(lr=0.01))
    np.testing.assert_allclose(_row(table, 0)[0], -0.1099999661, rtol=1e-6)


@pytest.mark.case("C016")
@pytest.mark.parametrize("lr", [math.nan, -0.1, math.inf])
def test_a_learning_rate_that_is_nan_negative_or_infinite_is_refused(lr: float) -> None:
    with pytest.raises(OptionError, match="lr must be a finite"):
        AdamOptions(lr=lr).check()


@pytest.mark.case("C019")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**64, -(2.0**64)])
def test_a_gradient_that_is_not_finite_or_too_large_is_found_with_its_row_before_anything_is_written(
    table: KernelTable, value: float
) -> None:
    before = table_bytes(table)
    merged = table.merge(np.array([1, 2, 1]), np.array([[1], [value], [1]], np.float32), factors(LR_TENTH, 5))
    assert merged.row_ids[merged.bad_rows].tolist() == [2]
    assert_same_bits(table_bytes(table), before)


@pytest.mark.case("C019")
def test_a_sum_is_judged_not_its_terms_and_unscaled(table: KernelTable) -> None:
    row_ids = np.array([7, 7, 8, 8, 9, 9])
    gradients = np.array([[2.0**63], [2.0**63], [2.0**80], [-(2.0**80)], [3e38], [3e38]], np.float32)
    assert table.merge(row_ids, gradients, factors(LR_TENTH, 1)).bad_rows.tolist() == [0, 2]
    assert table.merge(row_ids[:4], gradients[:4], factors(LR_TENTH, 1, grad_scale=2.0)).bad_rows.tolist() == []
    assert table.merge(row_ids[:1], gradients[:1], factors(LR_TENTH, 1, grad_scale=0.5)).bad_rows.tolist() == [0]
    below = np.nextafter(np.float32(2.0**64), np.float32(0)).reshape(1, 1)
    assert table.merge(row_ids[:1], below, factors(LR_TENTH, 1)).bad_rows.tolist() == []


@pytest.mark.case("C020")
def test_halves_are_summed_in_float32_and_then_unscaled(table: KernelTable) -> None:
    gradients = np.array([[40000], [40000]], np.float16).astype(np.float32)
    merged = table.merge(np.array([3, 3]), gradients, factors(LR_TENTH, 1, grad_scale=1024.0))
    assert merged.bad_rows.size == 0
    assert merged.gradients.tolist() == [[78.125]]


@pytest.mark.case("C026")
def test_the_step_after_2_to_the_24_has_a_factor_of_its_own() -> None:
    first, second = 2**24, 2**24 + 1  # the same number in float32
    assert np.float32(first) == np.float32(second)
    rates = [1e-3 * (1 + k * 1e-9) for k in range(200)]
    betas = (0.9, 1 - 1e-8)
    pairs = [tuple(factors(AdamOptions(lr=lr, betas=betas), t).s for t in (first, second)) for lr in rates]
    assert any(s_first != s_second for s_first, s_second in pairs)
    expected = 1e-3 * math.sqrt(1 - betas[1] ** second) / (1 - betas[0] ** second)
    assert pairs[0][1] == float(np.float32(expected))


def _embedding(num_embeddings: int, dim: int) -> torch.nn.Embedding:
    torch.manual_seed(0)
    return torch.nn.Embedding(num_embeddings, dim, sparse=True)


def _native_step(table: NativeTable, embedding: torch.nn.Embedding, t: int) -> None:
    """Pushes the embedding's gradient and copies the weights back, for the next forward."""
    grad = embedding.weight.grad
    assert grad is not None
    push(table, grad._indices()[0].numpy(), grad._values().numpy(), factors(AdamOptions(lr=0.01), t))
    embedding.weight.grad = None
    with torch.no_grad():
        embedding.weight.copy_(torch.from_numpy(State.of(table).weight))


def _table_of(embedding: torch.nn.Embedding) -> NativeTable:
    table = NativeTable(embedding.embedding_dim, embedding.num_embeddings)
    table.write("weight", np.arange(embedding.num_embeddings), embedding.weight.detach().numpy())
    return table


def _assert_within_4_ulp(actual: npt.NDArray[np.float32], expected: list[float]) -> None:
    rounded = np.array(expected, np.float32)
    assert (np.abs(actual - rounded) <= 4 * np.spacing(np.maximum(np.abs(rounded), np.float32(0.01)))).all(), (actual, rounded)


def test_reference_value_a_cross_entropy_of_three_rows() -> None:
    embedding = _embedding(10, 5)
    table = _table_of(embedding)
    output = embedding(torch.tensor([1, 3, 5]))
    torch.nn.functional.cross_entropy(output, torch.tensor([0, 2, 1])).backward()
    _native_step(table, embedding, 1)
    expected = [0.7020091414451599, -0.3260127007961273, -2.1252191066741943, 0.3122749626636505, -1.2733346223831177]
    _assert_within_4_ulp(State.of(table).weight[1], expected)


def test_reference_value_b_sum_of_one_row() -> None:
    embedding = _embedding(10, 3)
    table = _table_of(embedding)
    assert State.of(table).weight[2].tolist() == [-0.31601276993751526, -2.1152193546295166, 0.32227492332458496]
    embedding(torch.tensor([2])).sum().backward()
    _native_step(table, embedding, 1)
    _assert_within_4_ulp(State.of(table).weight[2], [-0.3260127604007721, -2.1252193450927734, 0.3122749328613281])


def test_reference_value_c_a_row_not_named_in_the_second_step_moves_under_dense_adam_only() -> None:
    embedding = _embedding(10, 4)
    dense = torch.nn.Parameter(embedding.weight.detach().clone())
    adam = torch.optim.Adam([dense], lr=0.01)
    table = _table_of(embedding)
    after_first = [0.10984151065349579, 1.2276579141616821, 1.1067771911621094, -0.2572781443595886]
    for t, row_id in ((1, 3), (2, 5)):
        embedding(torch.tensor([row_id])).sum().backward()
        _native_step(table, embedding, t)
        adam.zero_grad()
        torch.nn.functional.embedding(torch.tensor([row_id]), dense).sum().backward()
        adam.step()
        _assert_within_4_ulp(State.of(table).weight[3], after_first)
        moved_by_adam = np.abs(dense.detach().numpy()[3] - np.array(after_first, np.float32)).max()
        assert moved_by_adam < 1e-7 if t == 1 else moved_by_adam > 1e-3
