"""scripts/run_tests.py runs every test once and is honest about what failed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import run_tests
from run_tests import ROOT, STAGES, Stage


def test_every_test_file_belongs_to_exactly_one_stage() -> None:
    counted = Counter(path for stage in STAGES for path in stage.files())
    present = {str(path) for path in (ROOT / "tests").rglob("test_*.py")}
    assert present - set(counted) == set()
    assert {path: times for path, times in counted.items() if times != 1} == {}


@pytest.fixture
def small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # quick; nothing here needs a plugin
    stages = (Stage("first", 60, "first"), Stage("second", 60, "second"))
    monkeypatch.setattr(run_tests, "STAGES", stages)
    return tmp_path / "tests"


def write(folder: Path, stage: str, body: str) -> None:
    (folder / stage).mkdir(parents=True, exist_ok=True)
    (folder / stage / f"test_{stage}.py").write_text(body)


@pytest.mark.parametrize(
    ("body", "code", "counts"),
    [
        ("def test_a(): pass\n", 0, "tests: 1 passed, 0 failed, 0 skipped"),
        ("def test_a(): pass\ndef test_b(): assert 0\n", 1, "tests: 1 passed, 1 failed, 0 skipped"),
        ("import no_such_module\n", 1, "tests: 0 passed, 1 failed, 0 skipped"),
        ("import pytest\ndef test_a(): pytest.skip('x')\n", 1, "tests: 0 passed, 0 failed, 1 skipped"),
        ("A = 1\n", 1, "tests: 0 passed, 0 failed, 0 skipped"),
    ],
    ids=["passes", "one fails", "cannot be imported", "only skips", "has no test"],
)
def test_a_stage_is_as_good_as_its_tests(
    small_tree: Path, capfd: pytest.CaptureFixture[str], body: str, code: int, counts: str
) -> None:
    write(small_tree, "first", body)
    assert run_tests.main(["first"]) == code
    assert capfd.readouterr().out.splitlines()[-1] == counts


def test_a_stage_without_files_fails_the_run(small_tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(small_tree, "first", "def test_a(): pass\n")
    assert run_tests.main([]) == 1
    assert "FAILED (pytest exit 5)" in capfd.readouterr().out


def test_a_process_that_a_test_leaves_behind_fails_the_stage(
    small_tree: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "EXIT_TIME_S", 0.0)
    body = "import subprocess, sys\ndef test_a(): subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    write(small_tree, "first", body)
    assert run_tests.main(["first"]) == 1
    assert "left behind:" in capfd.readouterr().out


def test_later_stages_run_after_a_failed_one(small_tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(small_tree, "first", "def test_a(): assert 0\n")
    write(small_tree, "second", "def test_b(): pass\n")
    assert run_tests.main([]) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "tests: 1 passed, 1 failed, 0 skipped"


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests.main(["no-such-stage"]) == 2
    assert "stages are unit, client, parity" in capsys.readouterr().err
