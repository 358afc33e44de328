"""Runs random examples for a while; run by `make fuzz SECONDS= SEED= TARGETS=`.

Usage: python scripts/fuzz.py SECONDS SEED [TARGET ...]   (no targets: all, each for its part of SECONDS)

Targets:
    groups  home, three shards and three workers without processes, over a network that loses, reorders and repeats messages
            (tests/support/shardam_testing/group_model)
    codec   messages of the Exchange stream, whole and broken: the codec beside protobuf, and two shards that have to answer
            alike (tests/support/shardam_testing/codec_fuzz)

Exit status: 0 if everything held, 2 for an unknown target; else a traceback with the shortest example found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

# ruff: noqa: E402 - known to pytest alone
from shardam_testing.codec_fuzz import runs as codec
from shardam_testing.group_model import machine


def fuzz_groups(seconds: float, seed: int) -> str:
    """Plays groups; returns what was done."""
    return f"{machine.run_for(seconds, seed)} examples"


def fuzz_codec(seconds: float, seed: int) -> str:
    """Plays messages; returns what was done."""
    return ", ".join(f"{count} {what}" for what, count in codec.run_for(seconds, seed).items())


TARGETS: dict[str, Callable[[float, int], str]] = {"groups": fuzz_groups, "codec": fuzz_codec}
"""Name -> runs it for so many seconds from a seed; raises AssertionError if something that must hold does not."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    seconds, seed, names = float(arguments[0]), int(arguments[1]), arguments[2:] or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        print(f"unknown target {unknown[0]!r}; targets are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    for name in names:
        start = time.monotonic()
        done = TARGETS[name](seconds / len(names), seed)
        print(f"{name}: {done} in {time.monotonic() - start:.0f} s, seed {seed}: everything held", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
