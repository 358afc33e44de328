"""The whole path, client to shard and back, against torch and against itself on other numbers of shards."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import shardam
from shardam import AdamOptions, Embedding, LocalCluster, Rows, SparseAdam, TableSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

ULPS = 4
"""CONTRACT.md, What equals what: w against torch is within 4 ulp of max(|w|, |update|)."""


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, LocalCluster]]:
    with contextlib.ExitStack() as stack:
        yield {shards: stack.enter_context(LocalCluster(shards)) for shards in (1, 3, 7)}


@pytest.fixture(scope="module")
def cluster(clusters: dict[int, LocalCluster]) -> LocalCluster:
    return clusters[3]


def local_and_remote(cluster: LocalCluster, name: str, rows: int, dim: int) -> tuple[nn.Embedding, Embedding]:
    torch.manual_seed(0)
    local = nn.Embedding(rows, dim, sparse=True)
    remote = Embedding(rows, dim, table=name, cluster=cluster)
    remote.table.assign(range(rows), local.weight)
    return local, remote


def assert_near(remote: npt.ArrayLike, expected: list[float]) -> None:
    wanted = np.array(expected, np.float32)
    spacing = np.spacing(np.maximum(np.abs(wanted), np.float32(0.01)))
    np.testing.assert_array_less(np.abs(np.asarray(remote, np.float32) - wanted), ULPS * spacing + np.finfo(np.float32).tiny)


def test_reference_values_a_one_step_of_cross_entropy(cluster: LocalCluster) -> None:
    local, remote = local_and_remote(cluster, "reference_a", 10, 5)
    sparse = SparseAdam([remote], lr=0.01)
    cross_entropy(remote(torch.tensor([1, 3, 5])), torch.tensor([0, 2, 1])).backward()
    sparse.step()
    expected = [0.7020091414451599, -0.3260127007961273, -2.1252191066741943, 0.3122749626636505, -1.2733346223831177]
    pulled = remote.table.pull(range(10))
    assert_near(pulled[1], expected)
    untouched = [0, 2, 4, 6, 7, 8, 9]
    np.testing.assert_array_equal(pulled[untouched], local.weight.detach().numpy()[untouched])


def test_reference_values_b_one_step_on_the_sum_of_a_row(cluster: LocalCluster) -> None:
    _, remote = local_and_remote(cluster, "reference_b", 10, 3)
    sparse = SparseAdam([remote], lr=0.01)
    before = [-0.31601276993751526, -2.1152193546295166, 0.32227492332458496]
    assert remote.table.pull([2])[0].tolist() == before
    remote(torch.tensor([2])).sum().backward()
    sparse.step()
    assert_near(remote.table.pull([2])[0], [-0.3260127604007721, -2.1252193450927734, 0.3122749328613281])


def test_reference_values_c_a_step_on_another_row_does_not_move_this_one(cluster: LocalCluster) -> None:
    _, remote = local_and_remote(cluster, "reference_c", 10, 4)
    sparse = SparseAdam([remote], lr=0.01)
    seen = []
    for row_id in (3, 5):
        remote(torch.tensor([row_id])).sum().backward()
        sparse.step()
        sparse.zero_grad()
        seen.append(remote.table.rows([3]))
    assert_near(seen[0].weight[0], [0.10984151065349579, 1.2276579141616821, 1.1067771911621094, -0.2572781443595886])
    for column in ("weight", "exp_avg", "exp_avg_sq"):
        np.testing.assert_array_equal(getattr(seen[1], column), getattr(seen[0], column))


@pytest.mark.parametrize("example", ["sparse_adam_1", "sparse_adam_2", "sparse_adam_3"])
def test_the_examples_print_local_and_remote_results_that_agree(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    local = re.findall(r"local (?:SparseAdam)? *(\[.*\])", printed)
    remote = re.findall(r"shardam +(\[.*\])", printed)
    assert len(local) == len(remote) > 1
    for mine, torchs in zip(remote, local, strict=True):
        assert_near(json.loads(mine), json.loads(torchs))


def push_everything(cluster: LocalCluster) -> dict[str, Rows]:
    """The same changes of several tables, with everything that could depend on the number of shards."""
    random = np.random.default_rng(7)
    specs = {
        "wide": TableSpec("wide", 33),
        "narrow": TableSpec("narrow", 1, init=shardam.init.Uniform(-1, 1)),
        "bounded": TableSpec("bounded", 16, num_embeddings=400, padding_idx=0, init=shardam.init.XavierNormal()),
    }
    tables = {name: cluster.create_table(spec) for name, spec in specs.items()}
    options = [
        AdamOptions(lr=0.1),
        AdamOptions(lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
        AdamOptions(lr=0.05, eps=1e-3, weight_decay=0.02, decoupled_weight_decay=True, maximize=True),
    ]
    for step in range(30):
        for name, table in tables.items():
            low, high = (0, 400) if name == "bounded" else (-(2**63), 2**63 - 1)
            distinct = random.integers(low, high, 40)
            row_ids = random.choice(np.concatenate([distinct, np.arange(20)]), size=0 if step % 10 == 9 else 200)
            gradients = random.standard_normal((row_ids.size, table.dim)).astype(np.float32)
            table.push(row_ids, gradients, options[step % 3], grad_scale=[1.0, 1024.0][step % 2])
        if step == 15:
            tables["wide"].delete(np.arange(10))
            tables["narrow"].assign(np.arange(5), np.ones((5, 1), np.float32), exp_avg_sq=np.ones((5, 1), np.float32))
    return {name: sorted_rows(table) for name, table in tables.items()}


def sorted_rows(table: shardam.Table) -> Rows:
    row_ids = np.sort(np.concatenate([rows.row_ids for rows in table.scan(batch_size=100)]))
    return table.rows(row_ids)


def test_the_same_changes_on_1_3_and_7_shards_leave_the_same_bits(clusters: dict[int, LocalCluster]) -> None:
    results = {shards: push_everything(cluster) for shards, cluster in clusters.items()}
    for name, expected in results[1].items():
        assert len(expected) > 100
        for shards in (3, 7):
            assert min(clusters[shards].table(name).stats().rows_per_shard) > 0
            for column in ("row_ids", "weight", "exp_avg", "exp_avg_sq", "step", "found"):
                np.testing.assert_array_equal(
                    getattr(results[shards][name], column), getattr(expected, column), f"{name}.{column}"
                )


def losses(embeddings: list[nn.Module], sparse: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[float]:
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(2 * 16, 16), nn.ReLU(), nn.Linear(16, 1))
    dense = torch.optim.Adam(head.parameters(), lr=1e-2)
    found = []
    for ids in batches:
        features = torch.cat([embedding(ids[:, index]) for index, embedding in enumerate(embeddings)], dim=1)
        target = (ids[:, 0] % 2).float()
        loss = binary_cross_entropy_with_logits(head(features).squeeze(1), target)
        loss.backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_one_worker_follows_the_local_baseline_for_100_steps(clusters: dict[int, LocalCluster], shards: int) -> None:
    samples = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 300, (64, 2), generator=samples) for _ in range(100)]
    pairs = [local_and_remote(clusters[shards], f"baseline_{index}", 300, 16) for index in range(2)]
    local = [pair[0] for pair in pairs]
    remote = [pair[1] for pair in pairs]
    baseline = losses([*local], torch.optim.SparseAdam([one.weight for one in local], lr=1e-2), batches)
    found = losses([*remote], SparseAdam(remote, lr=1e-2), batches)
    assert baseline[0] > 1.1 * baseline[-1]
    np.testing.assert_allclose(found, baseline, rtol=1e-5)
