"""Dockerfile and .dockerignore as a container engine reads them, as far as this repository's use them."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals and what follows, on one line."""

    word: str
    rest: str

    def exec_form(self) -> tuple[str, ...]:
        """Returns the words of `["program", "argument"]`.

        Raises:
            ValueError: it is in shell form, so that a shell would run it.
        """
        try:
            words = json.loads(self.rest)
        except json.JSONDecodeError:
            raise ValueError(f"{self.word} {self.rest}: is run by a shell; write it as a JSON array") from None
        return tuple(words)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a Dockerfile, as written."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def copies(self) -> Iterator[tuple[list[str], str]]:
        """Yields sources and target of each COPY from the build context."""
        for instruction in self.instructions:
            words = shlex.split(instruction.rest)
            if instruction.word in ("COPY", "ADD") and not words[0].startswith("--from="):
                yield words[:-1], words[-1]


@dataclasses.dataclass(frozen=True)
class Health:
    """A health check.

    Attributes:
        command: program and arguments.
        timeout_s: seconds after which one try has failed.
        start_period_s: seconds in which failures do not count.
    """

    command: tuple[str, ...]
    timeout_s: float = 30.0
    start_period_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Image:
    """What an image says of its containers, from its stage and the stages that this one builds on."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    health: Health | None = None
    user: str = "root"
    stop_signal: str = "SIGTERM"


def parse_duration(text: str) -> float:
    """Returns the seconds of a duration such as 1m30s or 500ms."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
    if not re.fullmatch(r"(\d+(h|ms|m|s))+", text):
        raise ValueError(f"{text!r} is no duration such as 1m30s or 500ms")
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(h|ms|m|s)", text))


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions, with continued lines joined and comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield Instruction(word.upper(), rest.strip())


def read_stages(path: Path) -> dict[str, Stage]:
    """Returns the stages by name; each must have one."""
    stages: dict[str, Stage] = {}
    for instruction in read_instructions(path.read_text(encoding="utf-8")):
        if instruction.word == "FROM":
            base, _, name = instruction.rest.partition(" AS ")
            stages[name] = Stage(name, base, ())
        elif stages:
            stage = stages[name]
            stages[name] = dataclasses.replace(stage, instructions=(*stage.instructions, instruction))
    return stages


def _read_health(instruction: Instruction) -> Health | None:
    if instruction.rest == "NONE":
        return None
    flags, _, command = instruction.rest.partition("CMD ")
    values = dict(flag.removeprefix("--").split("=") for flag in flags.split())
    return Health(
        Instruction("HEALTHCHECK CMD", command).exec_form(),
        parse_duration(values["timeout"]),
        parse_duration(values["start-period"]),
    )


def read_image(stages: dict[str, Stage], name: str) -> Image:
    """Returns what the image of a stage says.

    Raises:
        ValueError: a program is given in shell form.
    """
    stage = stages[name]
    image = read_image(stages, stage.base) if stage.base in stages else Image()
    for instruction in stage.instructions:
        match instruction.word:
            case "ENTRYPOINT":  # an image that sets it loses the command of the image it builds on
                image = dataclasses.replace(image, entrypoint=instruction.exec_form(), command=())
            case "CMD":
                image = dataclasses.replace(image, command=instruction.exec_form())
            case "ENV":
                values = dict(word.split("=", 1) for word in shlex.split(instruction.rest))
                image = dataclasses.replace(image, environment={**image.environment, **values})
            case "HEALTHCHECK":
                image = dataclasses.replace(image, health=_read_health(instruction))
            case "USER":
                image = dataclasses.replace(image, user=instruction.rest)
            case "STOPSIGNAL":
                image = dataclasses.replace(image, stop_signal=instruction.rest)
    return image


class DockerIgnore:
    """Which files of a folder reach a build.

    A pattern matches a path or any folder above it, from the top of the context; of the matching patterns the last decides,
    and `!` takes a path in again.

    Args:
        text: content of .dockerignore.
    """

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._patterns = [self._compile(line) for line in lines if line and not line.startswith("#")]

    @staticmethod
    def _compile(line: str) -> tuple[bool, re.Pattern[str]]:
        pattern = line.removeprefix("!").strip("/")
        parts = {"**/": r"(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        regex = "".join(parts.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
        return line.startswith("!"), re.compile(regex)

    def keeps(self, path: str) -> bool:
        """Returns whether a file, named from the top of the context, reaches the build."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        kept = True
        for takes_in, pattern in self._patterns:
            if any(pattern.fullmatch(prefix) for prefix in prefixes):
                kept = takes_in
        return kept
