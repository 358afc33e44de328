"""Two ranks in sync mode train as one process does with the full batch and torch's own optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from shardam_testing import full_batch
from shardam_testing.rank_processes import Seen, of_all, run_ranks

from shardam import LocalCluster, Rows, TableSpec

LOSS_RTOL = 1e-5
ROW_ATOL = 1e-3 * full_batch.SPARSE_LR * full_batch.STEPS
"""A thousandth of the longest way that Adam can take."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of both runs.

    Attributes:
        initial: weights before the first step, by table.
        rows: rows after the last one.
        table_steps: each table's step after it.
        seen: what the ranks saw.
    """

    initial: dict[str, torch.Tensor]
    rows: dict[str, Rows]
    table_steps: dict[str, int]
    seen: Seen


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    row_ids = np.arange(full_batch.NUM_ROWS)
    with LocalCluster(shards=2) as cluster:
        specs = [TableSpec(kind, full_batch.DIM, num_embeddings=full_batch.NUM_ROWS) for kind in full_batch.KINDS]
        tables = {table.name: table for table in cluster.create_tables(specs)}
        initial = {name: torch.from_numpy(table.pull(row_ids)) for name, table in tables.items()}
        seen = run_ranks("full_batch", cluster.redis_url, tmp_path_factory.mktemp("ranks"))
        rows = {name: table.rows(row_ids) for name, table in tables.items()}
        table_steps = {name: table.stats().table_step for name, table in tables.items()}
        yield Outcome(initial, rows, table_steps, seen)


@pytest.mark.parametrize("kind", full_batch.KINDS)
def test_two_halves_in_sync_mode_train_as_one_process_with_the_full_batch(outcome: Outcome, kind: str) -> None:
    losses, weight, head = full_batch.train_alone(outcome.initial[kind], kind)
    halves = np.array(of_all(outcome.seen, kind, "losses"), np.float64)
    np.testing.assert_allclose(halves.mean(axis=0), losses, rtol=LOSS_RTOL)
    assert losses[-1] != losses[0]
    rows = outcome.rows[kind]
    assert rows.found.any()
    np.testing.assert_allclose(rows.weight, weight.numpy(), rtol=0, atol=ROW_ATOL)
    first, second = of_all(outcome.seen, kind, "dense")
    assert first == second
    assert isinstance(first, list)
    for part, expected in zip(first, head.parameters(), strict=True):
        np.testing.assert_allclose(part, expected.detach().flatten().numpy(), rtol=0, atol=ROW_ATOL)


@pytest.mark.parametrize("kind", full_batch.KINDS)
def test_halves_of_a_batch_are_one_step_of_the_table(outcome: Outcome, kind: str) -> None:
    assert outcome.table_steps[kind] == full_batch.STEPS
    half = full_batch.BATCH_SIZE // 2
    row_ids, _ = full_batch.batch(0, kind)
    shared = set(row_ids[:half].flatten().tolist()) & set(row_ids[half:].flatten().tolist())
    assert bool(shared) == (kind == "shared_rows")
