"""prefetch on a real cluster: with exact, and in a group, the bits of plain pulls, whoever else pushes in between."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch

import shardam
from shardam import Cluster, Embedding, EmbeddingBag, EmbeddingCollection, LocalCluster, Rows, SparseAdam
from shardam._arrays import Int64s

DIM = 4
STEPS = 6
HANG_S = 120.0

_names = (f"prefetch_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


@pytest.fixture(scope="module")
def other(cluster: LocalCluster) -> Iterator[Cluster]:
    with shardam.connect(cluster.redis_url) as connected:
        yield connected


def batches(rank: int = 0) -> list[torch.Tensor]:
    """Ids that meet again in the next batch, and some that do not."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 30, (8, 3), generator=generator) for _ in range(STEPS)]


def loss_of(rows: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    return (rows.sum(1) + bags - 0.25).square().sum()


class Trainee:
    """A table looked up by row, and one in bags."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        init = shardam.init.Constant(0.5)  # a table's name would seed any other
        self.rows = Embedding(None, DIM, table=f"{name}_rows", cluster=cluster, init=init)
        self.bags = EmbeddingBag(None, DIM, mode="sum", table=f"{name}_bags", cluster=cluster, init=init)
        self.collection = EmbeddingCollection({"rows": self.rows, "bags": self.bags})
        self.sparse = SparseAdam([self.collection], lr=0.05)

    def step(self, batch: torch.Tensor) -> float:
        found = self.collection({"rows": batch, "bags": batch})
        loss = loss_of(cast(torch.Tensor, found["rows"]), cast(torch.Tensor, found["bags"]))
        loss.backward()
        self.sparse.step()
        self.sparse.zero_grad()
        return float(loss.detach())


def assert_equal(found: Rows, expected: Rows) -> None:
    for name in ("weight", "exp_avg", "exp_avg_sq", "step"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def ahead(trainee: Trainee, loader: list[torch.Tensor], **options: bool | int) -> shardam._prefetch.Prefetch[torch.Tensor]:
    return shardam.prefetch(loader, {trainee.collection: lambda batch: {"rows": batch, "bags": batch}}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 3])
def test_exact_gives_the_bits_of_plain_pulls_while_another_worker_pushes(
    cluster: LocalCluster, other: Cluster, depth: int
) -> None:
    def train(name: str, *, foreseeing: bool) -> tuple[list[float], list[Rows]]:
        trainee = Trainee(cluster, name)
        theirs = [other.table(f"{name}_rows"), other.table(f"{name}_bags")]
        losses = []
        for batch in ahead(trainee, batches(), depth=depth, exact=True) if foreseeing else batches():
            losses.append(trainee.step(batch))
            trainee.sparse.synchronize()
            for table in theirs:  # ids of the next batches, too
                table.push(np.arange(5), np.full((5, DIM), 0.5, np.float32), shardam.AdamOptions(lr=0.1))
        return losses, [table.rows(np.arange(30)) for table in theirs]

    plain = train(next(_names), foreseeing=False)
    foreseen = train(next(_names), foreseeing=True)
    assert foreseen[0] == plain[0]
    for found, expected in zip(foreseen[1], plain[1], strict=True):
        assert_equal(found, expected)


def test_without_exact_rows_are_up_to_depth_steps_old_and_no_older(cluster: LocalCluster) -> None:
    depth, steps = 2, 12
    init = shardam.init.Constant(0.0)
    items = Embedding(None, 1, table=next(_names), cluster=cluster, init=init)
    sparse = SparseAdam([items], lr=0.5)
    seen = []
    for batch in shardam.prefetch([torch.tensor([7])] * steps, {items: lambda batch: batch}, depth=depth):
        output = items(batch)
        seen.append(float(output.detach()))
        output.sum().backward()  # a gradient of one, so that each step is the same whatever was seen
        sparse.step()
        sparse.zero_grad()
    weights = [0.0]
    items.table.assign([7], [[0.0]], exp_avg=[[0.0]], exp_avg_sq=[[0.0]])
    reference = Embedding(None, 1, table=next(_names), cluster=cluster, init=init)
    for _ in range(steps):
        reference.table.push([7], [[1.0]], shardam.AdamOptions(lr=0.5))
        weights.append(float(reference.table.pull([7])[0, 0]))
    for step, value in enumerate(seen):
        assert value in weights[max(0, step - depth) : step + 1], step


def test_in_a_sync_group_the_bits_stay_and_nobody_waits_for_a_pull_ahead(cluster: LocalCluster) -> None:
    names = [next(_names), next(_names)]

    def train(rank: int, foreseeing: bool, begin: threading.Barrier) -> list[list[float]]:
        losses = []
        with shardam.connect(
            cluster.redis_url, mode="sync", group="ahead", rank=rank, world_size=2, shard_timeout_s=HANG_S
        ) as member:
            for name in names:
                trainee = Trainee(member, f"{name}_{foreseeing}")
                begin.wait(HANG_S)
                loader = batches(rank)[:4]
                losses.append([trainee.step(batch) for batch in (ahead(trainee, loader) if foreseeing else loader)])
            trainee.sparse.synchronize()
        return losses

    found = []
    for foreseeing in (False, True):
        begin = threading.Barrier(2)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(train, rank, foreseeing, begin) for rank in range(2)]
            found.append([rank.result(HANG_S) for rank in ranks])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    row_ids: Int64s = np.arange(30)
    for name, kind in itertools.product(names, ("rows", "bags")):
        plain, foreseen = (cluster.table(f"{name}_{foreseeing}_{kind}").rows(row_ids) for foreseeing in (False, True))
        assert_equal(foreseen, plain)


def test_a_step_shows_where_its_time_went(cluster: LocalCluster) -> None:
    trainee = Trainee(cluster, next(_names))
    cluster.timings(reset=True)
    for batch in ahead(trainee, batches()):
        trainee.step(batch)
    trainee.sparse.synchronize()
    times = cluster.timings()
    assert times["unique"].count == times["foreseen"].count == times["step"].count == STEPS
    assert times["backward"].count == STEPS, "one lookup of an Embedding in each"
    assert all(0 <= phase.p50_s <= phase.p99_s <= phase.max_s <= phase.total_s for phase in times.values())
