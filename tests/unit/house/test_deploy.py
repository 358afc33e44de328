"""Image, compose files and their lists, as an engine would read them.

The stack itself is run by tests/integration/test_compose.py.
"""

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
from shardam_testing.compose_file import (
    MissingVariable,
    Service,
    interpolate,
    mapping,
    read_service,
    read_services,
    start_order,
    strings,
    variables_of,
)
from shardam_testing.image_files import DockerIgnore, Image, Stage, read_image, read_stages

from shardam_server.settings import ShardSettings
from shardam_server.shard.process import EXIT_GRACE_S

ROOT = Path(__file__).resolve().parents[3]
BASE, OVERLAY = ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"

STACKS = {"base": [BASE], "with the GPU overlay": [BASE, OVERLAY]}
GIVEN = {"SHARDAM_TOKEN": "secret"}

OURS = ("shard-0", "shard-1", "admin", "worker-0", "worker-1")

stages: dict[str, Stage] = read_stages(ROOT / "Dockerfile")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


def raw_services(stack: str = "base") -> dict[str, dict[str, object]]:
    return read_services(STACKS[stack], GIVEN)


def services(stack: str = "base") -> dict[str, Service]:
    return {name: read_service(name, value, ROOT) for name, value in raw_services(stack).items()}


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


# -- the compose files


@pytest.mark.case("C136")
@pytest.mark.parametrize("path", [BASE, OVERLAY], ids=lambda path: path.name)
def test_a_compose_file_satisfies_the_schema_of_compose_files(path: Path) -> None:
    result = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("stack", STACKS)
def test_every_dependency_exists_can_hold_and_goes_in_no_circle(stack: str) -> None:
    order = start_order(services(stack))
    assert sorted(order) == sorted([*OURS, "redis"])


def made_service(name: str, depends_on: dict[str, str]) -> Service:
    return Service(name, (), {}, depends_on, None, (), "SIGTERM", 10.0, Image())


@pytest.mark.parametrize(
    ("depends_on", "message"),
    [
        ({"a": {"nobody": "service_started"}}, "no service of the file"),
        ({"a": {"b": "service_healthy"}, "b": {}}, "has no health check"),
        ({"a": {"b": "service_started"}, "b": {"a": "service_started"}}, "a -> b -> a"),
    ],
)
def test_a_dependency_that_cannot_hold_is_found(depends_on: dict[str, dict[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_order({name: made_service(name, others) for name, others in depends_on.items()})


def devices_of(service: dict[str, object]) -> object:
    resources = mapping(mapping(service.get("deploy")).get("resources"))
    return mapping(resources.get("reservations")).get("devices")


@pytest.mark.case("C136")
def test_the_base_file_asks_for_no_gpu_and_the_overlay_gives_one_to_each_shard_alone() -> None:
    base, overlaid = raw_services(), raw_services("with the GPU overlay")
    assert [name for name, service in base.items() if "deploy" in service or "runtime" in service or "gpus" in service] == []
    assert set(read_services([OVERLAY], GIVEN)) <= set(base)
    with_devices = {name for name, service in overlaid.items() if devices_of(service)}
    assert with_devices == {"shard-0", "shard-1"}
    for name in with_devices:
        assert services()[name].environment["SHARDAM_DEVICE"] == "cpu"
        assert services("with the GPU overlay")[name].environment["SHARDAM_DEVICE"] == "cuda:0"
        assert mapping(overlaid[name]["build"])["target"] == "gpu"
        assert overlaid[name]["image"] != base[name]["image"]


@pytest.mark.parametrize("variables", [{}, {"SHARDAM_TOKEN": ""}], ids=["no .env", ".env.example unchanged"])
def test_without_a_token_compose_stops_with_the_remedy(variables: dict[str, str]) -> None:
    with pytest.raises(MissingVariable, match=r"SHARDAM_TOKEN is missing a value: .*cp \.env\.example \.env"):
        read_services([BASE], variables)


def test_every_process_of_ours_gets_the_token_from_the_environment_and_none_as_an_argument() -> None:
    for name, service in services().items():
        assert (service.environment.get("SHARDAM_TOKEN") == "secret") == (name in OURS)
        assert "secret" not in " ".join(service.program)


def test_only_the_admin_api_is_published_and_only_on_loopback() -> None:
    published = {name: strings(service.get("ports")) for name, service in raw_services().items() if "ports" in service}
    assert published == {"admin": ["127.0.0.1:8080:8080"]}
    assert [name for name, service in raw_services().items() if "network_mode" in service] == []


@pytest.mark.case("C141")
@pytest.mark.parametrize("stack", STACKS)
def test_the_grace_of_a_stop_is_longer_than_the_drain(stack: str) -> None:
    drain_s = ShardSettings.model_fields["drain_s"].default
    for name in OURS:
        service = services(stack)[name]
        assert "SHARDAM_DRAIN_S" not in service.environment
        assert service.stop_grace_s > drain_s + EXIT_GRACE_S


@pytest.mark.case("C142")
def test_each_shard_is_a_service_of_its_own_with_its_index_and_name_written_out() -> None:
    shards = [service for name, service in services().items() if name.startswith("shard-")]
    for index, service in enumerate(shards):
        flags = dict(zip(service.program[2::2], service.program[3::2], strict=True))
        assert service.program[:2] == ("shardam", "shard")
        assert flags["--index"] == str(index)
        assert flags["--advertise"] == f"{service.name}:{flags['--port']}"
        assert service.environment["SHARDAM_SHARDS"] == str(len(shards))


def test_redis_evicts_nothing_and_writes_nothing() -> None:
    program = services()["redis"].program
    flags = dict(zip(program[1::2], program[2::2], strict=True))
    assert (flags["--maxmemory-policy"], flags["--save"], flags["--appendonly"]) == ("noeviction", "", "no")


def test_the_example_of_the_settings_names_every_variable_and_no_other() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:# )?([A-Z0-9_]+)=", example, re.MULTILINE)) == variables_of(BASE) | variables_of(OVERLAY)
    assert re.findall(r"^SHARDAM_TOKEN=(.*)$", example, re.MULTILINE) == [""], "a secret that everyone knows is none"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}:$A:$$A", "1:1:$A"),
        ("${EMPTY:-2}${EMPTY-2}", "2"),
        ("${NONE:-3}${NONE-4}${NONE}", "34"),
        ("${A:?why}", "1"),
    ],
)
def test_variables_are_replaced_as_compose_replaces_them(text: str, value: str) -> None:
    assert interpolate(text, {"A": "1", "EMPTY": ""}) == value


@pytest.mark.parametrize(
    "path", ["Dockerfile", "docker-compose.yml", "docker-compose.gpu.yml", ".env.example", "docs/deploy.md"]
)
def test_a_file_names_no_package_index_and_no_data_that_must_not_be_passed_on(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\s)>]*(?:pypi|pytorch|simple|whl)[^\s)>]*|recbole|ml-100k", text) == []


def test_the_filled_in_settings_are_ignored_by_git() -> None:
    assert run("git", "check-ignore", "-q", ".env").returncode == 0
    assert run("git", "check-ignore", "-q", ".env.example").returncode == 1
