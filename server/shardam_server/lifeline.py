"""A process that must not outlive its parent: it watches its stdin, whose other end only the parent holds."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from shardam_server.setting_types import LIFELINE_VARIABLE

_STDIN = 0
_log = logging.getLogger(__name__)


def watch_lifeline(callback: Callable[[], None], *, grace_s: float) -> bool:
    """Calls `callback` when the parent is gone, if the parent asked for it by SHARDAM_LIFELINE=stdin.

    The system closes the parent's end even when the parent is killed, so nothing of the parent need run.

    Args:
        callback: starts the process's orderly end; it is called once, in a thread of its own.
        grace_s: seconds after which the process ends by force, should the orderly end hang.

    Returns:
        True: the lifeline is watched.
    """
    if os.environ.get(LIFELINE_VARIABLE) != "stdin":
        return False

    def end() -> None:
        _log.warning("the parent process is gone; stopping")
        try:
            callback()
        finally:
            time.sleep(grace_s)
            os._exit(1)  # only a hanging shutdown is still here; an exception would end this thread alone

    watch_stdin(end)
    return True


def watch_stdin(callback: Callable[[], None]) -> threading.Thread:
    """Calls `callback` once, in a daemon thread, when stdin reaches its end; what is read before is dropped."""

    def read_to_end() -> None:
        # os.read, not sys.stdin: a daemon thread that holds the lock of sys.stdin breaks the interpreter's exit.
        while _read_some():
            pass
        callback()

    thread = threading.Thread(target=read_to_end, name="lifeline", daemon=True)
    thread.start()
    return thread


def _read_some() -> bytes:
    try:
        return os.read(_STDIN, 4096)
    except OSError:  # a closed stdin is an ended one
        return b""
