"""How the modules sit in torch's machinery: what a forward keeps, checkpointing, copies and averages, scalers, schedules."""

from __future__ import annotations

import gc
import itertools
import math
import re
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardam
from shardam import Embedding, EmbeddingBag, EmbeddingCollection, LocalCluster, SparseAdam
from shardam.errors import BadOption

_names = (f"mechanism_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def make(cluster: LocalCluster, dim: int = 4, **options: bool) -> Embedding:
    return Embedding(None, dim, table=next(_names), cluster=cluster, **options)  # type: ignore[arg-type]  # trainable alone


def messages(cluster: LocalCluster, kind: str) -> int:
    """Messages of a kind, "pulls" or "pushes", that the shards have answered."""
    total = 0
    for shard in cluster.shards:
        with urllib.request.urlopen(f"http://{shard.http_address}/metrics", timeout=30) as answer:
            found = re.findall(rf"^shardam_{kind}_total{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)
        total += sum(int(float(value)) for value in found)
    return total


def kept(module: Embedding | EmbeddingBag) -> int:
    return sum(reference() is not None for reference in module._gradient._kept)


# -- what a forward keeps


def test_no_grad_inference_and_frozen_forwards_keep_nothing(cluster: LocalCluster) -> None:
    items, frozen = make(cluster), make(cluster, trainable=False)
    SparseAdam([items])
    with torch.no_grad():
        outputs = [items(torch.tensor([1]))]
    with torch.inference_mode():
        outputs.append(items(torch.tensor([1])))
    outputs.append(frozen(torch.tensor([1])))
    assert not any(output.requires_grad for output in outputs)
    assert (kept(items), kept(frozen)) == (0, 0)


def test_eval_mode_trains_as_in_torch_and_what_was_kept_goes_with_the_graph(cluster: LocalCluster) -> None:
    items = make(cluster).eval()
    sparse = SparseAdam([items], lr=0.1)
    outputs = [items(torch.tensor([row_id])) for row_id in range(3)]
    assert kept(items) == 3
    outputs[0].sum().backward()
    del outputs
    assert kept(items) == 0
    sparse.step()
    assert items.table.rows([0, 1, 2]).found.tolist() == [True, False, False]


def test_ids_come_from_any_thread_and_backwards_merge(cluster: LocalCluster) -> None:
    import concurrent.futures

    items = Embedding(None, 1, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    sparse = SparseAdam([items], lr=0.1)

    def use(row_id: int) -> None:
        items(torch.tensor([row_id % 4])).sum().backward()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(64)))
    sparse.step()
    np.testing.assert_allclose(items.table.rows(range(4)).exp_avg, 0.1 * 16, rtol=1e-6)


# -- activation checkpointing


@pytest.mark.parametrize("kind", ["embedding", "bag", "collection"])
def test_a_checkpointed_lookup_trains_alike_and_asks_no_shard_in_backward(cluster: LocalCluster, kind: str) -> None:
    items = make(cluster)
    bags = EmbeddingBag(None, 4, mode="sum", table=next(_names), cluster=cluster)
    collection = EmbeddingCollection({"items": items, "bags": bags})
    sparse = SparseAdam(collection, lr=0.1)
    head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ids = torch.tensor([[1, 2, 2], [3, 1, 1]])
    weights = torch.tensor([[0.5, 2.0, 1.0], [1.0, -1.0, 3.0]], requires_grad=True)

    def block(ids: torch.Tensor) -> torch.Tensor:
        if kind == "embedding":
            rows = items(ids).sum(1)
        elif kind == "bag":
            rows = bags(ids, None, weights)
        else:
            found = collection({"items": ids[:, 0], "bags": ids})
            rows = found["items"] * found["bags"]
        result: torch.Tensor = head(rows)
        return result.square()

    found: list[list[torch.Tensor | None]] = []
    for checkpointed in (False, True):
        weights.grad = None
        loss = (checkpoint(block, ids, use_reentrant=False) if checkpointed else block(ids)).sum()
        pulls = messages(cluster, "pulls")
        loss.backward()
        assert messages(cluster, "pulls") == pulls
        found.append([items._gradient.proxy.grad, bags._gradient.proxy.grad, weights.grad])
        sparse.zero_grad()
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None)
        if plain is not None and again is not None:
            assert torch.equal(again, plain)


