"""Asks before something is given up; where nobody can be asked, the flag has to say it."""

from __future__ import annotations

import sys

from shardam_server.command_errors import CommandError


def confirm(loss: str, *, yes: bool) -> None:
    """Goes on if `yes`, or if the person at the terminal agrees.

    Args:
        loss: what is given up, as a sentence without its stop.
        yes: `--yes` was given.

    Raises:
        CommandError: the answer is no, or there is no terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"{loss}: give --yes to go on (there is no terminal to ask at)")
    sys.stderr.write(f"{loss}. Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was changed")
