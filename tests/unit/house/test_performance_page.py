"""docs/performance.md and the code say the same of the settings."""

from __future__ import annotations

import re

import pytest
from run_tests import ROOT

from shardam import _chunk_setting

PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")

SLACK = 1.05
"""Two sizes within this of each other are equal on a machine that others use, too."""


def sweep() -> dict[int, list[float]]:
    """Returns KiB -> ratios of the page's sweep; empty where the page has none yet."""
    section = PAGE.partition("### Chunk sizes")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", section, re.MULTILINE)
    return {int(size): [float(cell) for cell in cells.split("|") if cell.strip()] for size, cells in rows}


def test_the_page_names_the_default_chunk_size_and_its_range() -> None:
    default = _chunk_setting.DEFAULT_CHUNK_BYTES // 1024
    row = next(line for line in PAGE.splitlines() if "`SHARDAM_CHUNK_KIB`" in line and line.startswith("|"))
    assert f"{_chunk_setting.MIN_CHUNK_KIB} to {_chunk_setting.MAX_CHUNK_KIB}" in row
    assert row.split("|")[2].strip() == str(default)


@pytest.mark.case("C090")
def test_no_chunk_size_of_the_sweep_is_quicker_than_the_default() -> None:
    found = sweep()
    assert {_chunk_setting.MIN_CHUNK_KIB, _chunk_setting.MAX_CHUNK_KIB} <= set(found)
    assert found[_chunk_setting.DEFAULT_CHUNK_BYTES // 1024] == pytest.approx([1.0, 1.0])
    for size, ratios in found.items():
        assert sum(ratios) <= SLACK * len(ratios), size
