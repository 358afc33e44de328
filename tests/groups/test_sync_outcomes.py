"""How a step of two ranks can end in sync mode: the same on both, and nothing of a refused step is anywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from shardam_testing import replica, sync_outcomes
from shardam_testing.rank_processes import Seen, of_all, run_ranks
from shardam_testing.rank_program import LR
from shardam_testing.reference_table import ReferenceTable

from shardam import AdamOptions, LocalCluster, Rows, TableInfo, TableSpec, TableStats

BOTH = {1: 1.5, 2: 0.5, 3: 1.0}
"""Row id -> mean gradient of a step to which both ranks contribute."""
ONLY_SECOND = {1: 1.0, 3: 1.0}
"""The same if rank 0 is counted, but has nothing to add."""
FIRST_ALONE = {1: 1.0, 2: 1.0}
"""The same if rank 0 is the only member."""

STEPS: Mapping[str, Sequence[Mapping[int, float]]] = {
    "one_abstains": [BOTH, ONLY_SECOND],
    "all_abstain": [BOTH, BOTH, BOTH],
    "not_finite": [BOTH, BOTH],
    "one_ulp": [BOTH],
    "empty": [BOTH, ONLY_SECOND, BOTH],
    "dropped_gradient": [BOTH, ONLY_SECOND, BOTH],
    "evaluation": [BOTH, BOTH],
    "uneven_data": [BOTH] * sync_outcomes.LEAVES_AFTER
    + [FIRST_ALONE] * (sync_outcomes.STEPS_IN_ALL - sync_outcomes.LEAVES_AFTER),
    "two_optimizers": [{1: 0.5, 2: 0.5}] * 3,
    "the_second": [BOTH] * 3,
}
"""Table -> the steps that count."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of all scenarios.

    Attributes:
        seen: what the ranks saw.
        tables: each table, its rows 1, 2 and 3, and its step.
    """

    seen: Seen
    tables: Mapping[str, tuple[TableInfo, Rows, TableStats]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    with LocalCluster(shards=2) as cluster:
        made = cluster.create_tables([TableSpec(name, 2) for name in STEPS])
        seen = run_ranks("sync_outcomes", cluster.redis_url, tmp_path_factory.mktemp("ranks"))
        yield Outcome(seen, {table.name: (table.info(), table.rows([1, 2, 3]), table.stats()) for table in made})


def expected_rows(info: TableInfo, steps: Sequence[Mapping[int, float]]) -> dict[int, bytes]:
    """The rows' bits after these steps, from the reference."""
    reference = ReferenceTable(info.spec, info.table_seed)
    for step in steps:
        gradients = np.repeat(np.array(list(step.values()), np.float32)[:, None], 2, axis=1)
        reference.push(np.array(list(step), np.int64), gradients, AdamOptions(lr=LR))
    return reference.rows()


@pytest.mark.parametrize("table", STEPS)
def test_rows_are_those_of_the_steps_that_count(outcome: Outcome, table: str) -> None:
    info, rows, stats = outcome.tables[table]
    assert stats.table_step == len(STEPS[table])
    expected = expected_rows(info, STEPS[table])
    assert rows.row_ids[rows.found].tolist() == sorted(expected)
    for index in np.flatnonzero(rows.found):
        bits = b"".join(column[index].tobytes() for column in (rows.weight, rows.exp_avg, rows.exp_avg_sq))
        assert bits == expected[int(rows.row_ids[index])]
    assert stats.num_rows == len(expected)


@pytest.mark.parametrize("scenario", ["all_abstain", "not_finite", "one_ulp", "empty", "dropped_gradient", "evaluation"])
def test_dense_replicas_are_equal_after_each_step(outcome: Outcome, scenario: str) -> None:
    first, second = of_all(outcome.seen, scenario, "dense")
    assert isinstance(first, list)
    assert first == second
    assert len(first) > 1


def test_the_rank_that_found_an_inf_abstains_alone_and_a_scale_that_differs_after_it_is_named(outcome: Outcome) -> None:
    first, second = of_all(outcome.seen, "one_abstains", "endings")
    assert isinstance(first, list)
    assert first == second
    assert first[:2] == [None, None]
    assert "grad_scale=2.0" in first[2]
    assert "grad_scale=4.0" in first[2]


def test_with_the_scaler_for_several_ranks_all_abstain_and_all_scales_fall(outcome: Outcome) -> None:
    assert of_all(outcome.seen, "all_abstain", "scales") == [[4.0, 2.0, 2.0]] * 2


def test_one_part_that_is_not_finite_refuses_the_step_on_all_ranks_and_the_next_one_counts(outcome: Outcome) -> None:
    first, second = of_all(outcome.seen, "not_finite", "endings")
    assert isinstance(first, list)
    assert first == second
    assert [first[0], first[3]] == [None, None]
    for ending in first[1:3]:  # raised by step(sync=True), and by the next training forward
        assert ending.startswith("NON_FINITE_GRADIENT: ")
        assert str(sync_outcomes.SPREAD[-1]) in ending


def test_learning_rates_that_differ_in_the_last_bit_are_refused_on_all_ranks_with_both_values(outcome: Outcome) -> None:
    first, second = of_all(outcome.seen, "one_ulp", "endings")
    assert isinstance(first, list)
    assert first == second
    assert first[0].startswith("GROUP_MISMATCH: ")
    assert f"lr={LR!r}" in first[0]
    assert f"lr={math.nextafter(LR, 1.0)!r}" in first[0]
    assert first[1] is None


@pytest.mark.parametrize("scenario", ["empty", "dropped_gradient"])
def test_a_rank_without_a_gradient_is_counted_and_no_step_fails(outcome: Outcome, scenario: str) -> None:
    for endings in of_all(outcome.seen, scenario, "endings"):
        assert isinstance(endings, list)
        assert set(endings) == {None}


def test_a_look_at_rows_waits_for_no_step_and_sees_none_that_is_not_decided(outcome: Outcome) -> None:
    seen, _ = of_all(outcome.seen, "evaluation", "seen")
    assert isinstance(seen, list)
    before, queued, *after = seen
    assert queued == before
    assert len(after) == 3
    assert after[0] == after[1] == after[2] != before


@pytest.mark.case("C054")
def test_a_rank_that_leaves_ends_its_part_at_once_and_the_other_goes_on_alone(outcome: Outcome) -> None:
    assert of_all(outcome.seen, "uneven_data", "num_steps") == [sync_outcomes.STEPS_IN_ALL, sync_outcomes.LEAVES_AFTER]
    assert outcome.tables["uneven_data"][2].table_step == sync_outcomes.STEPS_IN_ALL


@pytest.mark.parametrize("scenario", ["scaled_replicas", "clipped_replicas"])
def test_ddp_replicas_and_loss_scales_are_equal_after_an_inf_on_one_rank(outcome: Outcome, scenario: str) -> None:
    for name in ("dense", "scales", "table_step"):
        first, second = of_all(outcome.seen, scenario, name)
        assert first == second
    dense, table_step = (of_all(outcome.seen, scenario, name)[0] for name in ("dense", "table_step"))
    assert isinstance(dense, list)
    assert len(set(dense)) == replica.STEPS
    assert table_step == replica.STEPS - 2  # in two steps all abstained
    assert of_all(outcome.seen, scenario, "skipped") == [[replica.INF_STEP, replica.ALONE_STEP], [replica.INF_STEP]]
