"""The skip check of tests/conftest.py, run over small test files of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, body: str, *options: str, ci: bool = False) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "skips.toml"):
        shutil.copy(TESTS / name, folder / name)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(f"import pytest\n\n{body}")
    environment = {**os.environ, "CI": "true" if ci else "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONPATH"] = str(TESTS / "support")  # conftest.py takes from there what every test needs
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False)


def test_a_skip_for_a_reason_not_on_the_list_fails_the_run(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "def test_a():\n    pytest.skip('no time')\n")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "test_a: no time (not on the list in skips.toml)" in result.stdout


def test_a_module_that_skips_as_a_whole_is_checked_too(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "pytest.skip('no mood', allow_module_level=True)\n")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "no mood" in result.stdout


def test_a_refused_skip_on_a_parallel_worker_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.skip('no mood', allow_module_level=True)\n")
    body = "def test_a():\n    pytest.skip('no time')\n\ndef test_b():\n    pass\n"
    result = run_pytest(tmp_path, body, "-p", "xdist", "-n", "1")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "test_a: no time (not on the list in skips.toml)" in result.stdout
    assert "test_whole.py: no mood (not on the list in skips.toml)" in result.stdout


def test_a_missing_browser_may_skip_on_a_developers_machine_only(tmp_path: Path) -> None:
    body = "@pytest.mark.skipif(True, reason='chromium is missing')\ndef test_a():\n    pass\n"
    assert run_pytest(tmp_path, body).returncode == pytest.ExitCode.OK
    result = run_pytest(tmp_path, body, ci=True)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "needs Debian's chromium" in result.stdout


def test_missing_hardware_may_skip_everywhere(tmp_path: Path) -> None:
    body = "def test_a():\n    pytest.skip('no GPU is visible')\n"
    assert run_pytest(tmp_path, body, ci=True).returncode == pytest.ExitCode.OK


def test_a_strict_expected_failure_is_no_skip(tmp_path: Path) -> None:
    body = "@pytest.mark.xfail(strict=True, reason='known')\ndef test_a():\n    assert False\n"
    assert run_pytest(tmp_path, body).returncode == pytest.ExitCode.OK
