"""State of torch.nn.Embedding and torch.optim.SparseAdam in, training on shards, and out again to torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardam
from shardam import AdamOptions, Embedding, EmbeddingBag, LocalCluster, SparseAdam
from shardam.errors import BadOption, CheckpointMismatch, NonFiniteState, ShardamError, StaleState, WrongShape

HYPER = {"lr": 0.03, "betas": (0.5, 0.99), "eps": 1e-6}
_names = (f"state_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


Local = tuple[nn.Embedding, torch.optim.SparseAdam]


def local_pair(num_rows: int = 50, dim: int = 6, **options: object) -> Local:
    torch.manual_seed(0)
    embedding = nn.Embedding(num_rows, dim, sparse=True)
    return embedding, torch.optim.SparseAdam(embedding.parameters(), **(HYPER | options))  # type: ignore[arg-type]


def batch(step: int, num_rows: int = 50) -> tuple[Tensor, Tensor]:
    """Returns ids, none more than twice (torch's sum of more is of no fixed order), and factors of their outputs."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randperm(num_rows, generator=generator)[:20]
    ids = torch.cat([ids, ids[:5]])
    return ids, torch.randn(25, 6, generator=generator)


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids, factors = batch(step)
    optimizer.zero_grad()
    (module(ids) * factors).sum().backward()
    optimizer.step()


def assert_close(one: Local, other: Local, steps: int) -> None:
    """Holds two local pairs against each other at the contract's tolerance: m and v the same bits, w within ulps a step."""
    states = [optimizer.state_dict()["state"][0] for _, optimizer in (one, other)]
    assert states[0]["step"] == states[1]["step"]
    assert type(states[0]["step"]) is type(states[1]["step"])
    for name in ("exp_avg", "exp_avg_sq"):
        assert states[0][name].dtype == states[1][name].dtype
        assert torch.equal(states[0][name], states[1][name])
    first, second = one[0].weight.detach().numpy(), other[0].weight.detach().numpy()
    ulp = np.spacing(np.maximum(np.abs(first), np.float32(HYPER["lr"])))  # type: ignore[arg-type]
    assert (np.abs(first - second) <= 4 * steps * ulp).all()


@pytest.mark.case("C018")
def test_torch_state_in_trained_on_shards_and_out_goes_on_as_if_it_had_stayed_local(cluster: LocalCluster) -> None:
    stayed = local_pair()
    for step in range(10):
        step_of(*stayed, step)
    went = copy.deepcopy(stayed[0]), None
    items = Embedding(50, 6, table=next(_names), cluster=cluster)
    report = items.import_state_dict(went[0].state_dict(), stayed[1].state_dict())
    assert report.options == AdamOptions(lr=0.03, betas=(0.5, 0.99), eps=1e-6)
    assert (report.num_rows, report.table_step, report.moments) == (50, 10, True)
    sparse = SparseAdam([items], lr=report.options.lr, betas=report.options.betas, eps=report.options.eps)
    for step in range(10, 20):
        step_of(*stayed, step)
        step_of(items, sparse, step)
    module_state, optimizer_state = items.export_state_dict()
    back = local_pair()
    back[0].load_state_dict(module_state)
    back[1].load_state_dict(optimizer_state)
    assert back[1].state_dict()["param_groups"] == stayed[1].state_dict()["param_groups"]
    assert_close(stayed, back, 10)
    for step in range(20, 30):
        step_of(*stayed, step)
        step_of(*back, step)
    assert_close(stayed, back, 20)


@pytest.mark.case("C018")
def test_other_betas_than_the_states_change_what_follows(cluster: LocalCluster) -> None:
    stayed = local_pair()
    for step in range(5):
        step_of(*stayed, step)
    weights = {}
    for betas in ((0.5, 0.99), (0.9, 0.999)):
        items = Embedding(50, 6, table=next(_names), cluster=cluster)
        items.import_state_dict(stayed[0].state_dict(), stayed[1].state_dict())
        step_of(items, SparseAdam([items], lr=0.03, betas=betas, eps=1e-6), 5)
        weights[betas] = torch.from_numpy(items.table.pull(range(50)))
    step_of(*stayed, 5)
    torch.testing.assert_close(weights[0.5, 0.99], stayed[0].weight.detach(), rtol=1e-6, atol=1e-7)
    assert (weights[0.9, 0.999] - stayed[0].weight.detach()).abs().max() > 1e-3


def test_a_bag_and_a_model_with_named_parameters_give_and_take_state(cluster: LocalCluster) -> None:
    torch.manual_seed(0)
    tags = nn.EmbeddingBag(8, 6, mode="sum", sparse=True)
    model = nn.ModuleDict({"first": nn.Embedding(4, 2, sparse=True), "tags": tags})
    optimizer = torch.optim.SparseAdam(list(model.named_parameters()), lr=0.1)
    tags(torch.tensor([[1, 2], [3, 3]])).sum().backward()
    optimizer.step()
    for param in (1, "tags.weight"):
        bag = EmbeddingBag(8, 6, mode="sum", table=next(_names), cluster=cluster)
        report = bag.import_state_dict(model.state_dict(), optimizer.state_dict(), name="tags.weight", param=param)
        assert report.table_step == 1
        exported = bag.export_state_dict(name="tags.weight", options=report.options)
        assert torch.equal(exported[0]["tags.weight"], tags.weight)
        kept = optimizer.state_dict()["state"][1]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(exported[1]["state"][0][name], kept[name])  # type: ignore[index]
    never = Embedding(4, 2, table=next(_names), cluster=cluster)  # its parameter took no step, and torch keeps no state of it
    assert never.import_state_dict(model.state_dict(), optimizer.state_dict(), name="first.weight").table_step == 0
    assert never.export_state_dict()[1]["state"] == {}


def test_rows_of_an_unbounded_table_are_named_by_ids(cluster: LocalCluster) -> None:
    stayed = local_pair(4)
    ids = torch.tensor([2**53 + 1, -1, 7, -(2**63)])
    stayed[0](torch.tensor([0, 2])).sum().backward()
    stayed[1].step()
    items = Embedding(None, 6, table=next(_names), cluster=cluster)
    report = items.import_state_dict(stayed[0].state_dict(), stayed[1].state_dict(), ids=ids)
    assert (report.num_rows, items.table.stats().num_rows) == (4, 4)
    order = torch.tensor([3, 0, 2])
    module_state, optimizer_state = items.export_state_dict(ids=ids[order], options=report.options)
    assert torch.equal(module_state["weight"], stayed[0].weight[order])
    kept = stayed[1].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(optimizer_state["state"][0]["exp_avg"], kept[order])  # type: ignore[index]
    for call in (lambda: items.import_state_dict(stayed[0].state_dict()), lambda: items.export_state_dict()):
        with pytest.raises(BadOption, match=r"unbounded.*ids=\[...\]"):
            call()
    with pytest.raises(WrongShape, match="named twice"):
        items.import_state_dict(stayed[0].state_dict(), ids=[1, 1, 2, 3])
    bounded = Embedding(4, 6, table=next(_names), cluster=cluster)
    with pytest.raises(BadOption, match="leave ids out"):
        bounded.import_state_dict(stayed[0].state_dict(), ids=[0, 1, 2, 3])


def test_a_table_in_use_is_only_replaced_when_told_to(cluster: LocalCluster) -> None:
    stayed = local_pair()
    step_of(*stayed, 0)
    items = Embedding(50, 6, table=next(_names), cluster=cluster)
    step_of(items, SparseAdam([items], lr=0.1), 0)
    with pytest.raises(CheckpointMismatch, match="overwrite=True"):
        items.import_state_dict(stayed[0].state_dict(), stayed[1].state_dict())
    items.import_state_dict(stayed[0].state_dict(), stayed[1].state_dict(), overwrite=True)
    assert torch.equal(items.export_state_dict()[0]["weight"], stayed[0].weight)
    step_of(*stayed, 1)
    with pytest.raises(CheckpointMismatch, match="has taken 1 steps and the state_dict has step 2"):
        items.import_state_dict(stayed[0].state_dict(), stayed[1].state_dict(), overwrite=True)
    report = items.import_state_dict(stayed[0].state_dict(), overwrite=True)
    assert (report.moments, report.table_step) == (False, 1)
    assert not items.table.rows(range(50)).exp_avg.any()


def test_state_that_does_not_fit_is_refused_before_anything_is_written(cluster: LocalCluster) -> None:
    stayed = local_pair()
    step_of(*stayed, 0)
    module, optimizer = stayed[0].state_dict(), stayed[1].state_dict()
    bad = copy.deepcopy(optimizer)
    bad["state"][0]["exp_avg_sq"][3, 1] = -1.0
    short = copy.deepcopy(optimizer)
    short["state"][0]["exp_avg"] = short["state"][0]["exp_avg"][:40]
    illegal = copy.deepcopy(optimizer)
    illegal["param_groups"][0]["betas"] = (0.5, 1.5)
    dense = torch.optim.Adam(stayed[0].parameters()).state_dict()
    items = Embedding(50, 6, table=next(_names), cluster=cluster)
    refused: list[tuple[dict[str, object], object, dict[str, object], type[ShardamError], str]] = [
        ({"weight": torch.ones(50, 5)}, None, {}, WrongShape, r"\(50, 5\); weight must have shape \(50, 6\)"),
        ({"weight": torch.full((50, 6), torch.inf)}, None, {}, NonFiniteState, "weight must be finite"),
        (module, None, {"name": "items.weight"}, BadOption, r"no tensor 'items.weight', it has \['weight'\]"),
        (module, bad, {}, NonFiniteState, r"exp_avg_sq must be finite and not negative; it is not for ids \[3\]"),
        (module, short, {}, WrongShape, r"exp_avg must have shape \(50, 6\)"),
        (module, illegal, {}, BadOption, r"betas\[1\] must be in"),
        (module, optimizer, {"param": 1}, BadOption, "no parameter 1; it has"),
        (module, dense, {}, BadOption, "not torch.optim.SparseAdam's"),
        (module, module, {}, BadOption, "not torch.optim.SparseAdam's"),
    ]
    for module_state, optimizer_state, more, error, words in refused:
        with pytest.raises(error, match=words):
            items.import_state_dict(module_state, optimizer_state, **more)  # type: ignore[arg-type]
    assert (items.table.stats().num_rows, items.table.stats().table_step) == (0, 0)


def test_what_torch_has_no_word_for_is_said(cluster: LocalCluster) -> None:
    own = Embedding(50, 6, table=next(_names), cluster=cluster, step="row")
    stayed = local_pair()
    step_of(*stayed, 0)
    with pytest.raises(BadOption, match="counts the steps of each row"):
        own.import_state_dict(stayed[0].state_dict(), stayed[1].state_dict())
    assert own.import_state_dict(stayed[0].state_dict()).moments is False
    with pytest.raises(BadOption, match=r"table.export\(path\)"):
        own.export_state_dict()
    items = Embedding(50, 6, table=next(_names), cluster=cluster)
    step_of(items, SparseAdam([items], lr=0.1, weight_decay=0.01), 0)
    with pytest.raises(BadOption, match=r"no weight decay, and the last push had 0\.01"):
        items.export_state_dict()
    group = items.export_state_dict(options=AdamOptions(lr=0.5))[1]["param_groups"][0]  # type: ignore[index]
    assert group == {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False, "params": [0]}


def test_a_push_of_another_worker_while_state_is_read_is_noticed(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = Embedding(50, 6, table=next(_names), cluster=cluster)
    table = items.table
    rows = table.rows

    def rows_and_push(row_ids: object) -> shardam.Rows:
        found = rows(row_ids)  # type: ignore[arg-type]
        table.push([1], np.ones((1, 6), np.float32), AdamOptions())
        return found

    monkeypatch.setattr(table, "rows", rows_and_push)
    with pytest.raises(StaleState, match="step 0 before, 1 after"):
        items.export_state_dict()


def test_a_low_precision_table_takes_and_gives_float32(cluster: LocalCluster) -> None:
    stayed = local_pair()
    step_of(*stayed, 0)
    items = Embedding(50, 6, table=next(_names), cluster=cluster, dtype="bfloat16")
    items.import_state_dict({"weight": stayed[0].weight.bfloat16()}, stayed[1].state_dict())
    module_state, optimizer_state = items.export_state_dict(options=AdamOptions())
    assert module_state["weight"].dtype == torch.float32
    assert torch.equal(module_state["weight"], stayed[0].weight.bfloat16().float())
    assert torch.equal(optimizer_state["state"][0]["exp_avg"], stayed[1].state_dict()["state"][0]["exp_avg"])  # type: ignore[index]
