"""Python blocks of the docs that begin with their imports are programs; they run as printed, each in a folder of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from shardam_testing.processes import clean_environment

DOCS = Path(__file__).resolve().parents[2] / "docs"

PROGRAM = re.compile(r"^```python\n(?P<code>import .*?)^```$", re.MULTILINE | re.DOTALL)
"""A block that imports what it uses; others are parts of programs."""

TIMEOUT_S = 240
"""Hang guard; the slowest program takes a tenth of it."""

PROGRAMS = [
    pytest.param(match["code"], id=f"{page.stem}-{index}")
    for page in sorted(DOCS.glob("*.md"))
    for index, match in enumerate(PROGRAM.finditer(page.read_text(encoding="utf-8")))
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", PROGRAMS)
def test_a_program_of_a_page_runs_as_printed(code: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{code}\nended with {result.returncode}:\n{result.stdout}\n{result.stderr}"


def test_the_pages_show_a_resume_and_each_way_in_and_out() -> None:
    shown = "\n".join(str(program.values[0]) for program in PROGRAMS)
    calls = (
        "checkpoint(",
        "restore(",
        "extra(",
        ".export(",
        "import_table(",
        "import_state_dict(",
        "export_state_dict(",
        "localize(",
    )
    assert [call for call in calls if call not in shown] == []
