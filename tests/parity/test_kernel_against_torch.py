"""The kernels against torch's optimizers (CONTRACT.md, What equals what)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from shardam_testing.kernels import (
    DIMS,
    IMPLEMENTATIONS,
    KernelTable,
    NativeTable,
    State,
    assert_same_bits,
    push,
    random_state,
)

from shardam_kernels.factors import AdamOptions, factors

NUM_ROWS = 50


class TorchTable:
    """An embedding's weight under torch.optim.SparseAdam, whose state can be set."""

    def __init__(self, options: AdamOptions) -> None:
        self.options = options

    def step(self, state: State, t: int, row_ids: npt.NDArray[np.int64], gradients: npt.NDArray[np.float32]) -> State:
        """Returns the state after step t from `state`."""
        weight = torch.nn.Parameter(torch.from_numpy(state.weight.copy()))
        optimizer = torch.optim.SparseAdam(
            [weight], self.options.lr, self.options.betas, self.options.eps, maximize=self.options.maximize
        )
        moments = {name: torch.from_numpy(getattr(state, name).copy()) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": t - 1, **moments}
        indices = torch.from_numpy(row_ids)[None]
        weight.grad = torch.sparse_coo_tensor(indices, torch.from_numpy(gradients), weight.shape, check_invariants=True)
        optimizer.step()
        return State(weight.detach().numpy(), *(moments[name].numpy() for name in ("exp_avg", "exp_avg_sq")))


def assert_weights_agree(actual: State, expected: State, before: State) -> None:
    """w within 4 ulp of max(|w|, |update|)."""
    update = np.abs(expected.weight - before.weight)
    unit = np.spacing(np.maximum(np.abs(expected.weight), update))
    assert (np.abs(actual.weight - expected.weight) <= 4 * unit).all()


def _step_both(
    table: KernelTable, torch_table: TorchTable, t: int, row_ids: npt.NDArray[np.int64], gradients: npt.NDArray[np.float32]
) -> tuple[State, State, State]:
    """One step of both from equal state; returns (before, ours, torch's) with all rows."""
    before = State.of(table)
    push(table, row_ids, gradients, factors(torch_table.options, t))
    return before, State.of(table), torch_table.step(before, t, row_ids, gradients)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_moments_equal_torch_s_bits_and_weights_agree_when_no_row_is_named_more_than_twice(dim: int, maximize: bool) -> None:
    rng = np.random.default_rng(dim)
    table = NativeTable(dim, NUM_ROWS)
    random_state(rng, NUM_ROWS, dim).write_to(table)
    torch_table = TorchTable(AdamOptions(lr=0.01, maximize=maximize))
    for t in range(1, 5):
        named = rng.choice(NUM_ROWS, 20, replace=False)
        row_ids = rng.permutation(np.concatenate([named, named[:7]]))
        gradients = rng.standard_normal((len(row_ids), dim)).astype(np.float32)
        gradients[:3] = 0
        before, ours, theirs = _step_both(table, torch_table, t, row_ids, gradients)
        assert_same_bits(ours.exp_avg, theirs.exp_avg, f"exp_avg, step {t}")
        assert_same_bits(ours.exp_avg_sq, theirs.exp_avg_sq, f"exp_avg_sq, step {t}")
        assert_weights_agree(ours, theirs, before)


@pytest.mark.parametrize("options", [AdamOptions(1.0, (0.0, 0.9)), AdamOptions(1e-5, (0.5, 0.0), 1e-3), AdamOptions(eps=1e-2)])
def test_moments_equal_torch_s_bits_under_other_hyper_parameters(options: AdamOptions) -> None:
    rng = np.random.default_rng(8)
    table, torch_table = NativeTable(32, NUM_ROWS), TorchTable(options)
    random_state(rng, NUM_ROWS, 32).write_to(table)
    for t in (1, 2, 1000):
        gradients = rng.standard_normal((30, 32)).astype(np.float32)
        before, ours, theirs = _step_both(table, torch_table, t, rng.permutation(NUM_ROWS)[:30], gradients)
        assert_same_bits(ours.exp_avg, theirs.exp_avg)
        assert_same_bits(ours.exp_avg_sq, theirs.exp_avg_sq)
        assert_weights_agree(ours, theirs, before)


def test_long_runs_equal_torch_s_bits_when_torch_is_handed_the_left_to_right_sum() -> None:
    rng = np.random.default_rng(9)
    table, torch_table = NativeTable(16, NUM_ROWS), TorchTable(AdamOptions())
    random_state(rng, NUM_ROWS, 16).write_to(table)
    for t in (1, 2, 3):
        row_ids = np.minimum(rng.geometric(0.1, 2000) - 1, NUM_ROWS - 1)
        gradients = rng.standard_normal((2000, 16)).astype(np.float32)
        before = State.of(table)
        merged = push(table, row_ids, gradients, factors(torch_table.options, t))
        ours = State.of(table)
        theirs = torch_table.step(before, t, merged.row_ids, merged.gradients)
        assert_same_bits(ours.exp_avg, theirs.exp_avg)
        assert_same_bits(ours.exp_avg_sq, theirs.exp_avg_sq)
        assert_weights_agree(ours, theirs, before)
        coalesced = torch_table.step(before, t, row_ids, gradients)  # torch's own order of addition
        np.testing.assert_allclose(ours.exp_avg, coalesced.exp_avg, rtol=1e-6, atol=1e-6 * np.abs(merged.gradients).max())


@pytest.mark.case("C003")
@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
def test_a_gradient_as_autograd_leaves_it_and_the_same_coalesced_give_the_same_bits(implementation: str) -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    (embedding(torch.tensor([3, 3, 1])) * torch.rand(3, 4)).sum().backward()
    grad = embedding.weight.grad
    assert grad is not None
    assert not grad.is_coalesced()
    results = []
    for sparse in (grad, grad.coalesce()):
        table = IMPLEMENTATIONS[implementation](4, 10)
        table.write("weight", np.arange(10), embedding.weight.detach().numpy())
        push(table, sparse._indices()[0].numpy(), sparse._values().numpy(), factors(AdamOptions(), 1))
        results.append(State.of(table))
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert_same_bits(getattr(results[0], name), getattr(results[1], name))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.02, False), (0.02, True)])
def test_fifty_steps_on_all_rows_equal_dense_adam_and_adamw(weight_decay: float, decoupled: bool, maximize: bool) -> None:
    rng = np.random.default_rng(6)
    num_rows, dim, lr, eps, beta2 = 40, 24, 0.01, 1e-8, 0.999
    start = rng.standard_normal((num_rows, dim)).astype(np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class([weight], lr, (0.9, beta2), eps, weight_decay=weight_decay, maximize=maximize)
    table = NativeTable(dim, num_rows)
    table.write("weight", np.arange(num_rows), start)
    largest = 0.0
    for t in range(1, 51):
        gradients = rng.standard_normal((num_rows, dim)).astype(np.float32)
        decay_of_gradient = 0 if decoupled else weight_decay * float(weight.detach().abs().max())
        largest = max(largest, float(np.abs(gradients).max()) + decay_of_gradient)
        weight.grad = torch.from_numpy(gradients)
        optimizer.step()
        # Dense Adam adds eps to the corrected square root, SparseAdam to the raw one.
        options = AdamOptions(lr, (0.9, beta2), eps * math.sqrt(1 - beta2**t), weight_decay, decoupled, maximize)
        push(table, np.arange(num_rows), gradients, factors(options, t))
    ours, theirs = State.of(table), weight.detach().numpy()
    state = optimizer.state[weight]
    assert (np.abs(ours.weight - theirs) <= 1e-5 * np.maximum(np.abs(theirs), lr)).all()
    assert (np.abs(ours.exp_avg - state["exp_avg"].numpy()) <= 1e-6 * largest).all()
    np.testing.assert_allclose(ours.exp_avg_sq, state["exp_avg_sq"].numpy(), rtol=5e-6)


def test_denormals_survive_a_thread_that_flushes_them_and_its_mode_stays() -> None:
    dim = 64
    gradients = np.full((4000, dim), 2e-20, np.float32)
    step = factors(AdamOptions(lr=0.1, eps=1e-20), 1)
    expected = NativeTable(dim, 4000)
    push(expected, np.arange(4000), gradients, step)
    assert (State.of(expected).exp_avg_sq > 0).all()
    tiny = torch.tensor([1e-40])
    for num_threads in (1, 2):
        flushing = NativeTable(dim, 4000, num_threads=num_threads)
        assert torch.set_flush_denormal(True)
        try:
            push(flushing, np.arange(4000), gradients, step)
            still_flushing = float(tiny * 0.5) == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert still_flushing
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert_same_bits(getattr(State.of(flushing), name), getattr(State.of(expected), name), name)