def test_a_checkpointed_forward_sees_the_rows_of_its_own_forward_not_of_later_pushes(cluster: LocalCluster) -> None:
    items = make(cluster)
    sparse = SparseAdam([items], lr=0.1)
    ids, seen = torch.tensor([1, 2]), []

    def block(ids: torch.Tensor) -> torch.Tensor:
        rows = items(ids)
        seen.append(rows.detach().clone())
        return torch.square(rows)

    loss = checkpoint(block, ids, use_reentrant=False).sum()
    items.table.push([1, 2], np.ones((2, 4), np.float32), shardam.AdamOptions(lr=1.0))
    loss.backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert not np.array_equal(items.table.pull([1, 2]), seen[0].numpy())
    gradient = items._gradient.proxy.grad
    assert gradient is not None
    assert torch.equal(gradient, 2 * seen[0])
    sparse.zero_grad()


def test_a_reentrant_checkpoint_whose_first_forward_keeps_nothing_is_refused_with_the_remedy(cluster: LocalCluster) -> None:
    items = make(cluster)
    sparse = SparseAdam([items], lr=0.1)
    hidden = torch.ones(2, 4, requires_grad=True)

    def block(ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.mul(items(ids), hidden)

    loss = checkpoint(block, torch.tensor([1, 2]), hidden, use_reentrant=True).sum()
    with pytest.raises(BadOption, match="use_reentrant=False"):
        loss.backward()
    sparse.step()
    assert items.table.stats().table_step == 0


def test_a_forward_inside_a_backward_may_look_at_a_part_of_the_rows_and_at_no_others(cluster: LocalCluster) -> None:
    items = make(cluster)
    sparse = SparseAdam([items], lr=0.1)
    wanted, seen = [torch.tensor([5, 2])], []
    output = items(torch.tensor([1, 2, 5]))

    def look(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            seen.append(items(wanted[0]))

    output.register_hook(look)
    pulls = messages(cluster, "pulls")
    output.sum().backward(retain_graph=True)
    assert torch.equal(seen[0], output.detach()[[2, 1]])
    wanted[0] = torch.tensor([5, 6])
    with pytest.raises(BadOption, match="a forward inside a backward"):
        output.sum().backward()
    assert messages(cluster, "pulls") == pulls
    sparse.zero_grad()


# -- schedules, averages, compilation


def test_one_cycle_with_cycled_betas_follows_torch(cluster: LocalCluster) -> None:
    torch.manual_seed(0)
    local = nn.Embedding(10, 3, sparse=True)
    remote = Embedding(10, 3, table=next(_names), cluster=cluster)
    remote.table.assign(range(10), local.weight)
    optimizers = [torch.optim.SparseAdam(local.parameters(), lr=0.1), SparseAdam([remote], lr=0.1)]
    for module, optimizer in zip((local, remote), optimizers, strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
        for _ in range(8):
            module(torch.tensor([1, 4, 4])).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]
    pulled = torch.from_numpy(remote.table.pull(range(10)))
    torch.testing.assert_close(pulled, local.weight.detach(), rtol=1e-5, atol=1e-6)
    saved = optimizers[1].state_dict()
    again = SparseAdam([remote], lr=0.1)
    again.load_state_dict(saved)
    assert again.param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


def test_an_averaged_model_averages_the_dense_part_and_shares_the_rows(cluster: LocalCluster) -> None:
    items, head = make(cluster), nn.Linear(4, 1)
    model = nn.Sequential(items, head)
    sparse, dense = SparseAdam([items], lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    shared, mean = averaged.module.children()
    assert isinstance(shared, Embedding)
    assert isinstance(mean, nn.Linear)
    weights = []
    for _ in range(3):
        model(torch.tensor([1, 2])).sum().backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
        averaged.update_parameters(model)
        weights.append(head.weight.detach().clone())
    torch.testing.assert_close(mean.weight.detach(), torch.stack(weights).mean(0))
    assert shared.table is items.table
    with torch.no_grad():
        assert torch.equal(shared(torch.tensor([1])), items(torch.tensor([1])))


# dynamo hides this warning of its own where warnings are printed, which is too late where they are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("kind", ["bag", "collection"])
def test_a_compiled_model_breaks_the_graph_for_bags_and_collections(cluster: LocalCluster, kind: str) -> None:
    bags = EmbeddingBag(None, 4, mode="sum", table=next(_names), cluster=cluster)
    collection = EmbeddingCollection({"bags": bags})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup: nn.Module = bags if kind == "bag" else collection
            self.head = nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = self.lookup(ids * 2) if kind == "bag" else self.lookup({"bags": ids * 2})["bags"]
            result: torch.Tensor = self.head(rows + 1.0)
            return result

    model = Model()
    sparse = SparseAdam([bags], lr=0.1)
    compiled = torch.compile(model, backend="eager")
    ids = torch.tensor([[1, 2], [2, 5]])
    torch.testing.assert_close(compiled(ids), model(ids))
    compiled(ids).sum().backward()
    sparse.step()
    assert bags.table.rows([2, 4, 10]).found.all()
    assert bags.table.stats().table_step == 1


# -- abstaining: without a group, nothing is sent


def test_in_async_mode_a_step_without_a_usable_gradient_sends_nothing(cluster: LocalCluster) -> None:
    items = make(cluster)
    sparse = SparseAdam([items], lr=0.1)
    scaler = shardam.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    pushes = messages(cluster, "pushes")
    scaler.scale((items(torch.tensor([1])) * math.inf).sum()).backward()
    scaler.step(sparse)
    scaler.update()
    sparse.synchronize()
    items(torch.tensor([1])).sum().backward()  # what the scaler refused is not added to the next gradient
    sparse.zero_grad()
    sparse.step()
    sparse.step()
    sparse.synchronize()
    assert messages(cluster, "pushes") == pushes
    assert scaler.get_scale() == 2.0
    scaler.scale(items(torch.tensor([1])).sum()).backward()
    scaler.step(sparse)
    scaler.update()
    sparse.synchronize()
    assert messages(cluster, "pushes") == pushes + 2
    np.testing.assert_allclose(items.table.rows([1]).exp_avg, 0.1, rtol=1e-6)


@pytest.mark.parametrize("ours", [False, True])
def test_a_scaler_works_where_no_sparse_gradient_is(cluster: LocalCluster, ours: bool) -> None:
    items, head = make(cluster), nn.Linear(4, 1)
    sparse, dense = SparseAdam([items], lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    scaler = shardam.GradScaler("cpu", init_scale=4.0) if ours else torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(head(torch.ones(1, 4)).sum()).backward()
    scaler.step(sparse)
    scaler.step(dense)
    scaler.update()
    assert items.table.stats().table_step == 0
    assert scaler.get_scale() == 4.0


def test_a_clipped_gradient_is_pushed_as_clipped_under_a_scaler(cluster: LocalCluster) -> None:
    items = Embedding(None, 2, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    sparse = SparseAdam([items], lr=0.1)
    scaler = shardam.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((items(torch.tensor([1, 1])) * torch.tensor([1.5, 2.0])).sum()).backward()  # [3, 4], of norm 5
    scaler.unscale_(sparse)
    norm = nn.utils.clip_grad_norm_(sparse.parameters(), 1.0)
    scaler.step(sparse)
    scaler.update()
    assert float(norm) == pytest.approx(5.0)
    np.testing.assert_allclose(items.table.rows([1]).exp_avg, [[0.06, 0.08]], rtol=1e-5)
    items(torch.tensor([1])).sum().backward()
    nn.utils.clip_grad_value_(sparse.parameters(), 0.25)
    sparse.zero_grad()
    items(torch.tensor([2])).mul(7.0).sum().backward()
    nn.utils.clip_grad_value_(sparse.parameters(), 0.25)
    sparse.step()
    np.testing.assert_allclose(items.table.rows([2]).exp_avg, 0.025, rtol=1e-6)


def test_a_former_optimizer_in_a_cycle_does_not_count_as_an_owner(cluster: LocalCluster) -> None:
    items = make(cluster)
    first = SparseAdam([items])
    torch.optim.lr_scheduler.LambdaLR(first, lambda _: 1.0)  # refers to the optimizer, which refers back
    del first
    sparse = SparseAdam([items], lr=0.1)
    items(torch.tensor([1])).sum().backward()
    sparse.step()
    gc.collect()
    assert items.table.stats().table_step == 1
