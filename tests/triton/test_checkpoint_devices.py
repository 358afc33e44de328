"""A checkpoint does not know which device its rows were on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shardam_testing.checkpoint_files import make_plan, restore, rows_of, save, trained

from shardam_server.shard.checkpoints.catalogue import Catalogue

RUN_TIME_S = 300.0
"""Ten times what it takes on a busy machine: the process hangs."""


@pytest.mark.case("C077")
def test_a_checkpoint_of_the_cpu_is_loaded_on_a_gpu_and_the_other_way_round_with_the_same_bits(tmp_path: Path) -> None:
    states = trained(2)
    _, written = save(tmp_path, states, "cpu")
    result = subprocess.run(
        [sys.executable, "-m", "shardam_testing.checkpoint_devices", "interpret", str(tmp_path), "cpu", "gpu"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=RUN_TIME_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    manifest, folder = Catalogue(tmp_path, "oak").read("gpu")
    for path in written.glob("*.rows"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert rows_of(restore(manifest, folder, make_plan(manifest, 3))) == rows_of(states)
