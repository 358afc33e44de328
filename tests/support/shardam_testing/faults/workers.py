"""Worker processes of the fault tests: started, watched through their progress files, killed and stopped."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardam_testing.matrix import matrix_environment
from shardam_testing.processes import clean_environment
from shardam_testing.waiting import wait_for

SUPPORT = Path(__file__).resolve().parents[2]
"""Folder that holds this package; only pytest knows it by itself."""

FAILED = 3
"""Exit status of a worker whose client raised."""

CHUNKS_OF_A_MIB = {"SHARDAM_CHUNK_KIB": "1024"}
"""Of workers, unless the matrix has others: their large pushes then have several chunks to lose."""

MAX_IN_FLIGHT = 32
"""Numbers that one client may have in flight (PROTOCOL.md, section 4)."""


@dataclasses.dataclass
class Noted:
    """What a worker has noted so far.

    Attributes:
        client_id: its client; empty before it has connected.
        sent: last number handed to the client.
        acknowledged: last number answered by every shard.
        pulled: number -> digest of the rows pulled after it.
        error: the line of the error that ended it; empty: none.
        done: it has made all its changes and left.
    """

    client_id: bytes = b""
    sent: int = 0
    acknowledged: int = 0
    pulled: dict[int, str] = dataclasses.field(default_factory=dict)
    error: dict[str, str] = dataclasses.field(default_factory=dict)
    done: bool = False

    def take(self, line: Mapping[str, int | float | str]) -> None:
        """Takes one line."""
        match dict(line):
            case {"client": str(text)}:
                self.client_id = bytes.fromhex(text)
            case {"sent": int(number)}:
                self.sent = number
            case {"acknowledged": int(number)}:
                self.acknowledged = number
            case {"pulled": str(digest), "at": int(number)}:
                self.pulled[number] = digest
            case {"error": _}:
                self.error = {name: str(value) for name, value in line.items()}
            case {"done": _}:
                self.done = True


@dataclasses.dataclass
class WorkerProcess:
    """One process that trains and notes what it does.

    Attributes:
        name: "worker I".
        seed: of its sequence.
        process: its process.
        progress: its progress file.
        log: its output.
        killed: a fault has killed it.
    """

    name: str
    seed: int
    process: subprocess.Popen[bytes]
    progress: Path
    log: Path
    killed: bool = False

    def __post_init__(self) -> None:
        self._offset = 0

    def new_lines(self) -> Iterator[dict[str, int | float | str]]:
        """Yields the lines of the progress file that have been written since the last call."""
        if not self.progress.exists():
            return
        with self.progress.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                yield json.loads(line)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Kills it at once."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Asks it to end after its present change."""
        if self.alive:
            self.process.terminate()

    def stop(self) -> None:
        """Stops it by SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues it."""
        self.process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float = 100.0) -> int:
        """Waits for its end and returns the exit status."""
        return self.process.wait(timeout_s)

    def log_text(self) -> str:
        """Returns its output."""
        return self.log.read_text()


@dataclasses.dataclass
class Worker(WorkerProcess):
    """A worker without a group.

    Attributes:
        replaced: a restore has replaced the state that it trained; its numbers are in no book any more.
    """

    replaced: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noted = Noted()

    @property
    def noted(self) -> Noted:
        """What it has noted so far."""
        for line in self.new_lines():
            self._noted.take(line)
        return self._noted

    def wait_acknowledged(self, number: int, timeout_s: float = 100.0) -> None:
        """Waits until a number has been acknowledged.

        Raises:
            AssertionError: the worker ended before, or it took too long.
        """

        def reached() -> bool:
            noted = self.noted
            assert self.alive or noted.acknowledged >= number, f"{self.name} ended: {noted.error}\n{self.log_text()}"
            return noted.acknowledged >= number

        wait_for(f"{self.name} to have number {number} acknowledged", reached, timeout_s)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How worker processes of one cluster are started.

    Attributes:
        url: Redis URL of the cluster.
        folder: for progress files and logs.
        cluster: its name.
    """

    url: str
    folder: Path
    cluster: str = "test"

    def start(
        self, module: str, name: str, options: Mapping[str, object], **environment: str
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """Starts a worker module of this package; returns its process, its progress file and its log."""
        stem = self.folder / name.replace(" ", "-")
        progress, log = stem.with_suffix(".progress"), stem.with_suffix(".log")
        given = {"url": self.url, "cluster": self.cluster, "progress": progress, **options}
        arguments = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", f"shardam_testing.faults.{module}", *arguments],
                env=clean_environment(**{**CHUNKS_OF_A_MIB, **matrix_environment(), "PYTHONPATH": str(SUPPORT), **environment}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        return process, progress, log


@dataclasses.dataclass
class Workers:
    """The workers of one cluster. A context manager's job is its owner's: call `close`.

    Args:
        url: Redis URL of the cluster.
        folder: for progress files and logs.
        cluster: its name.
    """

    url: str
    folder: Path
    cluster: str = "test"
    started: list[Worker] = dataclasses.field(default_factory=list)

    def start(self, seed: int, count: int, **options: float) -> Worker:
        """Starts a worker; options are those of worker.py."""
        name = f"worker {len(self.started)}"
        launch = Launch(self.url, self.folder, self.cluster)
        process, progress, log = launch.start("worker", name, {"seed": seed, "count": count, **options})
        worker = Worker(name, seed, process, progress, log)
        self.started.append(worker)
        return worker

    def close(self) -> None:
        """Kills those that still run."""
        for worker in self.started:
            if worker.alive:
                worker.kill()
