"""A running `shardam up`, watched with every process of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from shardam_proto.registry import ClusterView, Keys, connect_redis, read_cluster
from shardam_testing.process_table import is_running, processes_with
from shardam_testing.processes import clean_environment

READY_S = 60.0
"""Hang guard of a start or a stop; each takes a tenth of it."""

FAST = ("--lease-s", "1.5", "--drain-s", "5", "--restart-delay-s", "0.1")
"""Waits that make tests quick."""


@dataclasses.dataclass
class Up:
    """A running `shardam up`.

    Attributes:
        process: the process of `up` itself.
        log: where its stderr goes.
        mark: text in the environment of every process of it.
        seen: its processes when they were last looked at.
    """

    process: subprocess.Popen[str]
    log: Path
    mark: str
    seen: set[int] = dataclasses.field(default_factory=set)

    def banner(self) -> str:
        """Waits for the first line of stdout that says something."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip():
                return line
        raise AssertionError(f"up ended before it was ready: {self.log.read_text()}")

    def processes(self) -> list[int]:
        """Returns what runs of it now, `up` itself included; found by the mark even when `up` has ended."""
        found = set(processes_with(self.mark)) | self.seen
        with contextlib.suppress(psutil.NoSuchProcess):  # a server that sets its title has overwritten its mark
            found |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        self.seen = {pid for pid in found if is_running(pid)}
        return sorted(self.seen)

    def wait(self) -> int:
        return self.process.wait(READY_S)


@contextlib.contextmanager
def up(folder: Path, *flags: str, **environment: str) -> Iterator[Up]:
    """Starts `up` on free ports; kills whatever of it is left at the end."""
    mark = f"mark-{uuid.uuid4()}"
    log = folder / "up.log"
    command = [sys.executable, "-m", "shardam_server", "up", "--port", "0", "--admin-port", "0", *FAST, *flags]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            env=clean_environment(TEST_MARK=mark, **environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        )
    running = Up(process, log, mark)
    try:
        with process:
            try:
                yield running
            finally:
                process.kill()
    finally:
        for pid in running.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Ready:
    """What the JSON line says."""

    redis_url: str
    cluster: str
    admin_url: str
    data_dir: str | None
    journal: str
    shards: list[dict[str, object]]

    def view(self) -> ClusterView:
        with contextlib.closing(connect_redis(self.redis_url)) as connection:
            return read_cluster(connection, Keys(self.cluster))

    def shard_pid(self, index: int) -> int:
        return self.view().shards[index].pid


def ready_of(running: Up) -> Ready:
    """Waits for the JSON line."""
    return Ready(**json.loads(running.banner()))
