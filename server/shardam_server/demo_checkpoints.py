"""Where the demo's checkpoints lie, and how a run that was stopped goes on from one."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from shardam_server.command_errors import UsageError
from shardam_server.typed_commands import shardam_command

LATEST = "latest"
"""Stands for the newest complete checkpoint."""

FOLDER_NAME = "checkpoints"
"""Of checkpoints in a data folder, as shards call it."""


class Stopped(BaseException):
    """A signal asked the command to end; like KeyboardInterrupt no error, so that nothing catches it by accident.

    Attributes:
        exit_code: 128 + the number of the signal, as a shell reports it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """What the user asked for.

    Attributes:
        folder: root folder of checkpoints; None: those of the data folder, if there is one.
        every: a checkpoint after so many steps; 0: only when the demo is stopped.
        resume: a name, a path or "latest"; None: the run begins.
    """

    folder: Path | None = None
    every: int = 0
    resume: str | None = None

    def root(self, data_dir: Path | None) -> Path | None:
        """Returns the root folder, or None if there is none.

        Raises:
            UsageError: something was asked for that needs one.
        """
        if self.folder is not None:
            return self.folder
        if self.resume is not None and self._is_path(self.resume):
            return Path(self.resume).absolute().parent.parent  # root / cluster / name
        if data_dir is not None:
            return data_dir / FOLDER_NAME
        asked = "--resume" if self.resume is not None else "--checkpoint-every"
        if self.resume is not None or self.every:
            raise UsageError(
                f"demo: {asked} needs a folder of checkpoints: name one with --checkpoint-dir PATH, or keep all state with "
                "--data-dir PATH; see shardam demo --help"
            )
        return None

    def resumed(self) -> str | None:
        """Returns the checkpoint as the cluster takes it.

        Raises:
            UsageError: a path at which there is no folder.
        """
        if self.resume is None or not self._is_path(self.resume):
            return self.resume
        path = Path(self.resume).absolute()
        if not path.is_dir():
            raise UsageError(f"demo: --resume: there is no checkpoint {path}; name one, or its folder; see shardam demo --help")
        return str(path)

    @staticmethod
    def _is_path(name: str) -> bool:
        return "/" in name


def resume_command(flags: list[str], root: Path, name: str) -> str:
    """Returns what the user types to go on.

    Args:
        flags: those of the stopped run that it must have again.
        root: folder of the checkpoints.
        name: the checkpoint.
    """
    words = ["demo", *flags, "--checkpoint-dir", str(root), "--resume", name]
    return f"{shardam_command()} {shlex.join(words)}"
