"""Steps of groups on GPU kernels, interpreted in a process of their own: the pytest process compiles them instead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HANG_S = 300.0
"""Ten times what the process takes on a busy machine."""


@pytest.mark.case("C023")
def test_a_group_s_history_leaves_the_same_bits_on_gpu_kernels_as_on_the_cpu() -> None:
    command = [sys.executable, "-m", "shardam_testing.interpreted_steps"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
