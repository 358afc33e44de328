"""Writes constraints.txt, the exact versions of all that pyproject.toml and its extras need; run by `make constraints`.

pip installs the project first without constraints and keeps what is installed and still fits, so an old pin changes only if
pyproject.toml asks for it; then the versions found in this environment are written.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent

HEADER = (
    "# Exact versions of everything `make setup` installs; written by `make constraints` from the ranges of pyproject.toml.\n"
)

DATA_PACKAGE = "recbole==1.2.1"
"""Carries MovieLens-100K for the demo; installed without its dependencies, so nothing in pyproject.toml asks for it."""


def project_requirements(group: str | None = None) -> list[Requirement]:
    """Returns the requirements of pyproject.toml.

    Args:
        group: an extra; None: the dependencies proper.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] if group is None else project["optional-dependencies"][group]
    return [Requirement(line) for line in lines]


def all_requirements() -> list[Requirement]:
    """Returns the requirements of pyproject.toml with every extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [requirement for group in (None, *extras) for requirement in project_requirements(group)]


def children_of(requirement: Requirement) -> Iterator[Requirement]:
    """Yields what an installed distribution itself needs on this interpreter, for the extras that are asked of it."""
    for line in metadata.requires(requirement.name) or []:
        child = Requirement(line)
        if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
            yield child


def needed_distributions() -> dict[str, str]:
    """Returns canonical name -> public version of every installed distribution that the project needs.

    Raises:
        importlib.metadata.PackageNotFoundError: something needed is not installed; run `make setup`.
    """
    waiting = all_requirements()
    seen: set[tuple[str, frozenset[str]]] = set()
    versions: dict[str, str] = {}
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        # A local part such as "+cpu" names a build, not a version: whoever installs has a build of their own.
        versions[key[0]] = Version(metadata.version(requirement.name)).public
        waiting += children_of(requirement)
    return versions


def main() -> int:
    """Installs what is missing and writes the file."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "-e", ".[build,dev]"]
    subprocess.run(install, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    lines = [f"{name}=={version}" for name, version in needed_distributions().items()] + [DATA_PACKAGE]
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
    print(f"constraints.txt: {len(lines)} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
