"""EmbeddingCollection: the same results as its modules apart, in one message per shard, on a real cluster."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import runpy
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shardam
from shardam import Embedding, EmbeddingBag, EmbeddingCollection, LocalCluster, SparseAdam
from shardam._module import TableModule
from shardam.errors import BadOption, IdOutOfRange, WrongShape

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

_names = (f"collection_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=3) as local:
        yield local


def messages(cluster: LocalCluster) -> tuple[list[int], list[int]]:
    """Pull and push messages that each shard has answered."""
    counts: tuple[list[int], list[int]] = ([], [])
    for shard in cluster.shards:
        with urllib.request.urlopen(f"http://{shard.http_address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        for kind, found in zip(("pulls", "pushes"), counts, strict=True):
            found.append(
                sum(int(float(value)) for value in re.findall(rf"^shardam_{kind}_total{{.*}} (\S+)$", text, re.MULTILINE))
            )
    return counts


def gradient_by_id(module: TableModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with a gradient, sorted, and the gradient of each."""
    row_ids, gradient = module._gradient.row_ids, module._gradient.proxy.grad
    assert row_ids is not None
    assert gradient is not None
    order = row_ids.argsort()
    return row_ids[order], gradient[order]


@dataclasses.dataclass(frozen=True)
class Jagged:
    """What a collection needs of a KeyedJaggedTensor."""

    names: list[str]
    ids: torch.Tensor
    bags: torch.Tensor
    weights: torch.Tensor | None = None

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> torch.Tensor:
        return self.ids

    def offsets(self) -> torch.Tensor:
        return self.bags

    def weights_or_none(self) -> torch.Tensor | None:
        return self.weights


def table(cluster: LocalCluster, dim: int = 4, num_embeddings: int | None = None) -> Embedding:
    return Embedding(num_embeddings, dim, table=next(_names), cluster=cluster)


def bag(cluster: LocalCluster, mode: shardam.embedding_bag.Mode = "sum", *, include_last_offset: bool = False) -> EmbeddingBag:
    return EmbeddingBag(None, 4, mode=mode, include_last_offset=include_last_offset, table=next(_names), cluster=cluster)


@pytest.mark.case("C045")
def test_a_step_over_26_features_is_one_pull_and_one_push_per_shard(cluster: LocalCluster) -> None:
    modules: dict[str, Embedding | EmbeddingBag] = {f"dense.{index}": table(cluster, dim=4 + index) for index in range(20)}
    modules |= {f"bag.{index}": bag(cluster) for index in range(5)}
    modules["shown"] = modules["dense.0"]
    collection = EmbeddingCollection(modules)
    sparse = SparseAdam(collection, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, torch.Tensor] = {name: torch.randint(0, 10**12, (64, 3), generator=generator) for name in modules}
    assert len(collection.features) == 26
    pulls, pushes = messages(cluster)
    for step in range(1, 4):
        outputs = collection(batch)
        torch.stack([outputs[name].square().sum() for name in modules]).sum().backward()
        sparse.step()
        sparse.zero_grad()
        sparse.synchronize()
        assert messages(cluster) == ([count + step for count in pulls], [count + step for count in pushes])
    assert {module.table.stats().table_step for module in modules.values()} == {3}


@pytest.mark.case("C002")
def test_a_collection_gives_what_its_modules_give_and_trains_alike(cluster: LocalCluster) -> None:
    users, items, genres = table(cluster), table(cluster), bag(cluster)
    features: dict[str, Embedding | EmbeddingBag] = {"user": users, "clicked": items, "shown": items, "genres": genres}
    collection = EmbeddingCollection(features)
    sparse = SparseAdam([collection], lr=0.1)
    user, clicked, shown = torch.tensor([1, 2]), torch.tensor([[5, 9], [5, 5]]), torch.tensor([[5], [7]])
    ids, offsets, weights = torch.tensor([3, 3, 4]), torch.tensor([0, 2]), torch.tensor([0.5, 2.0, 1.0])
    apart = [users(user), items(clicked), items(shown), genres(ids, offsets, weights)]
    batch = {"user": user, "clicked": clicked, "shown": shown, "genres": (ids, offsets, weights)}
    together = collection(batch)
    assert list(together) == list(features)
    for output, expected in zip(together.values(), apart, strict=True):
        assert torch.equal(output, expected)
    upstream = [torch.randn(output.shape, generator=torch.Generator().manual_seed(7)) for output in apart]
    torch.autograd.backward(apart, upstream)
    expected_gradients = [gradient_by_id(module) for module in (users, items, genres)]
    sparse.zero_grad()
    torch.autograd.backward(list(together.values()), upstream)
    for module, (row_ids, gradient) in zip((users, items, genres), expected_gradients, strict=True):
        found = gradient_by_id(module)
        assert torch.equal(found[0], row_ids)
        torch.testing.assert_close(found[1], gradient, rtol=1e-6, atol=1e-6)
    sparse.step()
    assert [module.table.stats().table_step for module in (users, items, genres)] == [1, 1, 1]


