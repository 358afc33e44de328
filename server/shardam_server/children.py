"""One child process of `up`: started, its output passed on line by line, its end awaited.

Knows nothing of shards or clusters; what is run, and how its readiness is seen, is the supervisor's.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TextIO

LAST_LINES = 20
"""Lines of a child's output that are kept to explain its end."""

_MAX_LINE_BYTES = 64 * 1024  # a longer line is passed on in pieces, so that a child without line breaks costs no memory
_COLOURS = (36, 33, 32, 35, 34)  # ANSI colours that can be read on black and white
_SIGKILL_WAIT_S = 10.0  # the kernel ends a killed process at once, unless it hangs in a device


class Console:
    """Where the lines of all children go, each with the name of its child.

    Args:
        stream: written whole lines.
        form: "text": `[shard 0] line`; "json": a line that is a JSON object is passed on as it is, any other is wrapped in one.
        secrets: texts that are replaced wherever they would show.
    """

    def __init__(self, stream: TextIO, form: str, secrets: Sequence[str] = ()) -> None:
        self._stream = stream
        self._form = form
        self._secrets = [secret for secret in secrets if secret]
        self._lock = threading.Lock()
        self._coloured = form == "text" and stream.isatty() and "NO_COLOR" not in os.environ
        self._names: list[str] = []

    def write(self, name: str, line: str) -> None:
        """Writes one line of the child `name`; threads may call it at once."""
        for secret in self._secrets:
            line = line.replace(secret, "***")
        with self._lock:
            text = self._as_json(name, line) if self._form == "json" else f"{self._prefix(name)} {line}"
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not stop the children's output
                self._stream.write(text + "\n")
                self._stream.flush()

    def _prefix(self, name: str) -> str:
        if not self._coloured:
            return f"[{name}]"
        if name not in self._names:
            self._names.append(name)
        return f"\x1b[{_COLOURS[self._names.index(name) % len(_COLOURS)]}m[{name}]\x1b[0m"

    @staticmethod
    def _as_json(name: str, line: str) -> str:
        if line.startswith("{") and line.endswith("}"):
            return line
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": time, "level": "info", "logger": name, "message": line})


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """What a child runs.

    Attributes:
        name: what its lines are prefixed with, e.g. "shard 0".
        command: returns the command line, asked anew for each start.
        environment: its whole environment.
        stdin: returns what is written to its stdin, which is then closed; None: stdin stays open until the parent ends.
        hidden_lines: texts; an output line that holds one is not passed on.
    """

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    stdin: Callable[[], str] | None = None
    hidden_lines: Sequence[str] = ()


class Child:
    """One child; it may be started again after it ended. Used from the event loop of the main thread."""

    def __init__(self, spec: ChildSpec, console: Console) -> None:
        self.spec = spec
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._console = console
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None

    @property
    def name(self) -> str:
        """Name of the child."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id of the last start; None before the first."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """True from start to the end that `wait` reports."""
        return self._ended is not None and not self._ended.done()

    def start(self) -> int:
        """Starts the child in a session of its own, so that a Ctrl-C of the terminal reaches the parent alone.

        Returns:
            Its process id.

        Raises:
            OSError: the program cannot be run.
        """
        self.last_lines.clear()
        process = subprocess.Popen(  # the main thread, because a child's death signal follows the thread that made it
            list(self.spec.command()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self.spec.environment),
            start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        self._process, self._ended = process, loop.create_future()
        if self.spec.stdin is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # an early end shows as an exit
                process.stdin.write(self.spec.stdin().encode())
        threading.Thread(target=self._follow, args=(process, self._ended, loop), name=self.name, daemon=True).start()
        return process.pid

    async def wait(self) -> int:
        """Waits for the end and returns the exit status (negative: the signal that killed it)."""
        if self._ended is None:
            raise RuntimeError(f"{self.name} was never started")
        return await asyncio.shield(self._ended)

    async def wait_for(self, timeout_s: float) -> bool:
        """Waits at most so long for the end; returns whether the child has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), timeout_s)
        return not self.alive

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; a child that has ended gets none."""
        if self.alive and self._process is not None:
            self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> bool:
        """Asks the child to end by SIGTERM and kills it if it has not ended in time.

        Returns:
            True: it ended by itself.
        """
        if self._ended is None:
            return True
        self.send(signal.SIGTERM)
        by_itself = await self.wait_for(timeout_s)
        if not by_itself:
            self.send(signal.SIGKILL)
            await self.wait_for(_SIGKILL_WAIT_S)
        return by_itself

    def _follow(self, process: subprocess.Popen[bytes], ended: asyncio.Future[int], loop: asyncio.AbstractEventLoop) -> None:
        reader = threading.Thread(target=self._pass_on, args=(process.stdout,), name=f"{self.name} output", daemon=True)
        reader.start()
        status = process.wait()
        reader.join(timeout=1.0)  # its last lines; a grandchild may hold the pipe open for longer
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended: no one waits
            loop.call_soon_threadsafe(_settle, ended, status)

    def _pass_on(self, output: IO[bytes]) -> None:
        with output:
            for raw in iter(lambda: output.readline(_MAX_LINE_BYTES), b""):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if any(text in line for text in self.spec.hidden_lines):
                    continue
                self.last_lines.append(line)
                self._console.write(self.name, line)


def _settle(ended: asyncio.Future[int], status: int) -> None:
    if not ended.done():
        ended.set_result(status)


def describe_exit(status: int) -> str:
    """Words an exit status: `exited with status 1`, `was killed by SIGKILL`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
