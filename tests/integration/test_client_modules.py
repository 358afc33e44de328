"""What the Embedding module offers and refuses, beside torch's own, on a real cluster."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardam
from shardam import Embedding, LocalCluster, SparseAdam
from shardam.errors import BadOption, IdOutOfRange, SchemaMismatch, WrongIdDtype

_names = (f"module_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def make(cluster: LocalCluster, num_embeddings: int | None = None, dim: int = 4, padding_idx: int | None = None) -> Embedding:
    return Embedding(num_embeddings, dim, padding_idx, table=next(_names), cluster=cluster)


@pytest.mark.case("C033")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 4), (0, 2)])
def test_ids_of_any_shape_and_integer_dtype_read_their_rows(
    cluster: LocalCluster, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    items = make(cluster)
    ids = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        output = items(ids)
    assert output.shape == (*shape, 4)
    expected = torch.from_numpy(items.table.pull(ids.reshape(-1))).reshape(*shape, 4)
    assert torch.equal(output, expected)


def test_flags_and_devices_that_are_none_are_refused_at_construction(cluster: LocalCluster) -> None:
    before = len(cluster.tables())
    absent = f"cuda:{torch.cuda.device_count()}"
    wrong: list[tuple[dict[str, object], str]] = [
        ({"trainable": "no"}, "trainable must be True or False, got 'no'"),
        ({"device": "gpu"}, "device must be one that torch knows, .*got 'gpu'"),
        ({"device": absent}, f"device '{absent}' is not there"),
    ]
    for make_module in (Embedding, shardam.EmbeddingBag):
        for given, message in wrong:
            with pytest.raises(BadOption, match=message):
                make_module(None, 4, table=next(_names), cluster=cluster, **given)  # type: ignore[arg-type]
        for flag in ("freeze", "overwrite"):
            with pytest.raises(BadOption, match=f"{flag} must be True or False, got 'no'"):
                make_module.from_pretrained(torch.ones(1, 4), table=next(_names), cluster=cluster, **{flag: "no"})  # type: ignore[arg-type]
    assert len(cluster.tables()) == before


def test_ids_that_are_no_integers_or_out_of_range_are_refused(cluster: LocalCluster) -> None:
    items = make(cluster, 10)
    for ids in (torch.tensor([1.0]), torch.tensor([True]), np.array(["a"])):
        with torch.no_grad(), pytest.raises(WrongIdDtype):
            items(ids)
    for row_id in (10, -1):
        with torch.no_grad(), pytest.raises(IdOutOfRange, match=f"num_embeddings=10.*{row_id}"):
            items(torch.tensor([[1], [row_id]]))


@pytest.mark.case("C020")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_may_be_16_bit_and_duplicates_are_still_summed_in_float32(cluster: LocalCluster, dtype: torch.dtype) -> None:
    items = Embedding(None, 1, table=next(_names), cluster=cluster, output_dtype=dtype)
    sparse = SparseAdam([items], lr=0.1)
    output = items(torch.tensor([3] * 300))
    assert output.dtype == dtype
    (output * 255.0).sum().backward()
    sparse.step()
    np.testing.assert_allclose(items.table.rows([3]).exp_avg, [[0.1 * 300 * 255.0]], rtol=1e-6)


def test_the_gradient_is_that_of_torch_through_a_model(cluster: LocalCluster) -> None:
    torch.manual_seed(0)
    local, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)
    remote = make(cluster, 20)
    remote.table.assign(range(20), local.weight)
    sparse = SparseAdam([remote])
    ids, targets = torch.randint(0, 20, (64,)), torch.randint(0, 3, (64,))
    for module in (local, remote):
        nn.functional.cross_entropy(head(module(ids)), targets).backward()
    expected = local.weight.grad
    assert expected is not None
    (proxy,) = sparse.parameters()
    assert proxy.grad is not None
    assert proxy.grad.shape == (ids.unique().numel(), 4)
    assert remote._gradient.row_ids is not None
    torch.testing.assert_close(proxy.grad, expected.to_dense()[remote._gradient.row_ids], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("max_norm", 1.0, "clip with"),
        ("norm_type", 1.0, "only matters with max_norm"),
        ("scale_grad_by_freq", True, "scale the loss"),
        ("sparse", False, "always sparse"),
        ("output_dtype", torch.float64, "must be one of"),
        ("dtype", "float64", "dtype must be one of"),
        ("dtype", torch.float64, "dtype must be one of"),
        ("step", "epoch", "step must be"),
        ("init", 0.5, "shardam.init value"),
        ("table", "a/b", "is not allowed"),
    ],
)
def test_arguments_that_are_not_supported_are_refused_with_the_remedy(
    cluster: LocalCluster, argument: str, value: object, remedy: str
) -> None:
    arguments: dict[str, object] = {"table": next(_names), "cluster": cluster, argument: value}
    with pytest.raises(BadOption, match=remedy):
        Embedding(10, 4, **arguments)  # type: ignore[arg-type]  # what a caller may pass by mistake


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_low_precision_with_row_steps_train_in_float32(cluster: LocalCluster, dtype: torch.dtype) -> None:
    items = Embedding(None, 4, table=next(_names), cluster=cluster, dtype=dtype, step="row")
    sparse = SparseAdam([items], lr=0.1)
    for ids in ([1, 2], [1, 3], [1, 2]):
        rows = items(torch.tensor(ids))
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows, rows.to(dtype).float(), rtol=0, atol=0)
        rows.sum().backward()
        sparse.step()
        sparse.zero_grad()
    state = items.table.rows([1, 2, 3])
    assert state.step.tolist() == [3, 2, 1]
    assert state.exp_avg.dtype == np.float32
    assert items.table.spec.dtype == str(dtype).removeprefix("torch.")


def test_torchs_neutral_arguments_are_accepted_in_torchs_order(cluster: LocalCluster) -> None:
    items = Embedding(10, 4, 2, None, 2.0, False, True, table=next(_names), cluster=cluster, dtype=torch.float32)
    assert (items.num_embeddings, items.embedding_dim, items.padding_idx) == (10, 4, 2)
    assert f"10, 4, padding_idx=2, table='{items.table.name}'" in repr(items)


def test_another_schema_of_the_table_is_refused(cluster: LocalCluster) -> None:
    items = make(cluster, 10)
    with pytest.raises(SchemaMismatch):
        Embedding(10, 8, table=items.table.name, cluster=cluster)


def test_a_training_forward_needs_exactly_one_owner(cluster: LocalCluster) -> None:
    items = make(cluster)
    with pytest.raises(BadOption, match="no SparseAdam has it: make"):
        items(torch.tensor([1]))
    with torch.no_grad():
        items(torch.tensor([1]))
    first, second = SparseAdam([items]), SparseAdam([items])
    with pytest.raises(BadOption, match="belongs to 2 SparseAdam optimizers"):
        items(torch.tensor([1]))
    del second
    gc.collect()
    items(torch.tensor([1])).sum().backward()
    first = SparseAdam([items])  # made anew, as in a notebook: the former one is gone
    items(torch.tensor([1])).sum().backward()
    del first
    gc.collect()
    with pytest.raises(BadOption, match="no SparseAdam has it"):
        items(torch.tensor([1]))


def test_a_table_may_not_be_in_two_groups(cluster: LocalCluster) -> None:
    items = make(cluster)
    again = Embedding(None, 4, table=items.table.name, cluster=cluster)
    with pytest.raises(BadOption, match="is in two param groups"):
        SparseAdam([{"params": [items]}, {"params": [again], "lr": 0.1}])


def test_a_module_that_is_not_trainable_keeps_no_gradient_and_needs_no_owner(cluster: LocalCluster) -> None:
    items = Embedding(None, 4, table=next(_names), cluster=cluster, trainable=False)
    assert not items(torch.tensor([1])).requires_grad


def test_what_a_module_without_parameters_cannot_do_is_said(cluster: LocalCluster) -> None:
    items = make(cluster)
    assert list(items.parameters()) == []
    assert items.state_dict() == {}
    assert not hasattr(items, "weight")
    with pytest.raises(AttributeError, match=r"module\.table\.pull\(ids\)"):
        _ = items.weight
    with pytest.raises(BadOption, match=r"call module\.freeze\(\)"):
        items.requires_grad_(False)
    with pytest.raises(BadOption, match=r"zero_grad\(\) of the SparseAdam that has it"):
        items.zero_grad()
    model = nn.Sequential(items, nn.Linear(4, 1))
    for convert in (model.bfloat16, model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(BadOption, match=r"Make the module with output_dtype=torch\.\w+"):
            convert()
    assert model.float().to("cpu").share_memory() is model
    state = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)).state_dict()
    for strict in (True, False):
        with pytest.raises(BadOption, match=r"module\.import_state_dict\(state_dict, name='0\.weight'\).*from_pretrained"):
            model.load_state_dict(state, strict=strict)
    del state["0.weight"]
    model.load_state_dict(state)


def test_what_goes_through_parameters_alone_cannot_be_seen(cluster: LocalCluster) -> None:
    """Documented: there is nothing that a call on a model around the module could reach."""
    items = make(cluster)
    model = nn.Sequential(items, nn.Linear(4, 1))
    sparse = SparseAdam([items], lr=0.1)
    model(torch.tensor([1])).sum().backward()
    model.zero_grad()
    model.requires_grad_(False)
    sparse.step()
    assert items.table.stats().table_step == 1
    assert items(torch.tensor([1])).requires_grad
    assert "`model.zero_grad()`" in str(Embedding.__doc__)


def test_a_frozen_module_keeps_no_gradient_while_another_of_its_table_trains(cluster: LocalCluster) -> None:
    items = make(cluster)
    looked_at = Embedding(None, 4, table=items.table.name, cluster=cluster)
    sparse = SparseAdam([items], lr=0.1)
    assert looked_at.freeze() is looked_at
    output = items(torch.tensor([1])) + looked_at(torch.tensor([2]))
    output.sum().backward()
    sparse.step()
    assert items.table.rows([1, 2]).found.tolist() == [True, False]
    looked_at.trainable = True
    assert looked_at(torch.tensor([2])).requires_grad


def test_a_deep_copy_shares_the_table_and_its_gradient(cluster: LocalCluster) -> None:
    items = make(cluster)
    model = nn.ModuleDict({"table": items, "head": nn.Linear(4, 1)})
    twin = copy.deepcopy(model)
    sparse = SparseAdam([items], lr=0.1)
    (items(torch.tensor([1])).sum() + twin["table"](torch.tensor([1])).sum()).backward()
    sparse.step()
    rows = items.table.rows([1])
    assert rows.step.tolist() == [1]
    np.testing.assert_allclose(rows.exp_avg, 0.2, rtol=1e-6)


def test_an_optimizer_cannot_be_pickled_or_copied_and_says_what_to_do(cluster: LocalCluster) -> None:
    sparse = SparseAdam([make(cluster)])
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"load_state_dict\(optimizer\.state_dict\(\)\)"):
            copied(sparse)


def test_ddp_wraps_the_dense_part_and_does_not_see_the_rows(cluster: LocalCluster, tmp_path: os.PathLike[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        items = make(cluster)
        model = nn.Sequential(items, nn.Linear(4, 1))
        replica = DistributedDataParallel(model)
        assert {name for name, _ in replica.named_parameters()} == {"module.1.weight", "module.1.bias"}
        sparse, dense = SparseAdam([items], lr=0.1), torch.optim.Adam(replica.parameters(), lr=0.1)
        for _ in range(3):
            replica(torch.tensor([1, 2])).sum().backward()
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
        assert items.table.stats().table_step == 3
    finally:
        dist.destroy_process_group()


def test_a_compiled_model_falls_back_to_eager_for_the_lookup(cluster: LocalCluster) -> None:
    items, head = make(cluster), nn.Linear(4, 1)
    sparse = SparseAdam([items], lr=0.1)
    compiled = torch.compile(nn.Sequential(items, head), backend="eager")
    ids = torch.tensor([1, 2, 2])
    torch.testing.assert_close(compiled(ids), head(items(ids)))
    compiled(ids).sum().backward()
    sparse.step()
    assert items.table.stats().table_step == 1


def test_a_pull_sees_every_push_queued_before(cluster: LocalCluster) -> None:
    items = Embedding(None, 64, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    sparse = SparseAdam([items], lr=0.1)
    for step in range(1, 20):
        items(torch.arange(2000)).sum().backward()
        sparse.step()
        sparse.zero_grad()
        np.testing.assert_allclose(items.table.pull([7]), -0.1 * step, rtol=1e-4)