def test_ids_with_offsets_of_an_embedding_give_rows_with_offsets(cluster: LocalCluster) -> None:
    items = table(cluster)
    collection = EmbeddingCollection({"history": items})
    ids, offsets = torch.tensor([5, 7, 5]), torch.tensor([0, 2])
    with torch.no_grad():
        rows, starts = collection({"history": (ids, offsets)})["history"]
        assert torch.equal(rows, items(ids))
        assert torch.equal(starts, offsets)
        with pytest.raises(WrongShape, match="feature 'history': offsets must start with 0"):
            collection({"history": (ids, torch.tensor([1, 2]))})


@pytest.mark.parametrize("include_last_offset", [False, True])
def test_a_keyed_jagged_object_is_taken_apart_by_feature(cluster: LocalCluster, include_last_offset: bool) -> None:
    genres, tags, items = bag(cluster, include_last_offset=include_last_offset), bag(cluster, "mean"), table(cluster)
    collection = EmbeddingCollection({"items": items, "genres": genres, "tags": tags})
    ids = torch.tensor([1, 2, 3, 4, 4, 5, 6])
    jagged = Jagged(["genres", "tags", "items"], ids, torch.tensor([0, 2, 2, 4, 5, 6, 7]))
    with torch.no_grad():
        outputs = collection(jagged)
        last = [2] if include_last_offset else []
        assert torch.equal(outputs["genres"], genres(ids[:2], [0, 2, *last]))
        assert torch.equal(outputs["tags"], tags(ids[2:5], [0, 2]))
        rows, offsets = outputs["items"]
        assert torch.equal(rows, items(ids[5:]))
        assert offsets.tolist() == [0, 1, 2]


def test_weights_of_a_keyed_jagged_object_reach_the_bags_and_get_their_gradient(cluster: LocalCluster) -> None:
    first, second = bag(cluster), bag(cluster)
    collection = EmbeddingCollection({"first": first, "second": second})
    sparse = SparseAdam(collection)
    ids, weights = torch.tensor([1, 2, 3]), torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    outputs = collection(Jagged(["first", "second"], ids, torch.tensor([0, 2, 3]), weights))
    torch.cat(list(outputs.values())).sum().backward()
    with torch.no_grad():
        assert torch.equal(outputs["first"], first(ids[:2], [0], weights[:2]))
        assert torch.equal(outputs["second"], second(ids[2:], [0], weights[2:]))
    rows = np.concatenate([first.table.pull([1, 2]), second.table.pull([3])])
    assert weights.grad is not None
    np.testing.assert_allclose(weights.grad.numpy(), rows.sum(axis=1), rtol=1e-5)
    del sparse


@pytest.mark.case("C004")
def test_a_feature_without_ids_is_a_step_with_an_empty_gradient(cluster: LocalCluster) -> None:
    first, second = bag(cluster), bag(cluster)
    collection = EmbeddingCollection({"first": first, "second": second})
    sparse = SparseAdam(collection, lr=0.1)
    none = torch.empty(0, dtype=torch.int64)
    for jagged in (
        Jagged(["first", "second"], torch.tensor([4]), torch.tensor([0, 1, 1])),
        Jagged(["first", "second"], none, torch.zeros(5, dtype=torch.int64)),
        Jagged(["first", "second"], none, torch.zeros(1, dtype=torch.int64)),
    ):
        torch.cat(list(collection(jagged).values())).sum().backward()
        sparse.step()
        sparse.zero_grad()
    assert [module.table.stats().table_step for module in (first, second)] == [3, 3]
    assert [module.table.stats().num_rows for module in (first, second)] == [1, 0]


