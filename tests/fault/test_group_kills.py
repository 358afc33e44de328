"""Groups in sync under kills of home and of other shards in every phase of a step, and with messages of steps lost.

Without a change of membership the bits follow from the seed and the number of ranks alone: those of one process that carries
home's decisions out, for any number of shards and any faults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shardam_testing.faults.group_rounds import GroupRound, make_group_round, play_group_round, run_group_round
from shardam_testing.faults.members import GroupPlan
from shardam_testing.faults.network_faults import Lose
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.plans import KillInPhase, Network, Phase, Planned, Stepped
from shardam_testing.faults.rounds import RoundResult
from shardam_testing.faults.verification import run_differences

HANG_S = 300.0
"""What takes 10 s on an idle machine."""

pytestmark = pytest.mark.timeout(HANG_S)

SEED = 11
LAST_STEP = 36
"""Two cycles of special steps and some more, with room for two kills."""

HOME, PEER = 0, 2

RUNS = {
    "2 ranks, 3 shards": (
        2,
        3,
        [
            Planned(Stepped(2), KillInPhase(Phase.HALF, HOME)),
            Planned(Stepped(8), Network(1, Lose("update"))),
            Planned(Stepped(12), Network(HOME, Lose("staged"))),
            Planned(Stepped(16), KillInPhase(Phase.DECIDED, PEER)),
        ],
    ),
    "2 ranks, 1 shard": (
        2,
        1,
        [
            Planned(Stepped(2), Network(HOME, Lose("part"))),
            Planned(Stepped(4), KillInPhase(Phase.DECIDED, HOME)),
        ],
    ),
    "4 ranks, 1 shard": (
        4,
        1,
        [
            Planned(Stepped(2), Network(HOME, Lose("result"))),
            Planned(Stepped(4), KillInPhase(Phase.ARRIVED, HOME)),
        ],
    ),
    "4 ranks, 3 shards": (
        4,
        3,
        [
            Planned(Stepped(2), KillInPhase(Phase.STAGED, PEER)),
            Planned(Stepped(8), Network(HOME, Lose("arrive"))),
            Planned(Stepped(10), Network(1, Lose("updated"))),
            Planned(Stepped(14), KillInPhase(Phase.HALF, PEER)),
        ],
    ),
}


@pytest.fixture(scope="module")
def bits_of_ranks() -> dict[int, dict[str, TableRows]]:
    """Rows after the first run of so many ranks, for the others."""
    return {}


@pytest.mark.parametrize(("world_size", "num_shards", "faults"), RUNS.values(), ids=RUNS)
def test_a_group_s_run_with_shards_killed_in_mid_step_ends_with_the_bits_of_one_process(
    tmp_path: Path,
    bits_of_ranks: dict[int, dict[str, TableRows]],
    world_size: int,
    num_shards: int,
    faults: list[Planned],
) -> None:
    plan, result = GroupPlan(SEED, world_size, LAST_STEP), RoundResult()
    verified = play_group_round(GroupRound("", num_shards, plan, tuple(faults), {}), tmp_path, result)
    assert result.mismatches == []
    assert [decision.step for decision in verified.decisions] == list(range(1, LAST_STEP + 1))
    assert {decision.end for decision in verified.decisions} == {"applied", "abstained", "refused"}
    num_kills = sum(isinstance(fault.action, KillInPhase) for fault in faults)
    kills = {kind: count for kind, count in result.fired.items() if kind.startswith("kill")}
    assert (sum(kills.values()), result.fired["lose"]) == (num_kills, len(faults) - num_kills)
    first = bits_of_ranks.setdefault(world_size, verified.rows)
    assert run_differences(first, verified.rows) == []


@pytest.mark.parametrize("place", [10])
def test_a_round_of_random_faults_of_members_and_shards_leaves_no_mismatch(
    tmp_path: Path, place: int, record_property: Callable[[str, object], None]
) -> None:
    planned = make_group_round(1, place, num_kills=1)
    result = run_group_round(planned, tmp_path)
    assert result.mismatches == []
    assert result.num_comparisons > 0
    assert result.num_decisions > 0
    assert result.fired.total() > 0
    record_property("summary", f"{planned.name}: {dict(result.fired)}, {result.num_decisions} decisions compared")


def test_a_plan_of_a_group_follows_from_its_seed() -> None:
    assert [make_group_round(4, place, 9) for place in range(12)] == [make_group_round(4, place, 9) for place in range(12)]
    assert make_group_round(4, 7, 9) != make_group_round(5, 7, 9)
    kills = [fault.action for fault in make_group_round(4, 0, 12).faults if isinstance(fault.action, KillInPhase)]
    assert {(kill.phase, kill.index) for kill in kills} == {(phase, shard) for phase in Phase for shard in range(3)}
