"""docs/workers.md says of settings and metrics what the program does, and its tables name what exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import shardam
from shardam_server.flags import flag_of
from shardam_server.settings import StateSettings
from shardam_server.shard import metrics

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")


def cells(first: str) -> list[str]:
    """Returns the cells of the table line that starts with a word in code."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{first}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("field", ["step_timeout_s", "client_lease_s"])
def test_a_default_of_shards_is_the_programs(field: str) -> None:
    assert cells(flag_of(field))[1:3] == [f"{StateSettings.model_fields[field].default:g}", "shards"]


def test_the_defaults_of_connect_are_the_programs() -> None:
    parameters = inspect.signature(shardam.connect).parameters
    assert cells("shard_timeout_s=")[1] == f"{parameters['shard_timeout_s'].default:g}"
    assert (parameters["mode"].default, parameters["reduce"].default) == ("async", "mean")


def test_the_metrics_that_it_names_exist() -> None:
    source = Path(metrics.__file__).read_text(encoding="utf-8")
    named = re.findall(r"`(shardam_[a-z_]+)", PAGE)
    assert len(named) >= 6
    assert [name for name in named if f'"{name}"' not in source] == []


def test_the_files_and_pages_that_it_names_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    named = re.findall(r"(?:benchmarks|examples)/\w+\.py", PAGE)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
