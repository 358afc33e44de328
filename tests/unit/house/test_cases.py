"""scripts/check_cases.py finds every kind of gap, over a small list and tests of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from check_cases import find_gaps

ROOT = Path(__file__).resolve().parents[3]

TESTS = """
import pytest

@pytest.mark.case("C001")
@pytest.mark.case("C002")
def test_both():
    pass
"""

MARKS = {"C001": ["test_it.py::test_both"], "C002": ["test_it.py::test_both"]}

GOOD = """
numbers = ["C001-C003", "C005"]

[case]
C001 = { title = "one", status = "tested" }
C002 = { title = "two", status = "tested", deviation = "other" }
C003 = { title = "three", status = "later", topic = "checkpoints" }
C005 = { title = "five", status = "not here", why = "no such part" }
"""


def check(folder: Path, listing: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    (folder / "cases.toml").write_text(listing)
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    case(number): a case\n")
    command = [sys.executable, str(ROOT / "scripts" / "check_cases.py"), "--list", str(folder / "cases.toml")]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # quick; nothing here needs a plugin
    return subprocess.run(
        [*command, "--tests", str(folder)], capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False
    )


def test_a_list_that_agrees_with_the_tests_has_no_gaps(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cases: 4 listed, 2 tested, 1 later, 1 not here, no gaps" in result.stdout


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ('C005 = { title = "five", status = "not here", why = "no such part" }', "", "C005: missing from the list"),
        ('"C005"]', "]", "C005: listed, but outside `numbers`"),
        ('status = "later", topic = "checkpoints"', 'status = "tested"', "C003: listed as tested, but no test carries"),
        ('status = "tested" }', 'status = "later", topic = "x" }', "C001: listed as 'later', but test_it.py::test_both"),
        (', topic = "checkpoints"', "", "C003: status 'later' needs a topic"),
        (', why = "no such part"', "", "C005: status 'not here' needs a why"),
        ('status = "later"', 'status = "soon"', "C003: status 'soon' is none of"),
        ('title = "one"', 'title = ""', "C001: has no title"),
        ('deviation = "other"', 'note = "other"', "C002: unknown field note"),
        ('C002 = { title = "two", status = "tested", deviation = "other" }', "", "C002: marked by test_it.py::test_both"),
    ],
)
def test_each_kind_of_gap_is_named(old: str, new: str, gap: str) -> None:
    assert old in GOOD
    assert find_gaps(tomllib.loads(GOOD), MARKS) == []
    gaps = find_gaps(tomllib.loads(GOOD.replace(old, new, 1)), MARKS)
    assert any(found.startswith(gap) for found in gaps), gaps


def test_a_gap_fails_the_check(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD.replace('status = "later", topic = "checkpoints"', 'status = "tested"'))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "C003: listed as tested, but no test carries" in result.stdout
    assert "1 gaps" in result.stdout


def test_a_mark_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD, TESTS.replace('"C002"', "2"))
    assert result.returncode == 1
    assert "mark.case takes one string" in result.stdout


def test_tests_that_cannot_be_collected_fail_the_check(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD, "import no_such_module\n")
    assert result.returncode == 1
    assert "no_such_module" in result.stdout


def test_the_list_counts_every_case_of_the_field_log() -> None:
    listing = tomllib.loads((ROOT / "tests" / "cases.toml").read_text(encoding="utf-8"))
    assert len(listing["case"]) == 114
