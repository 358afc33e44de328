"""Commands as the user can type them: with the folder of the interpreter that runs, which need not be on PATH."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def python_command() -> str:
    """Returns the command of this process's interpreter, as the shell of the working folder takes it."""
    return shlex.quote(_typed(Path(sys.executable)))


def shardam_command() -> str:
    """Returns the command `shardam` of this interpreter; without such a script, the module that it starts."""
    script = Path(sys.executable).with_name("shardam")
    return shlex.quote(_typed(script)) if script.is_file() else f"{python_command()} -m shardam_server"


def _typed(path: Path) -> str:
    """Returns the path relative to the working folder if it lies below it; never a bare name, which PATH would look up."""
    if not path.is_relative_to(Path.cwd()):
        return str(path)
    relative = str(path.relative_to(Path.cwd()))
    return relative if os.sep in relative else os.path.join(os.curdir, relative)
