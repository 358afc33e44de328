"""The one name that workers import: what it offers, and that documents and examples use nothing else."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardam
import shardam_proto.errors

ROOT = Path(__file__).resolve().parents[3]

PUBLIC = sorted(set(shardam.__all__) - {"__version__"})


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shardam.__version__ == project["version"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(shardam, name)
    assert not name.startswith("_")
    assert inspect.getdoc(value)


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(shardam, name))])
def test_every_public_method_says_what_it_does(name: str) -> None:
    value = getattr(shardam, name)
    own = [member for member, found in vars(value).items() if callable(found) and not member.startswith("_")]
    assert [member for member in own if not inspect.getdoc(getattr(value, member))] == []


def test_every_error_of_the_table_can_be_caught_by_its_name() -> None:
    classes = {rule.error for rule in shardam_proto.errors.REASONS.values()}
    missing = [error.__name__ for error in classes if getattr(shardam.errors, error.__name__, None) is not error]
    assert missing == []


def programs() -> Iterator[tuple[str, str]]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    yield from (("README.md", match[1]) for match in re.finditer(r"```python\n(.*?)```", readme, re.DOTALL))
    yield from ((path.name, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.py")))


def test_documents_and_examples_use_public_names_only() -> None:
    used = {(origin, name) for origin, code in programs() for name in re.findall(r"(?<![\w./])shardam\.(\w+)", code)}
    assert used
    assert {(origin, name) for origin, name in used if name not in shardam.__all__} == set()
