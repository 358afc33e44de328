"""The reference against CONTRACT.md's formulas written out for one element in float32 scalars, and against float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from shardam_testing.kernels import (
    IMPLEMENTATIONS,
    NativeTable,
    ReferenceTable,
    State,
    assert_same_bits,
    push,
    random_state,
)

from shardam_kernels.factors import AdamOptions, factors

F = np.float32


def _contract_step(
    state: tuple[F, F, F], gradients: list[F], options: AdamOptions, t: int, scale: float, contributions: int
) -> tuple[F, F, F]:
    """One element, as the page says it: float64 factors rounded once, then one rounding per operation."""
    beta1, beta2 = options.betas
    s = F(options.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t))
    c1, c2, d = F(1 - beta1), F(1 - beta2), F(1 - options.lr * options.weight_decay)
    w, m, v = state
    g = gradients[0]
    for other in gradients[1:]:
        g = F(g + other)
    if scale != 1:
        g = F(g * F(1 / scale))
    if contributions != 1:
        g = F(g / F(contributions))
    if options.maximize:
        g = F(-g)
    if options.weight_decay and options.decoupled_weight_decay:
        w = F(w * d)
    elif options.weight_decay:
        g = F(g + F(F(options.weight_decay) * w))
    m = F(m + F(F(g - m) * c1))
    v = F(v + F(F(F(g * g) - v) * c2))
    w = F(w - F(s * F(m / F(np.sqrt(v) + F(options.eps)))))
    return w, m, v


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True), (0.0, True)])
def test_the_reference_is_the_contract_s_formula_element_by_element(
    weight_decay: float, decoupled: bool, maximize: bool
) -> None:
    rng = np.random.default_rng(0)
    for scale, contributions, eps in itertools.product([1.0, 3.0], [1, 3], [1e-8, 0.1]):
        options = AdamOptions(0.05, (0.8, 0.98), eps, weight_decay, decoupled, maximize)
        table = ReferenceTable(2, 1)
        start = random_state(rng, 1, 2)
        start.write_to(table)
        expected = [(start.weight[0, j], start.exp_avg[0, j], start.exp_avg_sq[0, j]) for j in range(2)]
        for t in (3, 4, 5):
            gradients = rng.standard_normal((t, 2)).astype(np.float32)
            push(table, np.zeros(t, np.int64), gradients, factors(options, t, grad_scale=scale, contributions=contributions))
            expected = [_contract_step(expected[j], list(gradients[:, j]), options, t, scale, contributions) for j in range(2)]
        end = State.of(table)
        for j in range(2):
            assert (end.weight[0, j], end.exp_avg[0, j], end.exp_avg_sq[0, j]) == expected[j]


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
def test_decay_of_zero_is_the_formula_without_decay(implementation: str) -> None:
    rng = np.random.default_rng(1)
    start = random_state(rng, 20, 6)
    start.exp_avg[0], start.weight[0] = -0.0, -0.0
    gradients = rng.standard_normal((20, 6)).astype(np.float32)
    gradients[0] = -0.0
    results = []
    for options in (AdamOptions(), AdamOptions(weight_decay=0.0, decoupled_weight_decay=True)):
        table = IMPLEMENTATIONS[implementation](6, 20)
        start.write_to(table)
        push(table, np.arange(20), gradients, factors(options, 9))
        results.append(State.of(table))
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert_same_bits(getattr(results[0], name), getattr(results[1], name), name)


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
def test_lr_zero_moves_moments_and_leaves_every_bit_of_the_weight(implementation: str) -> None:
    rng = np.random.default_rng(1)
    for weight_decay, decoupled in ((0.0, False), (0.1, False), (0.1, True)):
        table = IMPLEMENTATIONS[implementation](6, 20)
        start = random_state(rng, 20, 6)
        start.weight[0] = -0.0
        start.exp_avg[1], start.exp_avg_sq[1] = 1e38, 0  # the quotient is infinite
        start.write_to(table)
        gradients = np.zeros((20, 6), np.float32)
        options = AdamOptions(lr=0.0, betas=(0.9, 0.0), eps=1e-30, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
        push(table, np.arange(20), gradients, factors(options, 1))
        end = State.of(table)
        assert_same_bits(end.weight, start.weight)
        assert (end.exp_avg != start.exp_avg).any(axis=1).all()


def test_fifty_steps_stay_within_the_contract_of_a_float64_run() -> None:
    rng = np.random.default_rng(4)
    num_rows, dim = 200, 16
    for weight_decay, decoupled in ((0.0, False), (0.01, False), (0.01, True)):
        options = AdamOptions(lr=0.01, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
        table = NativeTable(dim, num_rows)
        w = rng.standard_normal((num_rows, dim)).astype(np.float32).astype(np.float64)
        m, v, largest = np.zeros_like(w), np.zeros_like(w), 0.0
        table.write("weight", np.arange(num_rows), w.astype(np.float32))
        for t in range(1, 51):
            gradients = rng.standard_normal((num_rows, dim)).astype(np.float32)
            push(table, np.arange(num_rows), gradients, factors(options, t))
            g = gradients.astype(np.float64)
            if decoupled:
                w *= 1 - options.lr * weight_decay
            else:
                g = g + weight_decay * w
            largest = max(largest, float(np.abs(g).max()))
            m += (g - m) * (1 - 0.9)
            v += (g * g - v) * (1 - 0.999)
            w -= options.lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-8)
        end = State.of(table)
        assert (np.abs(end.weight - w) <= 1e-5 * np.maximum(np.abs(w), options.lr)).all()
        assert (np.abs(end.exp_avg - m) <= 1e-6 * largest).all()
        np.testing.assert_allclose(end.exp_avg_sq, v, rtol=5e-6)
