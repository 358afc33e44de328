"""Flags of a command, generated from its settings class: parsing, help, and error text in the words of the user.

Values stay strings here; the settings class alone converts and checks them, so flag and environment follow the same rules.
"""

from __future__ import annotations

import argparse
import difflib
import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardam_server.command_errors import UsageError
from shardam_server.setting_types import ENV_PREFIX
from shardam_server.settings import CommonSettings

Settings = TypeVar("Settings", bound=CommonSettings)

_FLAG_NAMES = {"as_json": "json"}  # `json` itself is a method of every pydantic model
_ARGUMENT = "_argument"  # no field's name: those have no underscore first
_LARGE: dict[object, str] = {2**63 - 1: "2^63-1", 2**64 - 1: "2^64-1"}
_HELP_WIDTH = 120
_HELP_COLUMN = 30


def flag_of(field: str) -> str:
    """Returns a field's flag, e.g. `--admin-port`."""
    return "--" + _FLAG_NAMES.get(field, field).replace("_", "-")


def variables_of(field: str, info: FieldInfo) -> list[str]:
    """Returns the environment names that a field is read from, first the one that wins."""
    if isinstance(info.validation_alias, AliasChoices):
        return [str(choice) for choice in info.validation_alias.choices]
    return [ENV_PREFIX + field.upper()]


def parse_settings(command: str, settings: type[Settings], arguments: Sequence[str], about: str) -> Settings:
    """Reads a command's settings from its flags and the environment; `--help` prints and exits.

    Args:
        command: name of the command, for the help text.
        settings: its settings class.
        arguments: what stands after the command.
        about: description for `--help`.

    Raises:
        UsageError: an unknown flag, or a value that the settings refuse.
    """
    return _parse(command, settings, arguments, about, None)[0]


def parse_named(
    command: str, settings: type[Settings], arguments: Sequence[str], about: str, placeholder: str
) -> tuple[Settings, str]:
    """Reads a command's settings and the one argument that it takes beside its flags, before, between or after them.

    Args:
        command: as parse_settings.
        settings: as parse_settings.
        arguments: as parse_settings.
        about: as parse_settings.
        placeholder: what help calls the argument, e.g. NAME. It has no environment name.

    Raises:
        UsageError: as parse_settings, or the argument is missing.
    """
    return _parse(command, settings, arguments, about, placeholder)


def _parse(
    command: str, settings: type[Settings], arguments: Sequence[str], about: str, placeholder: str | None
) -> tuple[Settings, str]:
    parser = _make_parser(command, settings, about, placeholder)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UsageError(_describe_unknown(unknown[0], command, settings, placeholder))
    given: dict[str, object] = {field: value for field, value in vars(namespace).items() if value is not None}
    argument = str(given.pop(_ARGUMENT, ""))
    try:
        return settings.model_validate(given), argument
    except ValidationError as error:
        raise UsageError("; ".join(_describe(detail, settings, given) for detail in error.errors())) from None


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _make_parser(command: str, settings: type[CommonSettings], about: str, placeholder: str | None) -> _Parser:
    named = "" if placeholder is None else f" {placeholder}"
    parser = _Parser(
        prog=f"shardam {command}",
        description=about,
        allow_abbrev=False,  # an abbreviation changes its meaning when a flag is added
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=_HELP_COLUMN, width=_HELP_WIDTH),
        usage=f"shardam {command}{named} [flags]",
        epilog="Every flag has the environment name in its brackets; the flag wins.",
    )
    if placeholder is not None:
        parser.add_argument(_ARGUMENT, metavar=placeholder, help=argparse.SUPPRESS)
    own = parser.add_argument_group("flags")
    common = parser.add_argument_group("flags of every command")
    for field, info in settings.model_fields.items():
        group = common if field in CommonSettings.model_fields else own
        if _is_secret(info):
            names = " ".join(variables_of(field, info))
            group.description = f"The {field} itself is read from {names} only: flags show in the list of processes."
        elif _core_type(info.annotation) is bool:
            group.add_argument(flag_of(field), dest=field, action=argparse.BooleanOptionalAction, help=_help_of(field, info))
        else:
            group.add_argument(flag_of(field), dest=field, metavar=_placeholder(field, info), help=_help_of(field, info))
    return parser


