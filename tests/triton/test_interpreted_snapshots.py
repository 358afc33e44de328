"""Snapshots of rows on GPU kernels, interpreted in a process of their own: the pytest process compiles them instead."""

from __future__ import annotations

import os
import subprocess
import sys

HANG_S = 300.0
"""Ten times what the process takes on a busy machine."""


def test_snapshots_of_rows_on_a_device_give_the_rows_of_their_cuts() -> None:
    command = [sys.executable, "-m", "shardam_testing.interpreted_snapshots"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
