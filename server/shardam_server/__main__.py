"""The command line: `shardam COMMAND [flags]`, also `python -m shardam_server`.

Reads flags and environment, hands them to one command, and turns what went wrong into one line on stderr and an exit status:
2 for a wrong flag or setting, 1 for a failure. Commands are imported when they are run, so that help is quick; none but the
demo's workers imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardam_server.command_errors import CommandError, UsageError


class Command(NamedTuple):
    """A command: what help says of it, and how it is run with the arguments that follow its name."""

    about: str
    example: str
    run: Callable[[list[str]], int]


def run() -> None:
    """Runs the command line of this process and exits with its status."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs a command line.

    Args:
        arguments: command and flags, without the program's name.

    Returns:
        Exit status: 0, 1 for a failure, 2 for a wrong flag or setting.
    """
    try:
        status = _dispatch(list(arguments))
        sys.stdout.flush()  # a reader that is gone shows here rather than at exit
        return status
    except CommandError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", 130)  # 128 + SIGINT, as shells count
    except Exception as error:
        # Loaded here only: an error of the cluster can be raised only by a command that has loaded it.
        from shardam_proto.errors import InvalidArgument, ShardamError

        if isinstance(error, ShardamError):
            return _fail(error.message, 2 if isinstance(error, InvalidArgument) else 1)
        raise


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get("version" if name == "--version" else name)
    if command is None:
        from shardam_server.flags import nearest

        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(f"unknown {kind} {name!r}{nearest(name, list(COMMANDS))}; see shardam --help")
    return command.run(rest)


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"shardam: {message}\n")
    return status


def _help() -> str:
    lines = [
        "usage: shardam COMMAND [flags]",
        "",
        "Distributed embedding training for PyTorch: shards hold rows and SparseAdam moments, workers pull and push.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<12} {command.about}", f"  {'':<12}   $ {command.example}"]
    return "\n".join([*lines, "", "Each command has --help with its flags, their units, defaults and environment names.", ""])


def _up(arguments: list[str]) -> int:
    from shardam_server.flags import parse_settings
    from shardam_server.settings import UpSettings

    settings = parse_settings("up", UpSettings, arguments, COMMANDS["up"].about)
    from shardam_server.up import run_up

    return run_up(settings)


def _shard(arguments: list[str]) -> int:
    from shardam_server.flags import parse_settings
    from shardam_server.settings import ShardSettings

    settings = parse_settings("shard", ShardSettings, arguments, COMMANDS["shard"].about)
    from shardam_server.shard.process import run_shard

    return run_shard(settings)


def _admin(arguments: list[str]) -> int:
    from shardam_server.flags import parse_settings
    from shardam_server.settings import AdminSettings

    settings = parse_settings("admin", AdminSettings, arguments, COMMANDS["admin"].about)
    from shardam_server.admin.process import run_admin
    from shardam_server.logs import configure_logging

    configure_logging(settings, role="admin")
    return run_admin(settings)


def _status(arguments: list[str]) -> int:
    from shardam_server.flags import parse_settings
    from shardam_server.settings import StatusSettings

    settings = parse_settings("status", StatusSettings, arguments, COMMANDS["status"].about)
    from shardam_server.status import run_status

    return run_status(settings)


def _forget_shard(arguments: list[str]) -> int:
    from shardam_server.flags import parse_settings
    from shardam_server.settings import ForgetShardSettings

    settings = parse_settings("forget-shard", ForgetShardSettings, arguments, COMMANDS["forget-shard"].about)
    from shardam_server.forget_shard import run_forget_shard

    return run_forget_shard(settings)


def _checkpoint(arguments: list[str]) -> int:
    from shardam_server.checkpoint_command import run_checkpoint

    return run_checkpoint(arguments)


def _table(arguments: list[str]) -> int:
    from shardam_server.table_command import run_table

    return run_table(arguments)


def _reshard(arguments: list[str]) -> int:
    from shardam_server.flags import parse_settings
    from shardam_server.reshard_settings import ReshardSettings

    settings = parse_settings("reshard", ReshardSettings, arguments, COMMANDS["reshard"].about)
    from shardam_server.reshard_command import run_reshard

    return run_reshard(settings)


def _demo(arguments: list[str]) -> int:
    from shardam_server.demo_command import run_demo

    return run_demo(arguments)


def _version(arguments: list[str]) -> int:
    if arguments and arguments[0] not in ("-h", "--help"):
        raise UsageError(f"`shardam version` takes no arguments, got {arguments[0]!r}")
    import importlib.metadata

    try:
        version = importlib.metadata.version("shardam")
    except importlib.metadata.PackageNotFoundError:
        raise CommandError("shardam runs from its sources and is not installed, so it has no version: run make setup") from None
    sys.stdout.write(f"shardam {version}\n")
    return 0


COMMANDS: dict[str, Command] = {
    "up": Command(
        "Starts a cluster on this machine (private Redis, shards, admin API) and supervises it.", "shardam up --shards 2", _up
    ),
    "shard": Command(
        "Runs one shard: holds rows and moments, serves pulls and pushes over gRPC.",
        "shardam shard --index 0 --shards 2 --redis redis://host:6379/0",
        _shard,
    ),
    "admin": Command(
        "Runs the admin API: shows shards, tables, rows and optimizer state over HTTP.",
        "shardam admin --redis redis://host:6379/0",
        _admin,
    ),
    "status": Command(
        "Says what the cluster consists of and what is missing; exit status 0 if all shards are ready.",
        "shardam status --redis redis://host:6379/0",
        _status,
    ),
    "forget-shard": Command(
        "Gives up the rows of a shard that is LOST: it starts empty, and training starts anew.",
        "shardam forget-shard --index 1 --redis redis://host:6379/0",
        _forget_shard,
    ),
    "checkpoint": Command(
        "Makes, lists, verifies, restores and deletes checkpoints of the whole cluster.",
        "shardam checkpoint create",
        _checkpoint,
    ),
    "table": Command(
        "Lists tables, exports one to a file, imports one from it (safetensors or npz).",
        "shardam table export items --out items.safetensors",
        _table,
    ),
    "reshard": Command(
        "Moves the rows of a running cluster to another number of shards; workers wait and go on.",
        "shardam reshard --shards 4 --redis redis://host:6379/0",
        _reshard,
    ),
    "demo": Command(
        "Trains a recommender with workers against shards, beside the same model trained locally.",
        "shardam demo --workers 2 --shards 2",
        _demo,
    ),
    "version": Command("Prints the version.", "shardam version", _version),
}
"""Commands by name, in the order of the help."""


if __name__ == "__main__":
    run()