def _is_secret(info: FieldInfo) -> bool:
    return _core_type(info.annotation) is SecretStr


def _core_type(annotation: object) -> object:
    """Strips Annotated and Optional."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _core_type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return next(_core_type(member) for member in get_args(annotation) if member is not type(None))
    return annotation


def _placeholder(field: str, info: FieldInfo) -> str:
    kind = _core_type(info.annotation)
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if kind is Path:
        return "PATH"
    if kind is float:
        return "SECONDS" if field.endswith("_s") else "NUMBER"
    return {"redis": "URL", "cluster": "NAME", "advertise": "HOST:PORT"}.get(field, field.rpartition("_")[2].upper())


def _bounds(info: FieldInfo) -> str:
    limits = {type(item): item for item in info.metadata}
    match limits.get(annotated_types.Ge), limits.get(annotated_types.Le):
        case annotated_types.Ge(ge=low), annotated_types.Le(le=high):
            return f"{low} to {_LARGE.get(high, high)}"
    words = []
    for item in info.metadata:
        match item:
            case annotated_types.Ge(ge=low):
                words.append(f"at least {low}")
            case annotated_types.Gt(gt=floor):
                words.append(f"above {floor}")
            case annotated_types.Le(le=high):
                words.append(f"at most {high}")
            case annotated_types.Lt(lt=ceiling):
                words.append(f"below {ceiling}")
    return ", ".join(words)


def _help_of(field: str, info: FieldInfo) -> str:
    facts = [_bounds(info)]
    default = info.get_default(call_default_factory=True, validated_data={})
    if not info.is_required() and default is not None and not isinstance(default, bool):
        facts.append(f"default {default:g}" if isinstance(default, float) else f"default {default}")
    facts.append("env " + " or ".join(variables_of(field, info)))
    text = f"{info.description} [{'; '.join(fact for fact in facts if fact)}]"
    return text.replace("%", "%%")  # argparse formats the text


def _flags(settings: type[CommonSettings]) -> Iterator[str]:
    for field, info in settings.model_fields.items():
        if not _is_secret(info):
            yield flag_of(field)
            if _core_type(info.annotation) is bool:
                yield "--no-" + flag_of(field)[2:]


def _describe_unknown(argument: str, command: str, settings: type[CommonSettings], placeholder: str | None) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        takes = "flags only" if placeholder is None else f"one {placeholder} and flags"
        return f"unexpected argument {argument!r}; `shardam {command}` takes {takes}, see shardam {command} --help"
    if name == "--token":
        return "the token is no flag, because flags show in the list of processes: use SHARDAM_TOKEN or --token-file"
    return f"unknown flag {name}{nearest(name, list(_flags(settings)))}; see shardam {command} --help"


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns `, did you mean X?` for the name most like the given one, or nothing if none is like it."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _describe(detail: ErrorDetails, settings: type[CommonSettings], given: dict[str, object]) -> str:
    """Words one refusal: where the value came from, the value, what is wrong."""
    problem = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not detail["loc"]:
        return problem  # a rule over several fields; it names their flags itself
    field = str(detail["loc"][0])
    info = settings.model_fields[field]
    variables = variables_of(field, info)
    if detail["type"] == "missing":
        return f"{flag_of(field)} is required (or {' or '.join(variables)})"
    variable = next((name for name in variables if os.environ.get(name)), variables[0])
    source = flag_of(field) if field in given else variable
    if detail["type"] != "value_error":
        problem = f"must be {problem}"
    shown = "" if _is_secret(info) or not info.repr else f" {str(detail['input'])!r}"
    return f"{source}{shown}: {problem}"
