"""Runs random rounds of faults for a while and prints what fired and what was compared; run by `make chaos SECONDS= SEED=`.

Usage: python scripts/chaos.py SECONDS SEED

Each round starts a cluster behind proxies, trains on it, plays a plan that follows from the seed, and compares every table with
a replay of its shard's journal in NumPy, one worker's run with a run without faults, and a group's steps with one process that
carries home's decisions out. Two runs of one worker come first, on three shards and on one, with a kill of a shard for every 3
of SECONDS; then four runs of groups of 2 and 4 in sync mode, each with a kill of a shard in a chosen phase of a step for every
4 of SECONDS; then a kill of home, of another shard or of the caller in a chosen phase of a checkpoint or of a restore for every
1.5 of SECONDS; then random rounds for SECONDS, in turn of a group, without one, and with checkpoints and their like, the
last of which is finished. Exit status: 0 if nothing differed, 1 otherwise; the folder of a round that differed is kept.
"""

from __future__ import annotations

import collections
import functools
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

# ruff: noqa: E402 - known to pytest alone
from shardam_testing.faults.checkpoint_kills import JobPhase
from shardam_testing.faults.checkpoint_rounds import make_job_kills, run_job_kills
from shardam_testing.faults.group_rounds import RUNS_UNDER_KILLS, GroupRound, make_group_round, run_group_round
from shardam_testing.faults.job_rounds import make_job_round
from shardam_testing.faults.plans import Phase
from shardam_testing.faults.rounds import Round, RoundResult, make_round, run_round

SECONDS_PER_KILL = 3
"""60 s are 20 kills in each run of one worker under kills."""

SECONDS_PER_GROUP_KILL = 4
"""60 s are 15 kills in each run of a group under kills, 60 in all."""

SECONDS_PER_JOB_KILL = 1.5
"""60 s are 40 kills: of each victim in each phase of checkpoints and restores."""

NUM_RUNS_UNDER_KILLS = 2
"""Rounds of one worker before the random ones (make_round)."""

Play = Callable[[Path], RoundResult]


def fixed_rounds(seconds: float, seed: int) -> Iterator[tuple[str, Play]]:
    """Yields the rounds under kills, with their names."""
    for place in range(NUM_RUNS_UNDER_KILLS):
        yield plain(make_round(seed, place, num_kills=max(2, int(seconds // SECONDS_PER_KILL))))
    for place in range(len(RUNS_UNDER_KILLS)):
        yield of_group(make_group_round(seed, place, num_kills=max(2, int(seconds // SECONDS_PER_GROUP_KILL))))
    kills = make_job_kills(seed, max(2, int(seconds // SECONDS_PER_JOB_KILL)))
    yield f"{len(kills)} kills in checkpoints and restores", functools.partial(run_job_kills, kills)


def random_rounds(seed: int) -> Iterator[tuple[str, Play]]:
    """Yields random rounds, with their names, in turn of a group, without one, and with checkpoints."""
    for place in itertools.count():
        yield of_group(make_group_round(seed, len(RUNS_UNDER_KILLS) + place, num_kills=0))
        yield plain(make_round(seed, NUM_RUNS_UNDER_KILLS + place, num_kills=0))
        yield plain(make_job_round(seed, place))


def plain(planned: Round) -> tuple[str, Play]:
    """Returns a round without a group."""
    return planned.name, functools.partial(run_round, planned)


def of_group(planned: GroupRound) -> tuple[str, Play]:
    """Returns a round of a group."""
    return planned.name, functools.partial(run_group_round, planned)


def run(seconds: float, seed: int) -> RoundResult:
    """Runs rounds and returns their sum."""
    start, total, place = time.monotonic(), RoundResult(), itertools.count()
    for name, play in fixed_rounds(seconds, seed):
        add(total, play_one(next(place), name, play, seed))
    random_start = time.monotonic()
    for name, play in random_rounds(seed):
        if time.monotonic() - random_start >= seconds:
            break
        add(total, play_one(next(place), name, play, seed))
    total.seconds = time.monotonic() - start
    return total


def play_one(place: int, name: str, play: Play, seed: int) -> RoundResult:
    """Runs one round, prints what it was, and keeps its folder if something differed."""
    folder = Path(tempfile.mkdtemp(prefix=f"shardam-chaos-{seed}-{place}-"))
    result = play(folder)
    print(f"round {place}: {name}: {result.num_changes} changes in {result.seconds:.1f} s")
    print(f"  fired: {describe(result.fired)}")
    compared = f"{result.num_comparisons} tables" + (f", {result.num_decisions} decisions" if result.num_decisions else "")
    print(f"  compared: {compared}, {len(result.mismatches)} mismatches", flush=True)
    if result.mismatches:
        print("".join(f"  MISMATCH {line}\n" for line in result.mismatches) + f"  kept: {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return result


def add(total: RoundResult, result: RoundResult) -> None:
    """Adds a round to the sum."""
    total.fired += result.fired
    total.num_changes += result.num_changes
    total.num_comparisons += result.num_comparisons
    total.num_decisions += result.num_decisions
    total.mismatches += result.mismatches


def in_phases(fired: collections.Counter[str], of: type[Phase | JobPhase]) -> collections.Counter[str]:
    """Returns the kills in a chosen phase of a group's step, or of a job."""
    phases = tuple(f"({phase.value})" for phase in of)
    return collections.Counter({kind: count for kind, count in fired.items() if kind.endswith(phases)})


def describe(fired: collections.Counter[str]) -> str:
    """Returns kinds and counts, the most frequent first."""
    return ", ".join(f"{kind} {count}" for kind, count in fired.most_common()) or "nothing"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    seconds, seed = float(arguments[0]), int(arguments[1])
    total = run(seconds, seed)
    print(f"total in {total.seconds:.0f} s, seed {seed}: {total.num_changes} changes")
    print(f"  fired: {describe(total.fired)}")
    kills, in_jobs = in_phases(total.fired, Phase), in_phases(total.fired, JobPhase)
    print(f"  groups: {total.num_decisions} decisions compared, {kills.total()} kills by phase: {describe(kills)}")
    print(f"  checkpoints: {in_jobs.total()} kills by phase: {describe(in_jobs)}")
    print(f"  compared: {total.num_comparisons} tables, mismatches: {len(total.mismatches)}")
    return 1 if total.mismatches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
