"""Processes that train together: one program, started once for each rank, whose scenarios print what each rank saw."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from shardam_testing.processes import SUPPORT, clean_environment

TIMEOUT_S = 110.0
"""A guard against hangs; the ranks end by themselves before, and say where they hang."""

Seen = dict[str, list[dict[str, object]]]
"""What the ranks saw: scenario -> one dict for each rank, in rank order."""


def of_all(seen: Seen, scenario: str, name: str) -> list[object]:
    """Returns what each rank saw of one thing."""
    return [rank[name] for rank in seen[scenario]]


def run_ranks(module: str, redis_url: str, folder: Path, world_size: int = 2) -> Seen:
    """Runs a program of scenarios (see rank_program.py) in a process for each rank and returns what it printed.

    Args:
        module: the program, a module of this package.
        redis_url: the cluster's Redis.
        folder: an empty one, for what the ranks share.
        world_size: number of ranks.

    Raises:
        AssertionError: a rank ended with an error; what all of them wrote to standard error is the message.
        subprocess.TimeoutExpired: the ranks did not end; they are killed.
    """
    environment = clean_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), str(SUPPORT)]))
    seen: Seen = {}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            arguments = [f"shardam_testing.{module}", redis_url, str(folder), str(rank), str(world_size)]
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in ranks]
    assert not any(process.returncode for process in ranks), "\n".join(errors for _, errors in outputs)
    for output, _ in outputs:
        for line in output.splitlines():
            saw = json.loads(line)
            seen.setdefault(saw.pop("scenario"), []).append(saw)
    return seen
