"""Runs random examples of a group of workers under faults for a while; run by `make fuzz SECONDS= SEED=`.

Usage: python scripts/fuzz.py SECONDS SEED

Home, three shards and three workers without processes, over a network that loses, reorders and repeats messages; see
tests/support/shardam_testing/group_model. Exit status: 0 if everything held; else a traceback with the shortest example found.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from shardam_testing.group_model.machine import run_for  # noqa: E402 - known to pytest alone


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    seconds, seed = float(arguments[0]), int(arguments[1])
    start = time.monotonic()
    print(f"{run_for(seconds, seed)} examples in {time.monotonic() - start:.0f} s, seed {seed}: everything held")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
