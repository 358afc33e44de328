"""The Dockerfile, .dockerignore and the server's requirements, as an engine and pip would read them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import check_package
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shardam_testing.image_files import DockerIgnore, Stage, read_image, read_stages

ROOT = Path(__file__).resolve().parents[3]
stages: dict[str, Stage] = read_stages(ROOT / "Dockerfile")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


# -- the Dockerfile


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    result = run(str(hadolint), "Dockerfile")
    assert (result.returncode, result.stdout) == (0, "")


def test_hadolint_does_find_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nCMD python\n")
    result = run(str(Path(sys.executable).parent / "hadolint"), str(tmp_path / "Dockerfile"))
    assert result.returncode == 1


@pytest.mark.case("C141")
@pytest.mark.parametrize(("target", "program"), [("server", "shardam"), ("gpu", "shardam"), ("worker", "python")])
def test_an_image_starts_its_program_itself_as_an_ordinary_user_and_is_stopped_by_sigterm(target: str, program: str) -> None:
    image = read_image(stages, target)  # raises if a shell would start the program
    assert image.entrypoint == (program,)
    assert int(image.user) >= 1000
    assert image.stop_signal == "SIGTERM"


@pytest.mark.parametrize(("target", "checked"), [("server", True), ("gpu", True), ("worker", False)])
def test_what_serves_has_a_health_check_that_needs_nothing_but_python(target: str, checked: bool) -> None:
    health = read_image(stages, target).health
    assert (health is not None) == checked
    if health is not None:
        assert health.command[:2] == ("python", "-c")
        assert health.timeout_s >= 1
        assert health.start_period_s >= 60


def commands_of(target: str) -> str:
    """Returns all RUN lines of an image."""
    stage = stages[target]
    own = "\n".join(instruction.rest for instruction in stage.instructions if instruction.word == "RUN")
    return commands_of(stage.base) + "\n" + own if stage.base in stages else own


@pytest.mark.parametrize("target", ["server", "gpu"])
def test_an_image_of_shards_has_the_folder_of_the_compose_files_volumes_and_it_is_its_users_alone(target: str) -> None:
    made = re.search(r"install --directory --owner=(\d+) --group=\d+ --mode=(\d+) (\S+) (\S+)", commands_of(target))
    assert made
    image = read_image(stages, target)
    assert (made[1], made[2]) == (image.user, "0700")
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert f"SHARDAM_DATA_DIR: {made[3]}\n" in compose
    assert f"SHARDAM_CHECKPOINT_DIR: {made[4]}\n" in compose


def test_the_server_image_has_no_torch_and_the_others_have() -> None:
    assert "torch" not in commands_of("server")
    assert re.search(r"-c constraints\.txt torch$", commands_of("worker"), re.MULTILINE)
    assert re.search(r"-c constraints\.txt torch triton$", commands_of("gpu"), re.MULTILINE)


def test_every_pip_install_is_held_by_constraints_or_installs_the_built_wheel_alone() -> None:
    commands = "\n".join(commands_of(target) for target in stages)
    installs = re.findall(r"pip install .*?(?=&&|$)", commands, re.MULTILINE)
    assert installs
    assert [line for line in installs if "-c constraints.txt" not in line and "--no-deps /wheels/*.whl" not in line] == []


def test_requirements_server_are_the_projects_dependencies_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements-server.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        line for line in project["dependencies"] if Requirement(line).name != "torch"
    ]


def test_constraints_pin_everything_that_the_images_ask_for() -> None:
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    lines = (ROOT / "requirements-server.txt").read_text(encoding="utf-8").splitlines()
    asked = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    builder = next(line for line in commands_of("builder").splitlines() if line.startswith("pip install"))
    asked |= {canonicalize_name(word) for word in builder.split("constraints.txt ")[1].split()}
    assert asked - pinned == set()


# -- what reaches a build


def context_files() -> list[str]:
    """Returns what lies in this folder and may reach a build: tracked files, and results of builds beside them."""
    listed = run("git", "ls-files").stdout.split("\n")
    return [name for name in listed if name and (ROOT / name).exists()]


def copies() -> Iterator[tuple[str, str]]:
    for stage in stages.values():
        yield from ((stage.name, source) for sources, _ in stage.copies() for source in sources)


@pytest.mark.parametrize(("stage", "source"), list(copies()))
def test_every_copy_of_the_dockerfile_survives_the_dockerignore(stage: str, source: str) -> None:
    ignore = DockerIgnore((ROOT / ".dockerignore").read_text(encoding="utf-8"))
    below = [name for name in context_files() if name == source or name.startswith(f"{source}/")]
    assert below, f"stage {stage} copies {source}, which does not exist"
    assert [name for name in below if not ignore.keeps(name)] == []


def test_the_builder_gets_every_file_that_the_wheel_and_its_build_need() -> None:
    sources = [source for sources, _ in stages["builder"].copies() for source in sources]
    packages = {package: f"{folder}/" for package, folder in check_package.PACKAGES.items()}
    needed = [packages[name.split("/")[0]] + name.partition("/")[2] for name in check_package.package_files()]
    needed += ["pyproject.toml", "README.md", "LICENSE", "kernels/CMakeLists.txt", "kernels/csrc/module.cpp"]
    assert [name for name in needed if not any(name == source or name.startswith(f"{source}/") for source in sources)] == []


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        "client/.env",
        "server/prod.env",
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "kernels/shardam_kernels/_native.cpython-311-x86_64-linux-gnu.so",
        "client/shardam/__pycache__/errors.cpython-311.pyc",
        "state/shard-0/base",
        "ml-100k/u.data",
    ],
)
def test_secrets_data_and_results_of_local_builds_never_reach_a_build(path: str) -> None:
    assert not DockerIgnore((ROOT / ".dockerignore").read_text(encoding="utf-8")).keeps(path)


@pytest.mark.parametrize(
    ("text", "path", "kept"),
    [
        ("*\n!client", "client/a/b.py", True),
        ("*\n!client\n**/*.so", "client/a/b.so", False),
        ("build", "build/a", False),
        ("build", "client/build/a", True),
        ("**/build", "client/build/a", False),
        ("*.md\n!README.md", "README.md", True),
        ("!README.md\n*.md", "README.md", False),
        ("# *\n", "a", True),
        ("a?c", "abc", False),
        ("a.c", "abc", True),
    ],
)
def test_a_dockerignore_is_read_as_an_engine_reads_it(text: str, path: str, kept: bool) -> None:
    assert DockerIgnore(text).keeps(path) == kept


@pytest.mark.parametrize(
    "path", ["Dockerfile", "docker-compose.yml", "docker-compose.gpu.yml", ".env.example", "docs/deploy.md"]
)
def test_a_file_names_no_package_index_and_no_data_that_must_not_be_passed_on(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\s)>]*(?:pypi|pytorch|simple|whl)[^\s)>]*|recbole|ml-100k", text) == []


def test_the_filled_in_settings_are_ignored_by_git() -> None:
    assert run("git", "check-ignore", "-q", ".env").returncode == 0
    assert run("git", "check-ignore", "-q", ".env.example").returncode == 1
