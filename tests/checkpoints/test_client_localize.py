"""localize: a copy of a model without a cluster gives the model's own outputs, bit for bit, and can be exported and saved."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardam
from shardam import AdamOptions, Embedding, EmbeddingBag, EmbeddingCollection, LocalCluster, SparseAdam, localize
from shardam._features import Feature
from shardam.errors import BadOption, UnknownRow

LR = AdamOptions(lr=0.1)
IDS = torch.tensor([2**53 + 1, -1, 7, -(2**63), 2**63 - 1])
"""Of unbounded tables, written."""

_names = (f"localized_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def push_some(table: shardam.Table, ids: Tensor) -> None:
    rows = np.random.default_rng(1).standard_normal((ids.numel(), table.dim)).astype(np.float32)
    for _ in range(3):
        table.push(ids, rows, LR)


def test_a_bounded_embedding_becomes_a_torch_embedding_with_a_row_for_every_id(cluster: LocalCluster) -> None:
    items = Embedding(10, 6, padding_idx=-1, table=next(_names), cluster=cluster)
    push_some(items.table, torch.tensor([1, 3]))
    local = localize(items)
    assert isinstance(local, nn.Embedding)
    assert (local.num_embeddings, local.embedding_dim, local.padding_idx) == (10, 6, 9)
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(local(ids), items(ids))
        assert torch.equal(local(ids.to(torch.int16)), items(ids))
    push_some(items.table, torch.tensor([1]))
    assert not torch.equal(local.weight[1], torch.from_numpy(items.table.pull([1]))[0])  # rows as of the call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_give_the_same_bits_in_every_mode_and_dtype(
    cluster: LocalCluster, dtype: str, output_dtype: torch.dtype, mode: str
) -> None:
    ids = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 0, 17, 18, 130, 200])
    for bounded, last in itertools.product((True, False), (True, False)):
        bag = EmbeddingBag(
            50 if bounded else None,
            20,
            mode=mode,  # type: ignore[arg-type]  # one of the three
            padding_idx=3,
            include_last_offset=last,
            table=next(_names),
            cluster=cluster,
            dtype=dtype,  # type: ignore[arg-type]  # one of the three
            output_dtype=output_dtype,
        )
        push_some(bag.table, torch.arange(50))
        local = localize(bag)
        given = offsets if last else offsets[:-1]
        with torch.no_grad():
            assert torch.equal(local(ids, given), bag(ids, given))
            assert torch.equal(local(ids.int(), given.int()), bag(ids, given))
            assert torch.equal(local(ids.reshape(20, 10)), bag(ids.reshape(20, 10)))
            assert local(ids, given).dtype == output_dtype
            if mode == "sum":
                weights = torch.randn(200, generator=torch.Generator().manual_seed(1))
                assert torch.equal(local(ids, given, weights), bag(ids, given, weights))
                square = weights.reshape(20, 10).bfloat16()
                assert torch.equal(local(ids.reshape(20, 10), None, square), bag(ids.reshape(20, 10), None, square))
            without_gradients = local(ids, given)
        assert torch.equal(local(ids, given), without_gradients)


def test_an_unbounded_embedding_finds_its_rows_by_any_id(cluster: LocalCluster) -> None:
    items = Embedding(None, 4, table=next(_names), cluster=cluster)
    push_some(items.table, IDS)
    local = localize(items)
    with torch.no_grad():
        assert torch.equal(local(IDS), items(IDS))
        assert torch.equal(local(IDS.flip(0).reshape(5, 1)), items(IDS.flip(0).reshape(5, 1)))
        assert local(torch.tensor(7)).shape == (4,)
        assert not local(torch.tensor([8, 0, 2**63 - 2])).any()
        assert local(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    strict = localize(items, unknown="error")
    assert torch.equal(strict(IDS), local(IDS))
    with pytest.raises(UnknownRow, match="2 ids have no row here, among them 8, 9"):
        strict(torch.tensor([7, 8, 9]))
    with pytest.raises(BadOption, match="unknown must be one of"):
        localize(items, unknown="init")  # type: ignore[arg-type]


def test_a_table_without_rows_gives_zeros_only(cluster: LocalCluster) -> None:
    items = Embedding(None, 4, table=next(_names), cluster=cluster)
    bag = EmbeddingBag(None, 4, padding_idx=0, table=next(_names), cluster=cluster)
    assert not localize(items)(torch.tensor([[1, 2]])).any()
    assert localize(bag)(torch.tensor([[1, 0], [0, 0]])).tolist() == [[0.0] * 4] * 2


class TwoTowers(nn.Module):
    """A model with a collection, an own module of the same table, a dense part, and the modules under a second name."""

    def __init__(self, cluster: LocalCluster, frozen: bool = False) -> None:
        super().__init__()
        users = Embedding(None, 4, table=next(_names), cluster=cluster)
        tags = EmbeddingBag(20, 4, mode="sum", table=next(_names), cluster=cluster)
        self.features = EmbeddingCollection({"user": users, "shown": users, "tags": tags})
        self.liked = Embedding(20, 4, table=tags.table.name, cluster=cluster)
        self.by_name = {"users": users}
        self.head = nn.Linear(16, 1)
        if frozen:
            users.freeze()

    def forward(self, ids: Tensor, tags: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        """Returns one number for each sample."""
        found = self.features({"user": ids[:, 0], "shown": ids[:, 1], "tags": (tags, offsets, weights)})
        columns = [found["user"], found["shown"], found["tags"], self.liked(ids[:, 1].remainder(20))]
        logits: Tensor = self.head(torch.cat([column for column in columns if isinstance(column, Tensor)], dim=1))
        return logits


def batch_of(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = IDS[torch.randint(0, 5, (size, 2), generator=generator)]
    tags = torch.randint(0, 20, (3 * size,), generator=generator)
    return ids, tags, torch.arange(size) * 3, torch.randn(3 * size, generator=generator)


def trained(cluster: LocalCluster, frozen: bool = False) -> TwoTowers:
    model = TwoTowers(cluster, frozen)
    sparse = SparseAdam([model.features, model.liked], lr=0.1)
    push_some(model.features["user"].table, IDS)
    for _ in range(3):
        sparse.zero_grad()
        model(*batch_of(8)).sum().backward()
        sparse.step()
    return model


def holds_nothing_of_the_cluster(value: object) -> bool:
    written = io.BytesIO()
    torch.save(value, written)
    return not any(word in written.getvalue() for word in (b"redis://", b"shardam.cluster", b"shardam.table"))


def test_a_model_keeps_its_shape_and_gives_the_same_bits_without_the_cluster(cluster: LocalCluster) -> None:
    model = trained(cluster)
    model.eval()
    local = localize(model)
    assert isinstance(local, TwoTowers)
    assert not any(module.training for module in local.modules())
    with torch.no_grad():
        assert torch.equal(local(*batch_of(64)), model(*batch_of(64)))
    assert holds_nothing_of_the_cluster(local)
    assert local.by_name["users"] is local.features.distinct_modules[0]
    assert local.liked.weight is local.features.distinct_modules[1].weight  # one table, one weight
    assert local.head.weight is not model.head.weight
    assert isinstance(model.features, EmbeddingCollection)  # the model is as it was
    assert [name for name, _ in local.named_parameters()] == [
        "features.distinct_modules.0.local.weight",
        "features.distinct_modules.1.weight",
        "head.weight",
        "head.bias",
    ]


def test_frozen_modules_stay_frozen_and_the_rest_trains_on_locally(cluster: LocalCluster) -> None:
    local = localize(trained(cluster, frozen=True))
    local(*batch_of(8)).sum().backward()
    gradients = {name: parameter.grad is not None for name, parameter in local.named_parameters()}
    assert gradients == {
        "features.distinct_modules.0.local.weight": False,
        "features.distinct_modules.1.weight": True,
        "head.weight": True,
        "head.bias": True,
    }


@pytest.mark.parametrize("unknown", ["zero", "error"])
def test_the_copy_is_exported_with_batches_of_any_size(cluster: LocalCluster, unknown: str) -> None:
    local = localize(trained(cluster).eval(), unknown=unknown)  # type: ignore[arg-type]
    size = torch.export.Dim("size", min=2, max=1000)
    shapes = ({0: size}, {0: 3 * size}, {0: size}, {0: 3 * size})
    exported = torch.export.export(local, batch_of(8), dynamic_shapes=shapes)
    written = io.BytesIO()
    torch.export.save(exported, written)
    written.seek(0)
    loaded = torch.export.load(written).module()
    with torch.no_grad():
        for size_of_batch in (2, 8, 100):
            assert torch.equal(loaded(*batch_of(size_of_batch)), local(*batch_of(size_of_batch)))
        ids, *rest = batch_of(8)
        ids = torch.where(ids == 7, 8, ids)
        if unknown == "error":
            with pytest.raises(RuntimeError, match="an id has no row here"):
                loaded(ids, *rest)
        else:
            assert torch.equal(loaded(ids, *rest), local(ids, *rest))


def test_its_state_dict_loads_with_weights_only_and_whole_copies_pickle(cluster: LocalCluster) -> None:
    local = localize(trained(cluster))
    written = io.BytesIO()
    torch.save(local.state_dict(), written)
    written.seek(0)
    state = torch.load(written, weights_only=True)
    other = copy.deepcopy(local)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(*batch_of(8)), local(*batch_of(8)))
    assert torch.equal(pickle.loads(pickle.dumps(local))(*batch_of(8)), local(*batch_of(8)))


class Jagged:
    """What a collection needs of a KeyedJaggedTensor."""

    def keys(self) -> list[str]:
        return ["item", "tags"]

    def values(self) -> Tensor:
        return torch.tensor([1, 2, 3, 4, 5])

    def offsets(self) -> Tensor:
        return torch.tensor([0, 1, 2, 4, 5])

    def weights_or_none(self) -> Tensor | None:
        return None


def test_a_collection_takes_all_that_the_original_takes(cluster: LocalCluster) -> None:
    items = Embedding(10, 4, table=next(_names), cluster=cluster)
    collection = EmbeddingCollection({"item": items, "tags": EmbeddingBag(10, 4, table=next(_names), cluster=cluster)})
    local = localize(collection)
    given: list[Mapping[str, Feature] | Jagged] = [
        {"item": torch.tensor([[1, 2], [3, 4]]), "tags": torch.tensor([[1, 2, 3]])},
        {"item": (torch.tensor([1, 2, 3]), torch.tensor([0, 1])), "tags": (torch.tensor([5, 6]), torch.tensor([0, 1]))},
        Jagged(),
    ]
    for features in given:
        with torch.no_grad():
            wanted, found = collection(features), local(features)
        assert list(wanted) == list(found)
        for one, other in zip(wanted.values(), found.values(), strict=True):
            if isinstance(one, tuple):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])
            else:
                assert torch.equal(one, other)
    with pytest.raises(BadOption, match="missing: \\['tags'\\]"):
        local({"item": torch.tensor([1])})


def test_what_needs_the_cluster_otherwise_is_named(cluster: LocalCluster) -> None:
    model = nn.Sequential(Embedding(10, 4, table=next(_names), cluster=cluster))
    model.helpers = [cluster]  # type: ignore[assignment]
    with pytest.raises(BadOption, match=r"Sequential.helpers\[0\] is a LocalCluster"):
        localize(model)
    with pytest.raises(BadOption, match="takes a torch module, got int"):
        localize(3)  # type: ignore[arg-type]


def test_a_model_without_shardam_modules_is_just_copied() -> None:
    model = nn.Linear(2, 2)
    local = localize(model)
    assert local is not model
    assert torch.equal(local(torch.ones(2)), model(torch.ones(2)))
