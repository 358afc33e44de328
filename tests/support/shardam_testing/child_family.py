"""Small programs under supervision, in place of the processes of a cluster."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TypeVar

from shardam_server.children import Child, ChildSpec, Console
from shardam_server.supervisor import Group, Kept, RestartPolicy, Supervisor
from shardam_testing.process_table import is_running

T = TypeVar("T")

HANG_S = 60.0
"""A wait that takes so long hangs."""

QUICK = RestartPolicy(delay_s=0.01, max_delay_s=0.05, limit=5)
"""Starts again at once."""

SERVER = """
import os, pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def end(number, frame):
    with (folder / "ended").open("a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(folder / f"{name}-{os.getpid()}").touch()
while True:
    time.sleep(60)
"""
"""Serves until SIGTERM; a file of its name and process id says that it is ready."""


def run(work: Coroutine[None, None, T]) -> T:
    """Runs it on a loop of its own, for as long as nothing hangs."""
    return asyncio.run(asyncio.wait_for(work, HANG_S))


class Family:
    """Children of one test, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = io.StringIO()
        self.kept: list[Kept] = []

    def add(
        self,
        name: str,
        program: str = SERVER,
        policy: RestartPolicy = QUICK,
        after: tuple[Kept, ...] = (),
        aftermath: str = "",
        has_left: Callable[[], Awaitable[bool]] | None = None,
    ) -> Kept:
        """Makes a child; the parameters are those of Kept."""
        command = [sys.executable, "-S", "-c", program, name, str(self.folder)]
        child = Child(ChildSpec(name, lambda: command, os.environ), Console(self.output, "text"))

        async def ready(pid: int) -> None:
            await until(lambda: (self.folder / f"{name}-{pid}").exists())

        self.kept.append(Kept(child, ready, policy, after=after, aftermath=aftermath, has_left=has_left))
        return self.kept[-1]

    def ended(self) -> list[str]:
        """Returns the names of those that were asked to end, in order."""
        path = self.folder / "ended"
        return path.read_text().split() if path.exists() else []

    def alive(self) -> list[str]:
        """Returns the names of those that run."""
        return [kept.child.name for kept in self.kept if kept.child.pid is not None and is_running(kept.child.pid)]


async def until(true: Callable[[], bool]) -> None:
    """Waits until it holds."""
    deadline = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def never() -> None:
    """Waits for ever."""
    await asyncio.Event().wait()


def run_groups(groups: list[Group], during: Callable[[Supervisor], Awaitable[None]], drain_s: float = HANG_S) -> bool:
    """Runs a supervisor of groups; `during` runs once all children are ready."""

    async def work() -> bool:
        supervisor = Supervisor(groups, drain_s)
        return await supervisor.run(lambda: during(supervisor))

    return run(work())
