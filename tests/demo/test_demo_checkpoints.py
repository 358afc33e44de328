"""`shardam demo` stopped and resumed: Ctrl-C makes a checkpoint, and the run that goes on from it ends as one that was never
stopped, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from shardam_testing.demos import HANG_S, RunningDemo, running_demo, write_clicks

pytestmark = pytest.mark.timeout(4 * HANG_S)

FIGURES = ("auc", "log_loss", "baseline_auc", "baseline_log_loss", "rows", "steps", "table_steps", "batch_size")
"""What does not depend on the machine's pace. Both AUC and log loss are of every test sample, in float64."""


def figures_of(demo: RunningDemo) -> dict[str, float]:
    assert demo.wait() == 0, demo.err.read_text()
    demo.assert_nothing_is_left()
    result = json.loads(demo.out.read_text().splitlines()[-1])
    return {name: result[name] for name in FIGURES}


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


@dataclasses.dataclass(frozen=True)
class Stopped:
    """A demo that was stopped by Ctrl-C.

    Attributes:
        flags: what it ran with, but for where it keeps checkpoints.
        resumed_flags: what it said to go on with.
        checkpoint: the folder of its last checkpoint.
        kept: the root of its checkpoints.
    """

    flags: tuple[str, ...]
    resumed_flags: list[str]
    checkpoint: Path
    kept: Path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    flags = (
        "--data",
        str(write_clicks(folder)),
        "--mode",
        "sync",
        "--workers",
        "2",
        "--shards",
        "2",
        "--epochs",
        "40",
        "--json",
    )
    kept = folder / "kept"
    with running_demo(folder, *flags, "--checkpoint-dir", str(kept), "--checkpoint-every", "7") as demo:
        demo.wait_for_text("after step 14")
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 128 + signal.SIGINT, demo.err.read_text()
        demo.assert_nothing_is_left()
        said = demo.err.read_text()
    assert "Traceback" not in said
    assert "is given up" not in said, "a run that cannot go on leaves the rows of the data folder as they are"
    command = next(line for line in said.splitlines() if "--resume" in line)
    words = shlex.split(command)
    assert (kept / "default" / words[-1] / "manifest.json").is_file()
    return Stopped(flags, words[words.index("demo") + 1 :], kept / "default" / words[-1], kept)


def test_a_demo_stopped_by_ctrl_c_goes_on_as_if_it_had_not_been(tmp_path: Path, stopped: Stopped) -> None:
    with running_demo(folder_of(tmp_path, "whole"), *stopped.flags) as demo:
        whole = figures_of(demo)
    resumed_flags = list(stopped.resumed_flags)
    resumed_flags[resumed_flags.index("--shards") + 1] = "3"
    at = resumed_flags.index("--checkpoint-dir")  # from a copy, by its path alone
    copied = shutil.copytree(stopped.kept, tmp_path / "copied") / "default" / stopped.checkpoint.name
    resumed_flags[at:] = ["--resume", str(copied)]
    with running_demo(folder_of(tmp_path, "resumed"), *resumed_flags, "--json") as demo:
        assert figures_of(demo) == whole
        assert "goes on from the checkpoint after step" in demo.err.read_text()


def test_a_checkpoint_of_another_run_is_refused_with_both_values(tmp_path: Path, stopped: Stopped) -> None:
    flags = list(stopped.flags)
    flags[flags.index("--workers") + 1] = "1"
    with running_demo(tmp_path, *flags, "--data-dir", str(tmp_path / "rows"), "--resume", str(stopped.checkpoint)) as demo:
        assert demo.wait() == 1
        said = demo.err.read_text()
    assert "workers is 2 there and 1 here" in said
    assert "Traceback" not in said


def test_ctrl_c_without_a_folder_ends_the_demo_at_once(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--data", str(write_clicks(tmp_path)), "--epochs", "500", "--shards", "1") as demo:
        demo.wait_for_text("epoch   shardam")
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 128 + signal.SIGINT
        demo.assert_nothing_is_left()
    assert "checkpoint" not in demo.out.read_text()
