"""The rounds of `make chaos`, a seeded tenth of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shardam_testing.faults.rounds import make_round, run_round

HANG_S = 300.0
SEED = 1


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_round_of_random_faults_leaves_no_mismatch(
    tmp_path: Path, place: int, record_property: Callable[[str, object], None]
) -> None:
    planned = make_round(SEED, place, num_kills=2)
    result = run_round(planned, tmp_path)
    assert result.mismatches == []
    assert result.num_comparisons > 0
    assert result.fired.total() > 0
    record_property("summary", f"{planned.name}: {dict(result.fired)}, {result.num_comparisons} tables compared")


def test_a_plan_follows_from_its_seed() -> None:
    assert [make_round(4, place, 20) for place in range(20)] == [make_round(4, place, 20) for place in range(20)]
    assert make_round(4, 5, 20) != make_round(5, 5, 20)
