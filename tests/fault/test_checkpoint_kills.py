"""SIGKILL of home, of another shard and of the caller in phases of checkpoints and restores: a seeded tenth of `make chaos`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shardam_testing.faults.checkpoint_kills import (
    ALL_KILLS,
    CHECKPOINT_PHASES,
    RESTORE_PHASES,
    VICTIMS,
    JobKill,
    JobPhase,
)
from shardam_testing.faults.checkpoint_rounds import make_job_kills, run_job_kills
from shardam_testing.faults.job_rounds import make_job_round
from shardam_testing.faults.rounds import run_round

HANG_S = 400.0
"""What takes 20 s on an idle machine."""

pytestmark = pytest.mark.timeout(HANG_S)

KILLS = {
    "checkpoints": (
        JobKill(JobPhase.HALF_CUT, "home"),
        JobKill(JobPhase.HALF_WRITTEN, "last"),
        JobKill(JobPhase.COMPLETE, "home"),
    ),
    "restores": (
        JobKill(JobPhase.CHECKING, "home"),
        JobKill(JobPhase.HALF_ADOPTED, "peer"),
    ),
}


@pytest.mark.case("C073")
@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_a_kill_in_mid_job_leaves_a_whole_state_and_whole_checkpoints(
    tmp_path: Path, kills: tuple[JobKill, ...], record_property: Callable[[str, object], None]
) -> None:
    result = run_job_kills(kills, tmp_path)
    assert result.mismatches == []
    assert result.fired.total() == len(kills)
    assert result.num_comparisons > 0
    record_property("summary", f"{dict(result.fired)}, {result.num_comparisons} tables compared")


def test_forty_kills_are_each_victim_in_each_phase() -> None:
    assert set(make_job_kills(3, 40)) == set(ALL_KILLS)
    assert len(ALL_KILLS) == len(VICTIMS) * len(CHECKPOINT_PHASES + RESTORE_PHASES) == 40
    assert make_job_kills(3, 12) == make_job_kills(3, 12) != make_job_kills(4, 12)


@pytest.mark.parametrize("place", [0])
def test_a_round_of_random_faults_with_checkpoints_leaves_no_mismatch(
    tmp_path: Path, place: int, record_property: Callable[[str, object], None]
) -> None:
    planned = make_job_round(1, place)
    result = run_round(planned, tmp_path)
    assert result.mismatches == []
    assert result.num_comparisons > 0
    record_property("summary", f"{planned.name}: {dict(result.fired)}, {result.num_comparisons} tables compared")


def test_a_plan_with_checkpoints_follows_from_its_seed() -> None:
    assert [make_job_round(4, place) for place in range(9)] == [make_job_round(4, place) for place in range(9)]
    assert make_job_round(4, 5) != make_job_round(5, 5)
