"""Embedding and SparseAdam in a PyTorch program, on a real cluster."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from shardam_testing.waiting import wait_for
from torch import nn

import shardam
from shardam import AdamOptions, Embedding, LocalCluster, SparseAdam, TableSpec
from shardam._push_checks import merged_gradient
from shardam.errors import BadOption, NonFiniteGradient, RowLimit

_names = (f"torch_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def make(cluster: LocalCluster, num_embeddings: int | None, dim: int, padding_idx: int | None = None) -> Embedding:
    return Embedding(num_embeddings, dim, padding_idx, table=next(_names), cluster=cluster)


def like(cluster: LocalCluster, local: nn.Embedding) -> Embedding:
    """A table with the rows of a local embedding."""
    remote = make(cluster, local.num_embeddings, local.embedding_dim, local.padding_idx)
    remote.table.assign(range(local.num_embeddings), local.weight)
    return remote


def assert_rows_follow(remote: Embedding, local: nn.Embedding) -> None:
    pulled = torch.from_numpy(remote.table.pull(range(local.num_embeddings)))
    torch.testing.assert_close(pulled, local.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.case("C002")
def test_two_uses_of_a_table_in_one_step_are_one_push(cluster: LocalCluster) -> None:
    local = nn.Embedding(10, 4, sparse=True)
    clicked = like(cluster, local)
    shown = Embedding(10, 4, table=clicked.table.name, cluster=cluster)
    ids_clicked, ids_shown, scale = torch.tensor([5, 9]), torch.tensor([5]), torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    local_adam = torch.optim.SparseAdam(local.parameters(), lr=0.1)
    sparse = SparseAdam([clicked, shown], lr=0.1)
    for step in range(1, 4):
        ((local(ids_clicked) * scale).sum() + local(ids_shown).square().sum()).backward()
        local_adam.step()
        local_adam.zero_grad()
        ((clicked(ids_clicked) * scale).sum() + shown(ids_shown).square().sum()).backward()
        sparse.step()
        sparse.zero_grad()
        assert clicked.table.stats().table_step == step
        assert_rows_follow(clicked, local)


@pytest.mark.case("C005")
def test_a_table_without_a_gradient_does_not_step(cluster: LocalCluster) -> None:
    used, unused = make(cluster, None, 4), make(cluster, None, 4)
    sparse = SparseAdam([used, unused], lr=0.1)
    unused(torch.tensor([1])).sum().backward()
    sparse.step()
    sparse.zero_grad()
    before = unused.table.rows([1])
    for _ in range(3):
        used(torch.tensor([1])).sum().backward()
        sparse.step()
        sparse.zero_grad()
    after = unused.table.rows([1])
    np.testing.assert_array_equal(after.weight, before.weight)
    np.testing.assert_array_equal(after.exp_avg, before.exp_avg)
    assert (used.table.stats().table_step, unused.table.stats().table_step) == (3, 1)


@pytest.mark.case("C004")
def test_a_batch_without_ids_is_a_step_with_an_empty_gradient(cluster: LocalCluster) -> None:
    items = make(cluster, None, 4)
    sparse = SparseAdam([items], lr=0.1)
    output = items(torch.empty(0, 3, dtype=torch.int64))
    assert output.shape == (0, 3, 4)
    output.sum().backward()
    sparse.step()
    assert items.table.stats().table_step == 1
    assert items.table.stats().num_rows == 0


@pytest.mark.case("C007")
@pytest.mark.parametrize("padding_idx", [0, -1])
def test_the_padding_row_reads_zero_and_gets_no_gradient_as_in_torch(cluster: LocalCluster, padding_idx: int) -> None:
    local = nn.Embedding(6, 3, padding_idx, sparse=True)
    remote = like(cluster, local)
    local_adam, sparse = torch.optim.SparseAdam(local.parameters(), lr=0.1), SparseAdam([remote], lr=0.1)
    ids = torch.tensor([[0, 5], [2, 5], [0, 0]])
    for _ in range(3):
        local(ids).square().sum().backward()
        remote(ids).square().sum().backward()
        local_adam.step()
        sparse.step()
        local_adam.zero_grad()
        sparse.zero_grad()
    assert_rows_follow(remote, local)
    assert not remote(torch.tensor([padding_idx % 6])).any()


@pytest.mark.case("C014")
def test_amsgrad_and_unknown_options_are_refused_with_what_is_supported(cluster: LocalCluster) -> None:
    items = make(cluster, None, 4)
    supported = "lr, betas, eps, maximize, weight_decay, decoupled_weight_decay"
    with pytest.raises(BadOption, match=f"does not know amsgrad; supported are {supported}"):
        SparseAdam([items], amsgrad=True)
    with pytest.raises(BadOption, match=f"does not know fused, momentum; supported are {supported}"):
        SparseAdam([{"params": [items], "momentum": 0.9, "fused": True}])
    for refused in (
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": "fast"},
        {"betas": (0.9, 1.0)},
        {"betas": 0.9},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"maximize": 1},
    ):
        with pytest.raises(BadOption):
            SparseAdam([items], **refused)
        with pytest.raises(BadOption):
            SparseAdam([{"params": [items], **refused}])
    no_modules: list[list[object]] = [[], [nn.Linear(2, 2)], [{"params": []}]]
    for modules in no_modules:
        with pytest.raises(BadOption):
            SparseAdam(modules)  # type: ignore[arg-type]  # what a caller may pass by mistake


@pytest.mark.case("C016")
def test_the_learning_rate_is_read_at_each_step_and_copied(cluster: LocalCluster) -> None:
    items = Embedding(None, 1, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    other = Embedding(None, 1, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    rate = torch.tensor(0.1)
    sparse = SparseAdam([{"params": [items], "lr": rate}, {"params": [other], "lr": 0.1}])
    for value in (0.1, 0.01):
        rate.fill_(value)
        (items(torch.tensor([1])) + other(torch.tensor([1]))).sum().backward()
        sparse.step()
        rate.fill_(1e3)  # after the push: no part of it
        sparse.zero_grad()
    np.testing.assert_allclose(items.table.pull([1]), -0.1099999661, rtol=1e-5)
    np.testing.assert_allclose(other.table.pull([1]), -0.2, rtol=1e-5)
    last = items.table.stats().last_options
    assert last is not None
    assert last.lr == pytest.approx(0.01)


@pytest.mark.case("C016")
def test_a_scheduler_reaches_the_shards_and_may_go_to_zero(cluster: LocalCluster) -> None:
    local = nn.Embedding(10, 3, sparse=True)
    remote = like(cluster, local)
    optimizers = [torch.optim.SparseAdam(local.parameters(), lr=0.1), SparseAdam([remote], lr=0.1)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: [0.0, 0.5, 2.0, 1.0][epoch % 4]) for one in optimizers]
    for module, optimizer, schedule in zip((local, remote), optimizers, schedules, strict=True):
        for _ in range(6):
            module(torch.tensor([1, 4, 4])).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert_rows_follow(remote, local)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], max_lr=0.2, total_steps=4, cycle_momentum=False)
    remote(torch.tensor([1])).sum().backward()
    optimizers[1].step()
    cycle.step()
    optimizers[1].synchronize()  # type: ignore[attr-defined]  # a SparseAdam
    optimizers[1].param_groups[0]["lr"] = -0.1
    remote(torch.tensor([1])).sum().backward()
    with pytest.raises(BadOption, match="lr must be"):
        optimizers[1].step()


@pytest.mark.case("C022")
def test_clipping_by_norm_sees_the_summed_gradient_of_duplicates(cluster: LocalCluster) -> None:
    local = nn.Embedding(10, 3)  # dense: torch cannot clip sparse gradients
    remote = like(cluster, local)
    local_adam, sparse = torch.optim.SGD(local.parameters(), lr=0.0), SparseAdam([remote], lr=0.1)
    for module in (local, remote):
        (module(torch.tensor([2, 2, 5])) * 3.0).sum().backward()
    expected = nn.utils.clip_grad_norm_(local.parameters(), 1.0)
    norm = nn.utils.clip_grad_norm_(sparse.parameters(), 1.0)
    torch.testing.assert_close(norm, expected)
    sparse.step()
    gradient = local.weight.grad
    assert gradient is not None
    rows = torch.from_numpy(remote.table.rows([2, 5]).exp_avg)
    torch.testing.assert_close(rows, 0.1 * gradient[[2, 5]])
    del local_adam


def test_gradients_accumulate_over_backwards_and_a_gradient_is_pushed_once(cluster: LocalCluster) -> None:
    items = Embedding(None, 1, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    sparse = SparseAdam([items], lr=0.1)
    for ids in ([1], [1, 2], [2, 3, 3]):
        items(torch.tensor(ids)).sum().backward()
    sparse.step()
    np.testing.assert_allclose(items.table.rows([1, 2, 3]).exp_avg[:, 0], [0.2, 0.2, 0.2], rtol=1e-6)
    sparse.step()
    assert items.table.stats().table_step == 1
    items(torch.tensor([7])).sum().backward()  # no zero_grad between: what was pushed is not pushed again
    sparse.step()
    assert items.table.stats().table_step == 2
    np.testing.assert_allclose(items.table.rows([1, 7]).exp_avg[:, 0], [0.2, 0.1], rtol=1e-6)


def test_zero_grad_before_step_drops_the_gradient_and_no_grad_keeps_nothing(cluster: LocalCluster) -> None:
    items = make(cluster, None, 2)
    sparse = SparseAdam([items], lr=0.1)
    items(torch.tensor([1])).sum().backward()
    sparse.zero_grad()
    with torch.no_grad():
        assert not items(torch.tensor([1])).requires_grad
    with torch.inference_mode():
        items(torch.tensor([1]))
    sparse.step()
    assert items.table.stats().table_step == 0
    assert next(iter(sparse.parameters())).grad is None


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(cluster: LocalCluster) -> None:
    items = make(cluster, None, 2)
    sparse = SparseAdam([items], lr=0.1)

    def closure() -> float:
        sparse.zero_grad()
        loss = items(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return float(loss.item())

    with torch.no_grad():
        first, second = sparse.step(closure), sparse.step(closure)
    assert second < first
    assert items.table.stats().table_step == 2


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scaler_unscales_and_an_inf_pushes_nothing(cluster: LocalCluster, unscale_first: bool) -> None:
    items = Embedding(None, 1, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    head = nn.Linear(1, 1)
    sparse, dense = SparseAdam([items], lr=0.1), torch.optim.SGD(head.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, math.inf, 1.0):
        loss = (items(torch.tensor([1, 1])) * factor).sum() + head(torch.zeros(1, 1)).sum()
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(sparse)
        scaler.step(sparse)
        scaler.step(dense)
        scaler.update()
        sparse.zero_grad()
        dense.zero_grad()
    assert scaler.get_scale() == 512.0
    rows = items.table.rows([1])
    assert rows.step.tolist() == [2]
    np.testing.assert_allclose(rows.exp_avg, [[0.38]], rtol=1e-6)  # 0.1 * 2, then + 0.1 * (2 - 0.2)


def test_a_step_that_is_refused_here_keeps_its_gradient_and_sends_nothing(cluster: LocalCluster) -> None:
    first, second = make(cluster, None, 2), make(cluster, None, 2)
    sparse = SparseAdam([first, second], lr=0.1)
    first(torch.tensor([1])).sum().backward()
    (second(torch.tensor([4])) * math.nan).sum().backward()
    for _ in range(2):
        with pytest.raises(NonFiniteGradient, match=r"ids \[4\]"):
            sparse.step()
    sparse.zero_grad()
    sparse.step()
    assert (first.table.stats().table_step, second.table.stats().table_step) == (0, 0)


def test_an_error_of_a_queued_push_is_raised_by_the_next_step_which_is_kept(cluster: LocalCluster) -> None:
    items = make(cluster, None, 2)
    limited = cluster.create_table(TableSpec(next(_names), 2, max_rows_per_shard=1))
    rows = np.ones((100, 2), np.float32)
    too_many = merged_gradient(limited.info(), np.arange(100), rows, AdamOptions(), 1.0)
    sparse = SparseAdam([items], lr=0.1)
    items(torch.tensor([1])).sum().backward()
    sparse.step()
    cluster._queue_push([too_many])
    with pytest.raises(RowLimit):
        sparse.synchronize()
    sparse.zero_grad()
    items(torch.tensor([1])).sum().backward()
    cluster._queue_push([too_many])
    wait_for("the queue to be sent", lambda: cluster._pusher._num_finished == cluster._pusher._num_submitted)
    with pytest.raises(RowLimit):
        sparse.step()
    sparse.step()
    assert items.table.stats().table_step == 2


def test_state_dict_carries_hyper_parameters_and_loads(cluster: LocalCluster) -> None:
    items = make(cluster, None, 2)
    saved = SparseAdam([items], lr=0.3, betas=(0.8, 0.99)).state_dict()
    sparse = SparseAdam([items], lr=0.1)
    sparse.load_state_dict(saved)
    items(torch.tensor([1])).sum().backward()
    sparse.step()
    last = items.table.stats().last_options
    assert last == AdamOptions(lr=0.3, betas=(0.8, 0.99))
    assert saved["state"] == {}
    local = torch.optim.SparseAdam(nn.Embedding(2, 2, sparse=True).parameters(), lr=0.7)
    sparse.load_state_dict(local.state_dict())
    assert sparse.param_groups[0]["lr"] == 0.7
    with pytest.raises(BadOption, match="holds moments"):
        sparse.load_state_dict({**saved, "state": {0: {"step": 1}}})
    assert pickle.loads(pickle.dumps(saved)) == saved
