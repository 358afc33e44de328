"""from_pretrained: which rows are written, by whom, and with which moments, on a real cluster."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import shardam
from shardam import AdamOptions, Embedding, EmbeddingBag, LocalCluster, SparseAdam, _pretrained
from shardam.errors import BadOption, NonFiniteState, RedisUnreachable, SchemaMismatch, WrongShape

_names = (f"pretrained_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def test_given_rows_are_read_back_frozen_unless_told_otherwise_as_in_torch(cluster: LocalCluster) -> None:
    weight = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    ids, bags = torch.tensor([3, 0, 9]), torch.tensor([[3, 0], [2, 2]])
    local, local_bag = nn.Embedding.from_pretrained(weight, True, 2), nn.EmbeddingBag.from_pretrained(weight, mode="max")
    items = Embedding.from_pretrained(weight, True, 2, table=next(_names), cluster=cluster)
    bag = EmbeddingBag.from_pretrained(weight, mode="max", table=next(_names), cluster=cluster)
    assert torch.equal(items(ids), local(ids))
    assert torch.equal(bag(bags), local_bag(bags))
    assert torch.equal(items(torch.tensor([2]))[0], weight[2])  # the padding row, too
    assert (items.num_embeddings, items.embedding_dim, items.padding_idx, items.trainable) == (10, 4, 2, False)
    trained = Embedding.from_pretrained(weight.bfloat16(), freeze=False, table=next(_names), cluster=cluster)
    sparse = SparseAdam([trained], lr=0.1)
    trained(ids).sum().backward()
    sparse.step()
    assert trained.table.rows(ids).step.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(trained.table.pull([1]), weight[1:2].bfloat16().float().numpy())


def test_rows_that_exist_stay_unless_overwritten_and_then_start_anew(cluster: LocalCluster) -> None:
    name, ones, twos = next(_names), torch.ones(50, 2), torch.full((50, 2), 2.0)
    table = cluster.create_table(shardam.TableSpec(name, 2, num_embeddings=50))
    table.push([7, 8], np.ones((2, 2), np.float32), AdamOptions(lr=0.1))
    before = table.rows([7, 8])
    for weight in (ones, twos):  # the second time all rows exist
        Embedding.from_pretrained(weight, table=name, cluster=cluster)
        after = table.rows([7, 8])
        for column in ("weight", "exp_avg", "exp_avg_sq"):
            np.testing.assert_array_equal(getattr(after, column), getattr(before, column))
        others = np.setdiff1d(np.arange(50), [7, 8])
        assert (table.pull(others) == 1.0).all()
    table.delete([9])
    Embedding.from_pretrained(twos, table=name, cluster=cluster)
    assert table.pull([9, 10]).tolist() == [[2.0, 2.0], [1.0, 1.0]]
    Embedding.from_pretrained(twos, table=name, cluster=cluster, overwrite=True)
    rows = table.rows(range(50))
    assert (rows.weight == 2.0).all()
    assert not rows.exp_avg.any()
    assert not rows.exp_avg_sq.any()
    assert table.stats().table_step == 1


def test_of_workers_with_different_rows_one_wins_the_whole_table(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pretrained, "PART_BYTES", 64 * 20)  # about 60 assigns a worker
    name, workers, num_rows = next(_names), 4, 1000
    done: list[float] = []

    def work(worker: int) -> None:
        with shardam.connect(cluster.redis_url) as client:
            weight = torch.full((num_rows, 2), float(worker))
            items = Embedding.from_pretrained(weight, table=name, cluster=client)
            done.append(float(items.table.pull([num_rows - 1])[0, 0]))  # whoever returns sees all rows

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rows = cluster.table(name).rows(range(num_rows))
    assert rows.found.all()
    assert len(np.unique(rows.weight)) == 1
    assert done == [rows.weight[0, 0]] * workers


def test_a_worker_that_died_while_writing_is_followed_by_another(cluster: LocalCluster) -> None:
    name = next(_names)
    spec = shardam.TableSpec(name, 2, num_embeddings=20)
    table_id = cluster.create_table(spec).info().table_id
    with shardam.connect(cluster.redis_url, shard_timeout_s=1.0) as client:
        client.table(name).assign([0], np.zeros((1, 2), np.float32))
        left = client._session.given_rows_lease(table_id, 2.0)  # of a process that is gone
        assert left.acquire()
        Embedding.from_pretrained(torch.ones(20, 2), table=name, cluster=client)
        assert not left.owned()
    assert cluster.table(name).pull([0, 19]).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_given_rows_that_fit_no_table_are_refused_and_nothing_is_made(cluster: LocalCluster) -> None:
    name = next(_names)
    bad = torch.ones(5, 2)
    bad[3, 1] = torch.nan
    refused: list[tuple[torch.Tensor, type[Exception], str]] = [
        (torch.ones(5), WrongShape, r"must have shape \[num_embeddings, dim\], got shape \(5,\)"),
        (torch.ones(0, 2), WrongShape, r"got shape \(0, 2\)"),
        (torch.ones(5, 2, dtype=torch.float64), BadOption, "must be float32, float16 or bfloat16, got float64"),
        (bad, NonFiniteState, r"rows \[3\] are not; nothing was written"),
    ]
    for weight, error, message in refused:
        for kind in (Embedding, EmbeddingBag):
            with pytest.raises(error, match=message):
                kind.from_pretrained(weight, table=name, cluster=cluster)
    with pytest.raises(BadOption, match="max_norm can only be None"):
        Embedding.from_pretrained(torch.ones(5, 2), max_norm=1.0, table=name, cluster=cluster)
    assert name not in {info.name for info in cluster.tables()}
    Embedding(10, 2, table=name, cluster=cluster)
    with pytest.raises(SchemaMismatch):
        Embedding.from_pretrained(torch.ones(5, 2), table=name, cluster=cluster)


def test_without_redis_the_error_says_what_it_is_needed_for(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.lock import Lock

    def unreachable(*_: object, **__: object) -> bool:
        raise RedisConnectionError("connection refused")

    monkeypatch.setattr(Lock, "acquire", unreachable)
    with pytest.raises(RedisUnreachable, match="workers agree through Redis on who writes its given rows"):
        Embedding.from_pretrained(torch.ones(5, 2), table=next(_names), cluster=cluster)
