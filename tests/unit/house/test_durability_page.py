"""docs/durability.md says of each setting what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardam_server.flags import flag_of
from shardam_server.settings import CommonSettings, StateSettings

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "durability.md").read_text(encoding="utf-8")

IN_WORDS = {"data_dir": "none", "journal": "write with a folder, else off", "truncate_journal": "off"}
"""Defaults that the program has as no value."""


def table() -> dict[str, list[str]]:
    """Returns flag -> the other cells of its line in the page's table of settings."""
    lines = PAGE.partition("<!-- settings:")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `--")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_table_has_the_settings_of_a_shards_state_in_their_order_and_no_other() -> None:
    fields = [field for field in StateSettings.model_fields if field not in CommonSettings.model_fields]
    assert list(table()) == [flag_of(field) for field in fields]


@pytest.mark.parametrize("field", [field for field in StateSettings.model_fields if field not in CommonSettings.model_fields])
def test_a_default_is_the_programs(field: str) -> None:
    default = StateSettings.model_fields[field].default
    said = table()[flag_of(field)][0]
    assert said.startswith(
        IN_WORDS[field] if field in IN_WORDS else f"{default:g}" if isinstance(default, float) else str(default)
    )


def test_the_pages_refer_to_each_other_and_to_files_that_exist() -> None:
    for page in ("durability.md", "deploy.md", "workers.md", "checkpoints.md", "tables.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
        assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
