"""What is checked in although a tool could make it again: generated protobuf code and the pinned versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pin_constraints import all_requirements, needed_distributions, project_requirements

ROOT = Path(__file__).resolve().parents[3]

GENERATED = ROOT / "proto" / "shardam_proto" / "v1"


def test_generated_protobuf_code_is_what_the_proto_files_give(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path}, timeout=60)
    fresh = {file.name: file.read_text() for file in (tmp_path / "shardam_proto" / "v1").iterdir()}
    checked_in = {file.name: file.read_text() for file in GENERATED.glob("*_pb2*")}
    assert fresh
    assert sorted(fresh) == sorted(checked_in), "run `make proto`"
    assert [name for name in fresh if fresh[name] != checked_in[name]] == [], "run `make proto`"


def test_the_generator_is_not_newer_than_the_oldest_runtime_allowed() -> None:
    requirement = next(entry for entry in project_requirements() if entry.name == "protobuf")
    text = (GENERATED / "common_pb2.py").read_text()
    version = Version(next(line.split(": ")[1] for line in text.splitlines() if line.startswith("# Protobuf Python Version")))
    floor = min(Version(specifier.version) for specifier in requirement.specifier if specifier.operator == ">=")
    assert version.release[:2] <= floor.release[:2]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(entry.name): entry for entry in found}


def test_every_dependency_is_pinned_exactly_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(pins())
    assert sorted(set(needed_distributions()) - set(pins())) == [], "run `make constraints`"


def test_installed_versions_are_the_pinned_ones() -> None:
    pinned = pins()
    wrong = [f"{name} {version}" for name, version in needed_distributions().items() if version not in pinned[name].specifier]
    assert wrong == [], "run `make setup`"


def test_every_pin_lies_in_the_range_of_the_project() -> None:
    outside = []
    for requirement in all_requirements():
        version = next(iter(pins()[canonicalize_name(requirement.name)].specifier)).version
        if version not in requirement.specifier:
            outside.append(f"{requirement} excludes {version}")
    assert outside == []