def test_an_id_that_only_a_frozen_module_looks_at_is_not_pushed(cluster: LocalCluster) -> None:
    trained = table(cluster)
    frozen = Embedding(None, 4, table=trained.table.name, cluster=cluster).freeze()
    collection = EmbeddingCollection({"trained": trained, "frozen": frozen})
    sparse = SparseAdam(collection, lr=0.1)
    pulls, _ = messages(cluster)
    outputs = collection({"trained": torch.tensor([1, 2]), "frozen": torch.tensor([2, 3])})
    assert messages(cluster)[0] == [count + 1 for count in pulls]
    assert torch.equal(outputs["trained"][1], outputs["frozen"][0])
    assert not outputs["frozen"].requires_grad
    torch.cat(list(outputs.values())).sum().backward()
    sparse.step()
    assert trained.table.rows([1, 2, 3]).found.tolist() == [True, True, False]


def test_features_of_two_clusters_are_looked_up_and_pushed_in_each(cluster: LocalCluster) -> None:
    with shardam.connect(cluster.redis_url) as other:
        here, there = table(cluster), Embedding(None, 4, table=next(_names), cluster=other)
        collection = EmbeddingCollection({"here": here, "there": there})
        sparse = SparseAdam(collection, lr=0.1)
        torch.cat(list(collection({"here": [1], "there": [2]}).values())).sum().backward()
        sparse.step()
        assert here.table.rows([1]).found.all()
        assert there.table.rows([2]).found.all()


def test_what_does_not_fit_the_collection_is_refused_with_what_does(cluster: LocalCluster) -> None:
    items, genres = table(cluster, num_embeddings=10), bag(cluster)
    for modules in ({}, {"a": nn.Embedding(2, 2)}, {1: items}, [items]):
        with pytest.raises(BadOption, match="EmbeddingCollection"):
            EmbeddingCollection(modules)  # type: ignore[arg-type]  # what a caller may pass by mistake
    collection = EmbeddingCollection({"items": items, "genres": genres})
    one = torch.tensor([1])
    bags = (one, torch.tensor([0]))
    refused: list[tuple[object, type[Exception], str]] = [
        ({"items": one}, BadOption, r"missing: \['genres'\], unknown: \[\]"),
        ({"items": one, "genres": bags, "tags": one}, BadOption, r"missing: \[\], unknown: \['tags'\]"),
        ({"items": (*bags, torch.ones(1)), "genres": bags}, BadOption, "'items' has weights, and its module is an Embedding"),
        ({"items": one, "genres": (one,)}, BadOption, "got a tuple of 1"),
        ({"items": one, "genres": one}, WrongShape, "offsets is missing"),
        ({"items": torch.tensor([10]), "genres": bags}, IdOutOfRange, "num_embeddings=10"),
        (one, BadOption, "got Tensor"),
        (
            Jagged(["items", "genres"], one, torch.tensor([0, 1, 1, 1])),
            WrongShape,
            "4 offsets cannot be one more than a multiple of 2",
        ),
        (Jagged(["items", "genres"], one, torch.tensor([0, 0, 0])), WrongShape, "must be the number of ids, 1"),
        (Jagged(["items", "genres"], one, torch.tensor([0, 2, 1])), WrongShape, "no bag has a negative count"),
        (Jagged(["items", "genres"], one, torch.tensor([0, 1, 1]), torch.ones(2)), WrongShape, r"weights have shape \(2,\)"),
        (Jagged([], one, torch.tensor([0])), WrongShape, "multiple of 0 features"),
    ]
    pulls, _ = messages(cluster)
    for features, error, message in refused:
        with torch.no_grad(), pytest.raises(error, match=message):
            collection(features)
    with pytest.raises(BadOption, match="no SparseAdam has it"):
        collection({"items": one, "genres": bags})
    assert messages(cluster)[0] == pulls


