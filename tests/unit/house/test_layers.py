"""The arrows between the parts, read from every import statement (DESIGN section 6)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PACKAGES = {
    "shardam": ROOT / "client" / "shardam",
    "shardam_server": ROOT / "server" / "shardam_server",
    "shardam_proto": ROOT / "proto" / "shardam_proto",
    "shardam_kernels": ROOT / "kernels" / "shardam_kernels",
}

MAY_IMPORT = {
    "shardam": ("shardam_proto", "shardam_kernels.native", "shardam_kernels.factors"),
    "shardam_server": ("shardam_proto", "shardam_kernels"),
    "shardam_proto": ("shardam_kernels.hashing",),  # routing is a hash; the kernels own the hashes
    "shardam_kernels": (),
}

NEVER_TORCH = ("shardam_server", "shardam_proto", "shardam_kernels")
"""Packages that a CPU shard, the admin API and the command line load: none of their modules imports torch at its top."""

GPU_MODULES = ("shardam_kernels.triton", "shardam_server.shard.gpu_records")
"""What a GPU shard loads besides: torch is its memory, Triton its compiler."""

LOADED_AT_USE = {("shardam_server.shard.process", "shardam_server.shard.gpu_records.open_gpu")}
"""Imports inside the function that opens a GPU."""

CODE_FOLDERS = ("client", "server", "proto", "kernels", "tests", "examples", "benchmarks", "scripts")

MAX_LINES = 400


def modules_of(package: str) -> Iterator[tuple[str, ast.Module]]:
    folder = PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(module: str, statements: ast.AST) -> Iterator[str]:
    """Yields what a module imports; `from a import b` yields a.b, since b may be a module."""
    for node in ast.walk(statements):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: counted from the module's own package
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_below_it(package: str) -> None:
    bad = [
        f"{module} imports {name}"
        for module, tree in modules_of(package)
        for name in imported_names(module, tree)
        if name.split(".")[0] in PACKAGES and name.split(".")[0] != package
        if not any(covers(allowed, name) for allowed in MAY_IMPORT[package])
    ]
    assert not bad


@pytest.mark.parametrize("package", PACKAGES)
def test_no_shipped_module_imports_tests_scripts_or_examples(package: str) -> None:
    bad = [
        f"{module} imports {name}"
        for module, tree in modules_of(package)
        for name in imported_names(module, tree)
        if name.split(".")[0] in {"tests", "scripts", "examples", "benchmarks", "pytest", "hypothesis"}
    ]
    assert not bad


@pytest.mark.parametrize("package", NEVER_TORCH)
def test_server_wire_and_kernels_import_torch_nowhere(package: str) -> None:
    bad = [
        f"{module} imports {name}"
        for module, tree in modules_of(package)
        for name in imported_names(module, tree)
        if covers("torch", name) or covers("triton", name) or any(covers(gpu, name) for gpu in GPU_MODULES)
        if not any(covers(gpu, module) for gpu in GPU_MODULES) and (module, name) not in LOADED_AT_USE
    ]
    assert not bad


def test_kernels_package_loads_no_native_module_by_itself() -> None:
    code = "import sys, shardam_kernels; print([name for name in sys.modules if '_native' in name or name == 'numpy'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_calls_the_salted_hash(package: str) -> None:
    bad = [
        f"{module}:{node.lineno}"
        for module, tree in modules_of(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
    ]
    assert not bad, "Python's hash() differs between processes; use xxhash or mix64"


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    sources = [
        path
        for folder in CODE_FOLDERS
        for pattern in ("*.py", "*.cpp", "*.h", "*.hpp", "*.js", "*.css", "*.html", "*.proto")
        for path in (ROOT / folder).rglob(pattern)
        if "_pb2" not in path.name
    ]
    assert sources
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"split where there are two ideas (at most {MAX_LINES} lines)"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_tells_type_checkers_that_it_is_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").is_file()
