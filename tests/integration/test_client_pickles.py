"""Pickles of clusters, tables and modules: an address and a name, and a client of its own where they are used."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from shardam_testing.processes import clean_environment, running_shards
from torch import nn

import shardam
from shardam import AdamOptions, Embedding, EmbeddingBag, EmbeddingCollection, LocalCluster, SparseAdam, TableSpec
from shardam.errors import BadToken, ClientClosed, SchemaMismatch, UnknownTable

_names = (f"pickle_{index}" for index in itertools.count())
ONE = np.ones((1, 2), np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def again(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def test_a_pickled_table_connects_when_it_is_used_as_another_client(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec(next(_names), 2, init=shardam.init.Constant(0.0)))
    table.push([1], ONE, AdamOptions(lr=0.1))
    twin = again(table)
    assert isinstance(twin, shardam.Table)
    assert twin.cluster is not cluster
    assert (twin.name, twin.dim, twin.spec) == (table.name, 2, table.spec)
    assert repr(twin.cluster) == "Cluster('default', not connected yet)"
    with twin.cluster:
        assert twin.push([1], ONE, AdamOptions(lr=0.1)).step == 2
        assert "2 shards" in repr(twin.cluster)
        assert twin.cluster._session.client_id != cluster._session.client_id
        np.testing.assert_allclose(table.pull([1]), -0.2, rtol=1e-5)
    with pytest.raises(ClientClosed):
        twin.pull([1])
    assert table.pull([1]).shape == (1, 2)  # the first client goes on


def test_pickles_of_one_cluster_share_a_client_which_is_made_anew_after_close(cluster: LocalCluster) -> None:
    first, second = again(cluster), again(cluster)
    assert isinstance(first, shardam.Cluster)
    assert not isinstance(first, LocalCluster)  # it does not end the processes
    assert first is second
    first.close()
    with pytest.raises(ClientClosed, match="connect again"):
        first.tables()
    third = again(first)  # a closed one has an address, too
    assert isinstance(third, shardam.Cluster)
    assert third is not first
    with third:
        assert third.num_shards == 2


def test_a_pickled_model_reads_the_rows_and_is_trained_by_an_optimizer_of_its_own(cluster: LocalCluster) -> None:
    items = Embedding(None, 2, 0, table=next(_names), cluster=cluster, output_dtype=torch.bfloat16).eval()
    bag = EmbeddingBag(None, 2, mode="sum", include_last_offset=True, table=next(_names), cluster=cluster).freeze()
    model = nn.ModuleDict({"both": EmbeddingCollection({"items": items, "bag": bag}), "head": nn.Linear(2, 1)})
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    batch = {"items": torch.tensor([1, 2]), "bag": (torch.tensor([1, 2]), torch.tensor([0, 1, 2]))}
    looked_up = twin["both"]["items"]
    assert looked_up.table.cluster is twin["both"]["bag"].table.cluster
    with looked_up.table.cluster:
        with torch.no_grad():
            for name, output in twin["both"](batch).items():
                assert torch.equal(output, model["both"](batch)[name])
        assert (looked_up.padding_idx, looked_up.output_dtype, looked_up.training) == (0, torch.bfloat16, False)
        assert (twin["both"]["bag"].mode, twin["both"]["bag"].trainable) == ("sum", False)
        sparse = SparseAdam(twin["both"], lr=0.1)
        twin["both"](batch)["items"].sum().backward()
        sparse.step()
        sparse.synchronize()
        assert items.table.rows([1, 2]).found.all()
        assert items._gradient.row_ids is None  # the pickled module's gradient is its own


def test_another_process_uses_what_it_is_handed(cluster: LocalCluster) -> None:
    items = Embedding(None, 2, table=next(_names), cluster=cluster, init=shardam.init.Constant(0.0))
    SparseAdam([items])
    program = """
import pickle, sys, torch, shardam
items = pickle.load(sys.stdin.buffer)
sparse = shardam.SparseAdam([items], lr=0.1)
items(torch.tensor([5])).sum().backward()
sparse.step()
print(items.table.cluster._session.client_id.hex())
"""  # no close: what is queued is sent at exit
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, input=pickle.dumps(items), capture_output=True, timeout=100, check=False, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() != cluster._session.client_id.hex()
    np.testing.assert_allclose(items.table.pull([5]), -0.1, rtol=1e-5)


def test_a_table_that_is_gone_or_another_now_is_said_at_its_first_use(cluster: LocalCluster) -> None:
    spec = TableSpec(next(_names), 2)
    gone = shardam.Table(cluster, spec)
    with pytest.raises(UnknownTable, match=spec.name):
        gone.pull([1])
    cluster.create_table(TableSpec(spec.name, 4))
    with pytest.raises(SchemaMismatch, match=r"dim=2.*for this object.*dim=4"):
        gone.pull([1])


def test_the_token_is_not_in_the_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_shards(tmp_path, token="let-me-in") as shards:
        with shardam.connect(shards.valkey.url, cluster="test", token="let-me-in", shard_timeout_s=20) as client:
            client.create_table(TableSpec("t", 2))
            pickled = pickle.dumps(client.table("t"))
        assert b"let-me-in" not in pickled
        with pytest.raises(BadToken):
            pickle.loads(pickled).pull([1])
        monkeypatch.setenv("SHARDAM_TOKEN", "let-me-in")
        table = pickle.loads(pickled)
        with table.cluster:
            assert table.pull([1]).shape == (1, 2)


def test_copies_are_the_same_cluster_and_table(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec(next(_names), 2))
    for copied in (copy.copy, copy.deepcopy):
        assert copied(cluster) is cluster
        assert copied(table) is table
