"""Clients in the processes that multiprocessing and DataLoader start: each connects by itself, and the parent goes on."""

from __future__ import annotations

import itertools
import multiprocessing.context
import multiprocessing.process
from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.forking import HANG_S
from shardam_testing.processes import Shards, running_shards
from shardam_testing.pulled_rows import PulledRows, pull_and_push, queue_push
from shardam_testing.raw_client import raw_client
from shardam_testing.waiting import wait_for
from torch.utils.data import DataLoader

import shardam
from shardam import Cluster, Embedding, SparseAdam, Table, TableSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12 and later

_names = (f"workers_{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    with running_shards(tmp_path_factory.mktemp("shards"), 2) as running:
        yield running


@pytest.fixture
def client(shards: Shards) -> Iterator[Cluster]:
    with shardam.connect(shards.valkey.url, cluster="test", shard_timeout_s=HANG_S) as connected:
        yield connected


@pytest.fixture
def table(client: Cluster) -> Table:
    return client.create_table(TableSpec(next(_names), 2))


@pytest.mark.parametrize(
    "process_of",
    [multiprocessing.context.ForkProcess, multiprocessing.context.SpawnProcess, multiprocessing.context.ForkServerProcess],
)
def test_a_process_of_multiprocessing_sends_what_it_has_queued_and_says_goodbye(
    shards: Shards, table: Table, process_of: type[multiprocessing.process.BaseProcess]
) -> None:
    with raw_client(shards.view()) as reader:
        table.pull([1])
        before = reader.status().num_clients
        process = process_of(target=queue_push, args=(table,))
        process.start()
        process.join(HANG_S)
        assert process.exitcode == 0
        assert table.stats().table_step == 1
        wait_for("the client to be gone", lambda: reader.status().num_clients == before)


def train(client: Cluster, features: Table, **loading: object) -> shardam.Rows:
    """Trains a new table on rows that the loader's processes pull, for two epochs; returns what came of it."""
    items = Embedding(None, 2, table=next(_names), cluster=client, init=shardam.init.Constant(0.5))
    sparse = SparseAdam([items], lr=0.05)
    loader = DataLoader(PulledRows(features, 24), batch_size=4, timeout=HANG_S if loading else 0, **loading)  # type: ignore[arg-type]  # torch checks them
    for _ in range(2):
        num_batches = 0
        for row_ids, rows in loader:
            sparse.zero_grad()
            (items(row_ids % 5) * rows).sum().backward()
            sparse.step()
            num_batches += 1
        assert num_batches == 6
    return items.table.rows(np.arange(5))


@pytest.mark.case("C091")
@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_workers_that_pull_give_the_bits_of_a_loader_without_workers(client: Cluster, method: str, persistent: bool) -> None:
    features = client.create_table(TableSpec(next(_names), 2))
    expected = train(client, features)
    actual = train(client, features, num_workers=2, multiprocessing_context=method, persistent_workers=persistent)
    assert expected.found.all()
    for column in ("weight", "exp_avg", "exp_avg_sq", "step"):
        np.testing.assert_array_equal(getattr(actual, column), getattr(expected, column))
    pull_and_push(features)  # the parent's own client goes on
