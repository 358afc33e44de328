"""Builds sdist and wheel in a temporary folder, checks what they hold and tries the wheel; run by `make package-test`.

The wheel comes from the sdist because that is what an index serves: a file missing there would only be noticed by users.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import try_wheel

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {
    "shardam": "client/shardam",
    "shardam_server": "server/shardam_server",
    "shardam_proto": "proto/shardam_proto",
    "shardam_kernels": "kernels/shardam_kernels",
}

NOT_SHIPPED = ("__pycache__", ".so", ".DS_Store")

IN_SDIST = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "kernels/CMakeLists.txt",
    "kernels/csrc/*",
    "proto/shardam_proto/v1/*.proto",
)

NEVER = ("*.env", "*/recbole/*", "*ml-100k*", "tests/*", "*/_pytest/*")
"""Never in a wheel: secrets, data whose licence forbids passing it on, tests."""


def run(*command: str, cwd: Path) -> None:
    """Runs a build step; its output is shown only if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": path},
        check=False,
    )
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")


def build_sdist(out: Path) -> Path:
    """Builds the sdist of the checkout."""
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=ROOT)
    return next(out.glob("*.tar.gz"))


def build_wheel(sdist: Path, out: Path) -> Path:
    """Builds the wheel from the unpacked sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    source = out / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), ".", cwd=source)
    return next(out.glob("*.whl"))


def package_files() -> Iterator[str]:
    """Yields the files of the four packages as a wheel names them: modules, py.typed, stubs, the console's page."""
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and not any(mark in str(path) for mark in NOT_SHIPPED):
                yield f"{package}/{path.relative_to(ROOT / folder)}"


def faults_of_wheel(names: Iterable[str]) -> Iterator[str]:
    """Yields what is wrong with a wheel's content."""
    present = set(names)
    wanted = [*package_files(), *(f"{package}/py.typed" for package in PACKAGES)]
    yield from (f"wheel lacks {name}" for name in sorted(set(wanted) - present))
    if not any(fnmatch(name, "shardam_kernels/_native*.so") for name in present):
        yield "wheel lacks the C++ extension shardam_kernels/_native*.so"
    if not any(fnmatch(name, "*.dist-info/licenses/LICENSE") for name in present):
        yield "wheel lacks the licence"
    tops = {name.split("/")[0] for name in present}
    yield from (f"wheel has {top}/ at its top" for top in sorted(tops - set(PACKAGES)) if not top.endswith(".dist-info"))
    yield from (f"wheel holds {name}" for name in sorted(present) if any(fnmatch(name, pattern) for pattern in NEVER))


def main() -> int:
    """Prints what is wrong, or the names of what was built."""
    with tempfile.TemporaryDirectory(prefix="shardam-package-") as folder:
        out = Path(folder)
        sdist = build_sdist(out)
        with tarfile.open(sdist) as archive:
            in_sdist = [name.partition("/")[2] for name in archive.getnames()]
        faults = [f"sdist lacks {want}" for want in IN_SDIST if not any(fnmatch(name, want) for name in in_sdist)]
        wheel = build_wheel(sdist, out)
        with zipfile.ZipFile(wheel) as archive_of_wheel:
            names = archive_of_wheel.namelist()
        faults += faults_of_wheel(names)
        faults += [] if faults else try_wheel.faults_of_use(wheel, out / "use")
    for fault in faults:
        print(fault)
    print(f"package: {sdist.name} ({len(in_sdist)} files), {wheel.name} ({len(names)} files), {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
