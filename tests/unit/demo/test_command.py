"""The demo's flags, and that neither the command nor the preparation of data loads torch."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardam_server.command_errors import UsageError
from shardam_server.demo_checkpoints import CheckpointOptions, resume_command
from shardam_server.demo_command import parse_options
from shardam_server.demo_run import DemoOptions


def test_bare_demo_has_the_documented_defaults() -> None:
    assert parse_options([]) == DemoOptions(
        data=None, workers=2, shards=2, epochs=5, seed=0, mode="async", data_dir=None, keep=False, as_json=False
    )


def test_every_flag_is_taken() -> None:
    given = ["--data", "synthetic", "--workers", "3", "--shards", "1", "--epochs", "2", "--seed", "9"]
    given += ["--mode", "bounded:04", "--data-dir", "/somewhere", "--keep", "--json"]
    assert parse_options(given) == DemoOptions("synthetic", 3, 1, 2, 9, "bounded:4", Path("/somewhere"), True, True)
    assert parse_options(["--mode", "sync"]).mode == "sync"
    given = ["--checkpoint-dir", "/kept", "--checkpoint-every", "50", "--resume", "before-lunch"]
    assert parse_options(given).checkpoints == CheckpointOptions(Path("/kept"), 50, "before-lunch")
    assert parse_options(["--checkpoint-dir", "/kept", "--resume"]).checkpoints.resume == "latest"


def test_a_folder_is_taken_from_where_the_user_is_and_none_is_memory_only() -> None:
    assert parse_options(["--data-dir", "here"]).data_dir == Path.cwd() / "here"
    assert parse_options(["--data-dir", "none"]).data_dir is None


def test_checkpoints_lie_where_the_user_says_or_a_path_shows_or_in_the_data_folder(tmp_path: Path) -> None:
    made = tmp_path / "kept" / "default" / "before-lunch"
    made.mkdir(parents=True)
    for arguments, root in (
        ([], None),
        (["--data-dir", str(tmp_path)], tmp_path / "checkpoints"),
        (["--data-dir", str(tmp_path), "--checkpoint-dir", "/kept"], Path("/kept")),
        (["--resume", str(made)], tmp_path / "kept"),
    ):
        options = parse_options(arguments)
        assert options.checkpoints.root(options.data_dir) == root
    assert parse_options(["--resume", str(made)]).checkpoints.resumed() == str(made)


def test_a_stopped_run_says_what_to_type_with_the_flags_it_must_have_again() -> None:
    options = parse_options(["--data", "my file.csv", "--workers", "1", "--checkpoint-every", "5", "--data-dir", "/x"])
    command = resume_command(options.flags(), Path("/x/checkpoints"), "20261130T120000-0001")
    assert command.endswith(
        "demo --data 'my file.csv' --workers 1 --shards 2 --epochs 5 --seed 0 --mode async --checkpoint-every 5 "
        "--checkpoint-dir /x/checkpoints --resume 20261130T120000-0001"
    )
    words = shlex.split(command)
    assert parse_options(words[words.index("demo") + 1 :]).workers == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers: must be a whole number from 1 to 64, got '0'"),
        (["--shards", "2.5"], "--shards: must be a whole number from 1 to 64, got '2.5'"),
        (["--epochs", "-1"], "--epochs: must be a whole number from 1 to 1000, got '-1'"),
        (["--seed", str(2**63)], "--seed: must be a whole number"),
        (["--seed", "²"], "--seed: must be a whole number"),
        (["--data-dir", ""], "--data-dir: must be a folder, or none"),
        (["--mode", "ssp"], "--mode: must be async, sync, or bounded:N with N from 0 to 1000, got 'ssp'"),
        (["--mode", "bounded"], "--mode: must be async, sync, or bounded:N"),
        (["--mode", "bounded:-1"], "--mode: must be async, sync, or bounded:N"),
        (["--resume"], "--resume needs a folder of checkpoints: name one with --checkpoint-dir PATH"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs a folder of checkpoints"),
        (["--checkpoint-every", "-5", "--data-dir", "/x"], "--checkpoint-every: must be a whole number from 0"),
        (["--resume", "missing/folder"], "there is no checkpoint"),
        (["--resume", ""], "--resume: must be latest, a checkpoint's name, or a path"),
        (["--worker", "2"], "unrecognized arguments: --worker 2"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_the_help(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(arguments)
    assert message in str(caught.value)
    assert "see shardam demo --help" in str(caught.value)


def test_help_names_every_flag_and_the_file_format_and_loads_no_torch() -> None:
    program = (
        "import sys\nfrom shardam_server.__main__ import main\n"
        "try:\n    main(['demo', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'shardam' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    for word in (
        "--data",
        "--workers",
        "--shards",
        "--epochs",
        "--seed",
        "--mode",
        "--data-dir",
        "--keep",
        "--json",
        "label",
        "cat_*",
        "dense_*",
    ):
        assert word in run.stdout


def test_preparing_data_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom shardam.demo.prepare import main\n"
        f"assert main(['--data', 'synthetic', '--out', {str(tmp_path / 'clicks.npz')!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
