"""Commands that have actions, as in `shardam checkpoint list`: their help, and the way to one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardam_server.command_errors import UsageError
from shardam_server.flags import nearest


class Action(NamedTuple):
    """An action of a command: what help says of it, an example, and how it is run with the arguments that follow its name."""

    about: str
    example: str
    run: Callable[[list[str]], int]


def dispatch(command: str, actions: Mapping[str, Action], arguments: Sequence[str]) -> int:
    """Runs the action that the first argument names; `--help` prints and returns 0.

    Raises:
        UsageError: there is no such action.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help(command, actions))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in actions:
        kind = "flag" if name.startswith("-") else "action"
        raise UsageError(
            f"unknown {kind} {name!r} of `shardam {command}`{nearest(name, list(actions))}; see shardam {command} --help"
        )
    return actions[name].run(rest)


def _help(command: str, actions: Mapping[str, Action]) -> str:
    lines = [f"usage: shardam {command} ACTION [flags]", ""]
    for name, action in actions.items():
        lines += [f"  {name:<8} {action.about}", f"  {'':<8}   $ shardam {command} {action.example}"]
    return "\n".join([*lines, "", "Each action has --help with its flags, their units, defaults and environment names.", ""])
