"""Runs a program that the kernel kills when its parent dies: `python die_with_parent.py PARENT_PID PROGRAM [ARGUMENT ...]`.

For a program that cannot watch a lifeline itself. A script of its own, run without the package: it asks the kernel for the
signal and becomes the program. The signal follows the parent's *thread*, so the parent starts it from its main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def main() -> None:
    """Sets the signal and replaces this process by the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
