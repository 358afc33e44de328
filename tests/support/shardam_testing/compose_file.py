"""Compose files as Docker Compose reads them, as far as this repository's use them: overlays, variables, services."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from shardam_testing.image_files import Health, Image, parse_duration, read_image, read_stages

_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?:(?P<operator>:?[-?])(?P<text>[^}]*))?\}|(?P<plain>\w+))")


class MissingVariable(Exception):
    """A variable that the file requires is not set; the message is what the user sees."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Replaces ${NAME}, ${NAME:-default}, ${NAME:?message} and their forms without the colon, and $$.

    Raises:
        MissingVariable: a required one is unset, or, with the colon, empty.
    """

    def value_of(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name, operator = match["name"] or match["plain"], match["operator"] or "-"
        value = variables.get(name)
        if value is not None and (value or ":" not in operator):
            return value
        if "?" in operator:
            raise MissingVariable(f"required variable {name} is missing a value: {match['text']}")
        return match["text"] or ""

    return _VARIABLE.sub(value_of, text)


def variables_of(path: Path) -> set[str]:
    """Returns the names of all variables that a file uses."""
    found = _VARIABLE.finditer(path.read_text(encoding="utf-8"))
    return {match["name"] or match["plain"] for match in found if not match["escaped"]}


def _interpolate_all(value: object, variables: Mapping[str, str]) -> object:
    if isinstance(value, str):
        return interpolate(value, variables)
    if isinstance(value, dict):
        return {key: _interpolate_all(entry, variables) for key, entry in value.items()}
    if isinstance(value, list):
        return [_interpolate_all(entry, variables) for entry in value]
    return value


def _merge(base: object, over: object) -> object:
    """Lays a file over another: mappings merge, everything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}
    return over


def mapping(value: object) -> dict[str, object]:
    """Returns a mapping; an absent one is empty."""
    assert value is None or isinstance(value, dict), value
    return dict(value or {})


def strings(value: object) -> list[str]:
    """Returns a list of strings; an absent one is empty."""
    assert value is None or isinstance(value, list), f"{value!r} is not a list: the shell form needs a shell"
    return [str(entry) for entry in value or []]


def read_volumes(path: Path) -> set[str]:
    """Returns the named volumes that a file declares."""
    return set(mapping(mapping(yaml.safe_load(path.read_text(encoding="utf-8"))).get("volumes")))


def read_services(paths: Sequence[Path], variables: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Returns the services of a file and its overlays, as YAML has them.

    Args:
        paths: files, the base first.
        variables: what stands in .env and the shell.

    Raises:
        MissingVariable: a required variable is not set.
    """
    merged: object = {}
    for path in paths:
        merged = _merge(merged, _interpolate_all(yaml.safe_load(path.read_text(encoding="utf-8")), variables))
    return {name: mapping(service) for name, service in mapping(mapping(merged)["services"]).items()}


@dataclasses.dataclass(frozen=True)
class Service:
    """A service as a container of it would be started.

    Attributes:
        program: entrypoint, then command.
        environment: of the image and of the service.
        depends_on: service -> condition.
        health: its check, its image's if it has none of its own, or None.
        ports: container ports that it listens on.
        stop_signal, stop_grace_s: how it is stopped, and after how many seconds it is killed.
        image: the image, if this repository builds it.
        volumes: named volume -> where it is mounted.
    """

    name: str
    program: tuple[str, ...]
    environment: Mapping[str, str]
    depends_on: Mapping[str, str]
    health: Health | None
    ports: tuple[int, ...]
    stop_signal: str
    stop_grace_s: float
    image: Image | None
    volumes: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _read_volumes(value: object) -> dict[str, str]:
    """Reads NAME:PATH; a folder of the host or an option would need more than a name."""
    pairs = [entry.partition(":")[::2] for entry in strings(value)]
    assert all(path.startswith("/") and ":" not in path for _, path in pairs), f"{pairs}: not NAME:PATH"
    return dict(pairs)


def _read_health(value: object) -> Health | None:
    check = mapping(value)
    if not check:
        return None
    test = strings(check["test"])
    assert test[0] == "CMD", f"{test}: CMD-SHELL needs a shell in the image"
    timeout_s, start_period_s = (parse_duration(str(check[key])) for key in ("timeout", "start_period"))
    return Health(tuple(test[1:]), timeout_s, start_period_s)


def read_service(name: str, value: Mapping[str, object], folder: Path) -> Service:
    """Reads one service.

    Args:
        name: its name.
        value: its YAML, interpolated.
        folder: where its Dockerfile lies.
    """
    build = mapping(value.get("build"))
    image = read_image(read_stages(folder / "Dockerfile"), str(build["target"])) if build else None
    known = image or Image()  # the image of someone else: its entrypoint runs the command that the file gives
    entrypoint = tuple(strings(value["entrypoint"])) if "entrypoint" in value else known.entrypoint
    command = tuple(strings(value["command"])) if "command" in value else known.command
    published = [port.rpartition(":")[2] for port in strings(value.get("ports"))]
    dependencies = mapping(value.get("depends_on"))
    return Service(
        name=name,
        program=entrypoint + command,
        environment={**known.environment, **{key: str(entry) for key, entry in mapping(value.get("environment")).items()}},
        depends_on={other: str(mapping(condition)["condition"]) for other, condition in dependencies.items()},
        health=_read_health(value.get("healthcheck")) or known.health,
        ports=tuple(int(port) for port in [*strings(value.get("expose")), *published]),
        stop_signal=known.stop_signal,
        stop_grace_s=parse_duration(str(value["stop_grace_period"])),
        image=image,
        volumes=_read_volumes(value.get("volumes")),
    )


def start_order(services: Mapping[str, Service]) -> list[str]:
    """Returns the services so that each comes after those that it depends on.

    Raises:
        ValueError: one depends on a service that is not there, on the health of one without a check, or on itself.
    """
    order: list[str] = []
    under_way: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        if name in under_way:
            raise ValueError(f"depends_on goes in a circle: {' -> '.join([*under_way, name])}")
        under_way.append(name)
        for other, condition in services[name].depends_on.items():
            if other not in services:
                raise ValueError(f"{name} depends on {other!r}, which is no service of the file")
            if condition == "service_healthy" and services[other].health is None:
                raise ValueError(f"{name} waits for {other} to be healthy, which has no health check")
            visit(other)
        under_way.remove(name)
        order.append(name)

    for name in services:
        visit(name)
    return order
