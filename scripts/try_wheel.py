"""Installs a built wheel in virtual environments of its own, outside the checkout, and runs what it promises.

The environments hold nothing but what the wheel's metadata or requirements-server.txt ask for, and what that needs in turn;
these packages are links to the files of the environment that runs this, so that no network is needed and nothing is copied.
A dependency that is imported but not declared is missing there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import venv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pin_constraints import ROOT, children_of

RUN_TIMEOUT_S = 300
"""Hang guard; the slowest command takes a tenth of it."""

READY = "cluster 'default' is ready"
"""`shardam up` says this once all its processes serve."""


def requirements_of_wheel(wheel: Path) -> list[Requirement]:
    """Returns what a wheel's metadata ask for on this interpreter, without extras."""
    with ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    requirements = [Requirement(line) for line in headers.get_all("Requires-Dist") or []]
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def requirements_of_server() -> list[Requirement]:
    """Returns the lines of requirements-server.txt."""
    lines = (ROOT / "requirements-server.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def needed_distributions(requirements: Iterable[Requirement]) -> Iterator[metadata.Distribution]:
    """Yields the installed distributions that the requirements need, each once.

    Raises:
        importlib.metadata.PackageNotFoundError: one is not installed; run `make setup`.
    """
    waiting, seen = list(requirements), set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            waiting += children_of(requirement)
            yield metadata.distribution(requirement.name)


def link_distributions(distributions: Iterable[metadata.Distribution], site_packages: Path) -> None:
    """Links the distributions' files into a folder: whole folders, where no other distribution has files in them."""
    owners: dict[str, set[int]] = defaultdict(set)
    files: list[tuple[metadata.Distribution, list[str]]] = []
    for number, distribution in enumerate(distributions):
        for file in distribution.files or []:
            if file.parts[0] == "..":  # a script, which names the interpreter that it was installed for
                continue
            places = ["/".join(file.parts[: count + 1]) for count in range(len(file.parts))]
            files.append((distribution, places))
            for place in places:
                owners[place].add(number)
    for distribution, places in files:
        target = site_packages / next(place for place in places if len(owners[place]) == 1 or place == places[-1])
        if not target.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(distribution.locate_file(str(target.relative_to(site_packages))))).resolve())


class Result(NamedTuple):
    """What a program did: its command line, exit status, stdout and stderr together."""

    command: str
    status: int
    output: str


class Environment:
    """A virtual environment with a wheel and what it needs.

    Args:
        folder: where it is made; must not exist.
        wheel: the wheel.
        requirements: what else it holds.
    """

    def __init__(self, folder: Path, wheel: Path, requirements: Iterable[Requirement]) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self._bin = folder / "bin"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        link_distributions(needed_distributions(requirements), site_packages)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self._bin / "python")]
        subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True, stdin=subprocess.DEVNULL)

    def run(self, program: str, *arguments: str, until: str = "") -> Result:
        """Runs a program of the environment in an empty folder.

        Args:
            program: its name.
            *arguments: its arguments.
            until: its stdin ends when a line of its output holds this text.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SHARDAM_", "PYTHON"))}
        output = []
        with tempfile.TemporaryDirectory(prefix="shardam-try-") as folder:
            process = subprocess.Popen(
                [str(self._bin / program), *arguments],
                cwd=folder,
                env={**inherited, "XDG_STATE_HOME": folder},  # what `up` keeps goes with the folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            hang_guard = threading.Timer(RUN_TIMEOUT_S, process.kill)
            hang_guard.start()
            with process:
                assert process.stdin is not None
                assert process.stdout is not None
                for line in process.stdout:
                    output.append(line)
                    if until and until in line:
                        process.stdin.close()
            hang_guard.cancel()
        return Result(f"{program} {' '.join(arguments)}", process.returncode, "".join(output))


def _fault(result: Result, *, expected: str) -> Iterator[str]:
    if result.status != 0 or expected not in result.output:
        yield f"the installed wheel: `{result.command}` ended with {result.status}:\n{result.output}"


def faults_of_server(environment: Environment) -> Iterator[str]:
    """Yields what fails where requirements-server.txt is all there is: the server image, without torch."""
    if environment.run("python", "-c", "import torch").status == 0:
        yield "requirements-server.txt brings torch"
    yield from _fault(environment.run("shardam", "version"), expected="shardam ")
    flags = ("--shards", "1", "--port", "0", "--admin-port", "0", "--exit-with-stdin")
    yield from _fault(environment.run("shardam", "up", *flags, until=READY), expected=READY)


def faults_of_demo(environment: Environment) -> Iterator[str]:
    """Yields what fails where the wheel is installed as `pip install` does."""
    yield from _fault(environment.run("shardam", "demo", "--data", "synthetic", "--epochs", "1"), expected="exp_avg_sq")


def faults_of_use(wheel: Path, folder: Path) -> Iterator[str]:
    """Yields what does not work once the wheel is installed.

    Args:
        wheel: the wheel.
        folder: for the environments; must not exist.
    """
    yield from faults_of_server(Environment(folder / "server", wheel, requirements_of_server()))
    yield from faults_of_demo(Environment(folder / "demo", wheel, requirements_of_wheel(wheel)))