def test_a_collection_needs_one_owner_and_refuses_what_it_cannot_do(cluster: LocalCluster) -> None:
    items, genres = table(cluster), bag(cluster)
    collection = EmbeddingCollection({"items": items, "genres": genres})
    batch = {"items": torch.tensor([1]), "genres": torch.tensor([[1]])}
    first, second = SparseAdam(collection), SparseAdam([genres])
    with pytest.raises(BadOption, match="belongs to 2 SparseAdam optimizers"):
        collection(batch)
    with pytest.raises(BadOption, match="is in two param groups"):
        SparseAdam([{"params": collection}, {"params": [items], "lr": 0.1}])
    with pytest.raises(BadOption, match="got Linear; dense parameters belong to"):
        SparseAdam([collection, nn.Linear(2, 2)])  # type: ignore[list-item]  # what a caller may pass by mistake
    with pytest.raises(BadOption, match=r"EmbeddingCollection of \['items', 'genres'\] has no parameters.*freeze\(\)"):
        collection.requires_grad_(False)
    with pytest.raises(BadOption, match=r"zero_grad\(\) of the SparseAdam"):
        collection.zero_grad()
    with pytest.raises(BadOption, match=r"output_dtype=torch\.float16"):
        collection.half()
    assert not any(output.requires_grad for output in collection.freeze()(batch).values())
    del first, second


def test_a_model_around_the_modules_is_refused_with_the_way_to_find_them(cluster: LocalCluster) -> None:
    items, linear = table(cluster), nn.Linear(4, 1)
    model = nn.ModuleDict({"collection": EmbeddingCollection({"items": items, "genres": bag(cluster)}), "top": linear})
    walk = r"got {}; pass .*\[m for m in model\.modules\(\) if isinstance\(m, \(shardam\.Embedding, shardam\.EmbeddingBag, "
    around = nn.Sequential(items, linear)
    given: list[tuple[object, str]] = [
        (model, walk.format("ModuleDict")),
        ([model], walk.format("ModuleDict")),
        (model.modules(), walk.format("ModuleDict")),
        ([{"params": model}], walk.format("ModuleDict")),
        (around, walk.format("Sequential")),
        (linear, "got Linear; dense parameters belong to"),
        (linear.weight, "got Parameter; dense parameters belong to"),
        (linear.parameters(), "got Parameter; dense parameters belong to"),
        (torch.zeros(()), "got Tensor; dense parameters belong to"),
        (None, "got NoneType; pass the modules themselves"),
    ]
    for modules, message in given:
        with pytest.raises(BadOption, match=message):
            SparseAdam(modules)  # type: ignore[arg-type]  # what a caller may pass by mistake
    kinds = (shardam.Embedding, shardam.EmbeddingBag, shardam.EmbeddingCollection)
    found = SparseAdam([module for module in model.modules() if isinstance(module, kinds)])
    assert len(list(found.parameters())) == 2
    assert len(list(SparseAdam(nn.ModuleList([items])).parameters())) == 1  # type: ignore[arg-type]  # torch types its iterator alone


def test_the_example_trains_and_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "collection.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "{'genres': 100, 'items': 1000, 'users': 1000}" in printed


def test_a_collection_copies_compiles_and_prints_as_a_module(cluster: LocalCluster) -> None:
    items, genres = table(cluster), bag(cluster)
    collection = EmbeddingCollection({"clicked": items, "shown": items, "genres": genres})
    assert collection["shown"] is items
    assert list(collection.parameters()) == []
    assert "'clicked': 0, 'shown': 0, 'genres': 1" in repr(collection)
    batch = {"clicked": torch.tensor([1]), "shown": torch.tensor([2]), "genres": torch.tensor([[3]])}
    twin = copy.deepcopy(collection)
    compiled = torch.compile(collection, backend="eager")
    with torch.no_grad():
        for other in (twin, compiled):
            for name, output in other(batch).items():
                assert torch.equal(output, collection(batch)[name])
    assert twin["clicked"] is twin["shown"]
    assert twin["clicked"].table is items.table
