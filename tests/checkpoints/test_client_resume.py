"""A resume that is one: after a checkpoint and a restore the next step is the one that an uninterrupted run takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardam
from shardam import AdamOptions, LocalCluster, Table, TableSpec

LR = AdamOptions(lr=0.1)
UNINTERRUPTED = (-0.4649203866, 0.2234082956, 0.0072138623)
"""Weight and moments after step 11."""

WEIGHTS_ALONE = -0.5248168377
"""The weight after step 11 where moments and t begin anew."""


def ten_steps(table: Table) -> None:
    for step in range(1, 11):
        table.push([1], [[1.0 if step % 2 else -0.5]], LR)


def eleventh(table: Table) -> tuple[float, float, float]:
    assert table.push([1], [[1.0]], LR).step in (1, 11)
    rows = table.rows([1])
    return float(rows.weight[0, 0]), float(rows.exp_avg[0, 0]), float(rows.exp_avg_sq[0, 0])


@pytest.mark.case("C066")
@pytest.mark.case("C067")
@pytest.mark.parametrize("shards", [1, 3])
def test_the_step_after_a_restore_is_the_eleventh_with_all_that_ten_left(tmp_path: Path, shards: int) -> None:
    with LocalCluster(shards=shards, data_dir=tmp_path) as cluster:
        table = cluster.create_table(TableSpec("items", 1, init=shardam.init.Constant(0.0)))
        ten_steps(table)
        assert cluster.checkpoint(name="ten").state == "done"
        whole = eleventh(table)
        np.testing.assert_allclose(whole, UNINTERRUPTED, rtol=1e-6)
        for _ in range(2):  # a second restore finds what the first one found
            cluster.restore("ten")
            assert (table.stats().table_step, table.rows([1]).step[0]) == (10, 10)
            assert eleventh(table) == whole
        cluster.restore("ten", weights_only=True)
        assert (table.stats().table_step, table.rows([1]).exp_avg[0, 0]) == (0, 0.0)
        np.testing.assert_allclose(eleventh(table)[0], WEIGHTS_ALONE, rtol=1e-6)


@pytest.mark.case("C066")
@pytest.mark.case("C067")
def test_a_new_process_goes_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    with LocalCluster(shards=2, data_dir=tmp_path) as cluster:
        ten_steps(cluster.create_table(TableSpec("items", 1, init=shardam.init.Constant(0.0))))
        cluster.checkpoint(name="ten")
        eleventh(cluster.table("items"))
    with LocalCluster(shards=2, data_dir=tmp_path) as cluster:
        assert cluster.table("items").stats().table_step == 11
        cluster.restore("ten")
        np.testing.assert_allclose(eleventh(cluster.table("items")), UNINTERRUPTED, rtol=1e-6)
