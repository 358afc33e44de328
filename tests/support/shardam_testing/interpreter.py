"""Runs cases of the cover in a process whose Triton kernels are interpreted; the pytest process compiles them instead."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

ANSWER_TIME_S = 300.0
"""Ten times what the longest case takes on a busy machine: the process hangs."""


class InterpreterProcess:
    """A triton_worker process, answering one case at a time; a context manager."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._log = log_path.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardam_testing.triton_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **os.environ,
                "TRITON_INTERPRET": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": "1",  # torch's own threads have nothing to do here
            },
        )

    def run(self, case_number: int) -> list[tuple[str, str]]:
        """Returns what a case saw.

        Raises:
            AssertionError: the process ended or hangs; the message has the end of its log.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(f"{case_number}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self._end_of_log("has ended")) from None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_TIME_S):
                raise AssertionError(self._end_of_log(f"did not answer within {ANSWER_TIME_S:.0f} s"))
        line = stdout.readline()  # an answer is written as one line
        if not line:
            raise AssertionError(self._end_of_log("has ended"))
        return [(what, digest) for what, digest in json.loads(line)["seen"]]

    def _end_of_log(self, event: str) -> str:
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        return f"the interpreter's process {event}; the end of its log:\n{text[-4000:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()
