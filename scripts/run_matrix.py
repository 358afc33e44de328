"""Runs test stages once for each of several settings that no result may depend on, and prints a table; run by `make matrix`.

Usage: python scripts/run_matrix.py [--threads N,N] [--chunk-kib N,N] [STAGE ...]

Without --threads: 1 and 4. Without --chunk-kib: 64, 2048 (the default of clients) and 4096, the least and the most. Without
stages: all of scripts/run_tests.py. Exit status: 0 if every stage passed under every setting, 1 otherwise, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import run_tests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from shardam_testing.matrix import CHUNK_NAME, THREADS_NAME

THREADS = (1, 4)
"""The default, and more than there are cores in CI."""

CHUNK_KIB = (64, 2048, 4096)
"""The least, the default, and the most."""


def settings(threads: Sequence[int], chunk_kib: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yields the environment of each setting."""
    for num_threads, size in itertools.product(threads, chunk_kib):
        yield {THREADS_NAME: str(num_threads), CHUNK_NAME: str(size)}


def run_setting(setting: Mapping[str, str], stages: Sequence[str]) -> int:
    """Runs stages under a setting; returns the exit status of run_tests."""
    print(f"\n==== {describe(setting)}", flush=True)
    os.environ.update(setting)
    return run_tests.main(stages)


def describe(setting: Mapping[str, str]) -> str:
    """Returns a setting as people read it."""
    return f"{setting[THREADS_NAME]} threads, chunks of {setting[CHUNK_NAME]} KiB"


def numbers(text: str) -> tuple[int, ...]:
    """Reads integers with commas between them.

    Raises:
        ValueError: something else stands there.
    """
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str]) -> int:
    """Runs all settings and prints their outcomes."""
    parser = argparse.ArgumentParser(description="Runs test stages under several settings.")
    parser.add_argument("--threads", type=numbers, default=THREADS, help="threads of a shard's kernels")
    parser.add_argument("--chunk-kib", type=numbers, default=CHUNK_KIB, help="KiB of rows in a message")
    parser.add_argument("stages", nargs="*", help="stages of scripts/run_tests.py; none: all")
    options = parser.parse_args(arguments)
    rows, worst = [], 0
    for setting in settings(options.threads, options.chunk_kib):
        start = time.monotonic()
        status = run_setting(setting, options.stages)
        worst = max(worst, status)
        rows.append(f"{describe(setting):<40} {time.monotonic() - start:>8.0f}  {'ok' if status == 0 else 'FAILED'}")
    print(f"\n{'setting':<40} {'seconds':>8}")
    print("\n".join(rows), flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
