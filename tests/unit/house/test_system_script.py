"""scripts/system.sh on machines that lack something, with a pretended apt-get and user id."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "system.sh"


class Machine:
    """A folder that goes first on PATH; its compiler exists only once apt-get has "installed" it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiler = folder / "cxx"
        self.log = folder / "apt.log"

    def add(self, name: str, body: str) -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def add_apt_get(self, brings_compiler: bool) -> None:
        install = (
            f"printf '#!/bin/sh\\ncat >/dev/null\\n' >{self.compiler}; chmod +x {self.compiler}" if brings_compiler else ":"
        )
        self.add("apt-get", f'echo "$@" >>{self.log}; case "$1" in install) {install} ;; esac')

    def check(self, *, user_id: int, path: str | None = None) -> subprocess.CompletedProcess[str]:
        self.add("id", f"echo {user_id}")
        environment = {
            **os.environ,
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH'] if path is None else path}",
            "CXX": str(self.compiler),
            "PYTHON": sys.executable,
        }
        command = ["/bin/bash", str(SCRIPT), "build"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

    @property
    def apt_calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_done_where_nothing_is_missing(machine: Machine) -> None:
    machine.add_apt_get(brings_compiler=True)
    machine.add("cxx", "cat >/dev/null")
    result = machine.check(user_id=0)
    assert (result.returncode, result.stdout, machine.apt_calls) == (0, "", []), result.stderr


def test_root_on_debian_gets_what_is_missing(machine: Machine) -> None:
    machine.add_apt_get(brings_compiler=True)
    result = machine.check(user_id=0)
    assert result.returncode == 0, result.stderr
    assert [call.split()[0] for call in machine.apt_calls] == ["update", "install"]
    assert machine.apt_calls[1].split()[-1] == "g++"


def test_anyone_else_gets_the_one_line_and_nothing_is_installed(machine: Machine) -> None:
    machine.add_apt_get(brings_compiler=True)
    result = machine.check(user_id=1000)
    assert result.returncode == 1
    assert "missing: a C++17 compiler" in result.stderr
    assert "sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends g++'" in result.stderr
    assert machine.apt_calls == []


def test_an_installation_that_does_not_help_is_an_error(machine: Machine) -> None:
    machine.add_apt_get(brings_compiler=False)
    result = machine.check(user_id=0)
    assert result.returncode == 1
    assert "still missing after the installation: a C++17 compiler" in result.stderr


def test_a_system_without_apt_get_names_what_is_missing(machine: Machine) -> None:
    tools = machine.folder / "tools"
    tools.mkdir()
    for name in ("make", "sed"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    result = machine.check(user_id=0, path=str(tools))
    assert result.returncode == 1
    assert "missing: a C++17 compiler" in result.stderr
    assert "this system's package manager" in result.stderr


def test_an_old_interpreter_is_named(machine: Machine) -> None:
    machine.add("cxx", "cat >/dev/null")
    old = machine.add("python3", "exit 1")
    environment = {**os.environ, "PATH": f"{machine.folder}:{os.environ['PATH']}", "PYTHON": str(old)}
    machine.add("id", "echo 1000")
    command = ["/bin/bash", str(SCRIPT), "build"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode == 1
    assert f"Python 3.11 to 3.13 (tried: {old})" in result.stderr
