"""Runs random rounds of faults for a while and prints what fired and what was compared; run by `make chaos SECONDS= SEED=`.

Usage: python scripts/chaos.py SECONDS SEED

Each round starts a cluster behind proxies, trains on it, plays a plan that follows from the seed, and compares every table with
a replay of its shard's journal in NumPy, and one worker's run with a run without faults. Two runs of one worker come first, on
three shards and on one, with a kill of a shard for every 3 of SECONDS; then random rounds for SECONDS, the last of which is
finished. Exit status: 0 if nothing differed, 1 otherwise; the folder of a round that differed is kept.
"""

from __future__ import annotations

import collections
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from shardam_testing.faults.rounds import RoundResult, make_round, run_round  # noqa: E402 - known to pytest alone

SECONDS_PER_KILL = 3
"""60 s are 20 kills in each run under kills."""

NUM_RUNS_UNDER_KILLS = 2
"""Rounds before the random ones (make_round)."""


def run(seconds: float, seed: int) -> RoundResult:
    """Runs rounds and returns their sum."""
    start = random_start = time.monotonic()
    total, place = RoundResult(), 0
    while place < NUM_RUNS_UNDER_KILLS or time.monotonic() - random_start < seconds:
        planned = make_round(seed, place, num_kills=max(2, int(seconds // SECONDS_PER_KILL)))
        folder = Path(tempfile.mkdtemp(prefix=f"shardam-chaos-{seed}-{place}-"))
        result = run_round(planned, folder)
        print(f"round {place}: {planned.name}: {result.num_changes} changes in {result.seconds:.1f} s")
        print(f"  fired: {describe(result.fired)}")
        print(f"  compared: {result.num_comparisons} tables, {len(result.mismatches)} mismatches", flush=True)
        if result.mismatches:
            print("".join(f"  MISMATCH {line}\n" for line in result.mismatches) + f"  kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        total.fired += result.fired
        total.num_changes += result.num_changes
        total.num_comparisons += result.num_comparisons
        total.mismatches += result.mismatches
        place += 1
        if place == NUM_RUNS_UNDER_KILLS:
            random_start = time.monotonic()
    total.seconds = time.monotonic() - start
    return total


def describe(fired: collections.Counter[str]) -> str:
    """Returns kinds and counts, the most frequent first."""
    return ", ".join(f"{kind} {count}" for kind, count in fired.most_common()) or "nothing"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    seconds, seed = float(arguments[0]), int(arguments[1])
    total = run(seconds, seed)
    print(f"total in {total.seconds:.0f} s, seed {seed}: {total.num_changes} changes")
    print(f"  fired: {describe(total.fired)}")
    print(f"  compared: {total.num_comparisons} tables, mismatches: {len(total.mismatches)}")
    return 1 if total.mismatches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
