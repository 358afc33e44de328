"""The compose files as Docker Compose would read them.

The stack itself is run by tests/deploy/test_compose.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from shardam_testing.compose_file import (
    MissingVariable,
    Service,
    interpolate,
    mapping,
    read_service,
    read_services,
    read_volumes,
    start_order,
    strings,
    variables_of,
)
from shardam_testing.image_files import Image

from shardam_server.settings import ShardSettings
from shardam_server.shard.process import EXIT_GRACE_S

ROOT = Path(__file__).resolve().parents[3]
BASE, OVERLAY = ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"

STACKS = {"base": [BASE], "with the GPU overlay": [BASE, OVERLAY]}
GIVEN = {"SHARDAM_TOKEN": "secret"}

CHECKPOINTS = "checkpoints"
"""The one volume that shards share."""

OURS = ("shard-0", "shard-1", "admin", "worker-0", "worker-1")


def raw_services(stack: str = "base") -> dict[str, dict[str, object]]:
    return read_services(STACKS[stack], GIVEN)


def services(stack: str = "base") -> dict[str, Service]:
    return {name: read_service(name, value, ROOT) for name, value in raw_services(stack).items()}


@pytest.mark.case("C136")
@pytest.mark.parametrize("path", [BASE, OVERLAY], ids=lambda path: path.name)
def test_a_compose_file_satisfies_the_schema_of_compose_files(path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
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


@pytest.mark.parametrize("stack", STACKS)
def test_each_shard_keeps_its_rows_in_a_declared_volume_of_its_own_and_nobody_else_has_one(stack: str) -> None:
    mounts = {name: service.volumes for name, service in services(stack).items() if service.volumes}
    assert sorted(mounts) == ["shard-0", "shard-1"]
    rows = {name: volume for name, of_shard in mounts.items() for volume in of_shard if volume != CHECKPOINTS}
    assert len(set(rows.values())) == len(rows) == 2
    assert {*rows.values(), CHECKPOINTS} == read_volumes(BASE)
    for name, volume in rows.items():
        assert mounts[name][volume] == services(stack)[name].environment["SHARDAM_DATA_DIR"]


@pytest.mark.parametrize("stack", STACKS)
def test_all_shards_see_the_same_volume_of_checkpoints(stack: str) -> None:
    shards = [service for name, service in services(stack).items() if name.startswith("shard-")]
    assert len(shards) == 2
    for shard in shards:
        assert shard.volumes[CHECKPOINTS] == shard.environment["SHARDAM_CHECKPOINT_DIR"]


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
