"""What ends a command with one line on stderr instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot go on; the message is whole: what was wrong, with which value, and what to do.

    Attributes:
        exit_code: exit status of the command.
    """

    exit_code = 1


class UsageError(CommandError):
    """A flag or an environment value is wrong."""

    exit_code = 2


class Interrupted(CommandError):
    """Ctrl-C ended the wait for something that goes on by itself."""

    exit_code = 130
    """128 + SIGINT, as shells count."""


class PortInUse(CommandError):
    """The port that a process is to listen on is taken, or may not be bound."""


class Resharded(CommandError):
    """A shard has ended because the state of the cluster has moved to another number of shards."""

    exit_code = 76
