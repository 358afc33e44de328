"""The threads that native calls share: kept between calls, asleep between them, and nobody else's concern."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from shardam_testing.waiting import wait_for

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.initializers import InitialRows, fold_normal
from shardam_kernels.layout import layout

NUM_ROWS, DIM = 4000, 64
"""A gather of all is a megabyte: enough for many threads."""

INITIAL = InitialRows(fold_normal(0.0, 1.0), 5)


def gathered(num_threads: int) -> npt.NDArray[np.float32]:
    """Returns the initial weights of all rows, computed on so many threads."""
    records = native.Records(native.Arena(layout(DIM).stride_bytes), layout(DIM))
    out = np.empty((NUM_ROWS, DIM), np.float32)
    native.gather_rows(records, native.HashIndex(), np.arange(NUM_ROWS), INITIAL, out, num_threads)
    return out


def program(body: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own that has `gathered`."""
    command = [sys.executable, "-c", "import os, sys; from test_native_threads import *\n" + body]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": paths}
    )


def test_calls_at_the_same_time_share_the_threads_and_none_waits_for_another() -> None:
    expected = gathered(1)
    with concurrent.futures.ThreadPoolExecutor(6) as callers:
        for found in callers.map(gathered, [2, 3, 4, 8] * 20):
            assert (found == expected).all()


def test_a_step_on_many_threads_is_the_step_on_one_however_often_it_is_repeated() -> None:
    rng, step = np.random.default_rng(0), factors(AdamOptions(), 1)
    row_ids = rng.integers(0, 500, NUM_ROWS)
    gradients = rng.standard_normal((NUM_ROWS, DIM)).astype(np.float32)
    tables = []
    for num_threads in (1, 4):
        records, index = native.Records(native.Arena(layout(DIM).stride_bytes), layout(DIM)), native.HashIndex()
        records.arena.reserve(500)
        touches = np.zeros((500, 2), np.uint64)
        for t in range(1, 60):
            rows = native.group_rows(row_ids, gradients, step, num_threads)
            rows.find(index)
            rows.insert(index)
            native.update_rows(records, rows, step, touches, t, t, num_threads=num_threads)
        tables.append(np.stack([records.arena.view_record(slot) for slot in range(500)]))
    assert (tables[0] == tables[1]).all()


def test_a_forked_child_has_threads_of_its_own() -> None:
    result = program(
        "expected = gathered(1)\n"
        "gathered(4)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if (gathered(4) == expected).all() and len(os.listdir('/proc/self/task')) > 1 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert (gathered(4) == expected).all()\n"
    )
    assert result.returncode == 0, result.stderr


def test_a_process_ends_at_once_while_its_threads_sleep_or_look_for_work() -> None:
    result = program("gathered(8)\nprint('done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def is_asleep(thread: str) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def check_kept_threads() -> None:
    """Asserts what the test below says, in a process of its own."""
    before = threads()
    gathered(3)
    kept = threads() - before
    assert len(kept) == 2
    gathered(3)
    assert threads() - before == kept
    wait_for("kept threads to sleep", lambda: all(is_asleep(thread) for thread in kept))
    for thread in kept:
        blocked = int(Path(f"/proc/self/task/{thread}/status").read_text().split("SigBlk:")[1].split()[0], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            assert blocked >> (number - 1) & 1


def test_threads_are_kept_and_sleep_between_calls_and_leave_signals_to_others() -> None:
    result = program("check_kept_threads()")
    assert result.returncode == 0, result.stderr
