"""A cluster on this machine, started by the program that uses it and gone with it."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shardam._checkpoint_job import CheckpointJob
from shardam._discovery import open_session
from shardam._forks import FORKS
from shardam._session_options import SessionOptions
from shardam.cluster import Cluster
from shardam_proto.errors import BadOption, ShardNotReady

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""A cold start of all processes takes 2 to 5 s on two cores; ten times that is a hang."""

RECOVERY_TIMEOUT_S = 600.0
"""With a data folder the shards first read their bases and journals: at 100 MB/s, the least that a disk gives, 60 GB."""

STOP_TIMEOUT_S = 30.0
"""Time to drain after the end of input before the processes are ended by signal."""

SHARD_TIMEOUT_S = 60.0

_STDERR_LINES = 40
"""Lines of the processes' log that an error shows."""

_PIPE_BYTES = 65_536
"""A pipe holds no more."""


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """A shard process at the time of the start.

    Attributes:
        index: shard index.
        address: host:port of its gRPC server.
        http_address: host:port of its metrics.
        pid: process id.
    """

    index: int
    address: str
    http_address: str
    pid: int


THREADS_VARIABLE = "SHARDAM_THREADS"
"""Threads of a shard's kernels, the one setting of the environment that a local cluster takes over."""


@dataclasses.dataclass(frozen=True)
class _Ready:
    """What `up --json` prints once everything serves."""

    cluster: str
    redis_url: str
    admin_url: str
    data_dir: Path | None
    shards: tuple[LocalShard, ...]

    @classmethod
    def from_json(cls, line: str) -> _Ready:
        values = json.loads(line)
        names = [field.name for field in dataclasses.fields(LocalShard)]
        shards = tuple(LocalShard(**{name: shard[name] for name in names}) for shard in values["shards"])
        data_dir = None if values["data_dir"] is None else Path(values["data_dir"])
        return cls(values["cluster"], values["redis_url"], values["admin_url"], data_dir, shards)


class LocalCluster(Cluster):
    """Starts shards, the admin API and a private Valkey as child processes, and connects to them.

    The processes end when the cluster is closed, and when this one ends in any way, because their standard input then ends.
    One that dies is started again.

    Without `data_dir` rows live in the memory of the shard processes only: a killed shard loses them, clients that knew them
    get ShardLost, and closing the cluster loses all. With it every change is written to the folder before it is acknowledged:
    a killed shard comes back with every acknowledged row, moment and step, clients go on by themselves, and a later
    LocalCluster with the same folder, number of shards and seed finds the rows. A folder serves one cluster at a time.

    This object is an async client. Workers of a group join with `shardam.connect(local.redis_url, cluster=local.name,
    mode="sync", rank=..., world_size=...)`, from this process or another; while a sync group trains, the shards refuse changes
    by this object (NotAMember).

    Args:
        shards: number of shard processes, at least 1.
        seed: seed of the initial weights of all tables.
        data_dir: folder for journals and bases, made if it is missing; None: memory only.
        checkpoint_dir: root folder of checkpoints, made if it is missing; None: `checkpoints` in data_dir. With neither there
            are no checkpoints.
        device: "cpu", or "auto": what the machine offers.

    Attributes:
        admin_url: base URL of the admin API.
        redis_url: URL of the private Valkey, for connect in other processes.
        data_dir: the folder as an absolute path; None: memory only.
        checkpoint_dir: root folder of checkpoints as an absolute path; None: there are none.
        shards: the shard processes.

    Raises:
        BadOption: an argument is out of range.
        ShardNotReady: the processes ended or were not ready in time; the message has the end of their log.
    """

    def __init__(
        self,
        shards: int = 2,
        *,
        seed: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        device: str = "auto",
    ) -> None:
        folder, checkpoints = _absolute(data_dir, "data_dir"), _absolute(checkpoint_dir, "checkpoint_dir")
        self.checkpoint_dir = folder / "checkpoints" if checkpoints is None and folder is not None else checkpoints
        self._process = _ServerProcess(_command(shards, seed, folder, checkpoints, device))
        try:
            ready = self._process.wait_until_ready(START_TIMEOUT_S if folder is None else RECOVERY_TIMEOUT_S)
            self.admin_url = ready.admin_url
            self.redis_url = ready.redis_url
            self.data_dir = ready.data_dir
            self.shards = ready.shards
            super().__init__(open_session(SessionOptions(ready.redis_url, ready.cluster, None, SHARD_TIMEOUT_S)))
        except BaseException:
            self._process.stop()
            raise

    def checkpoint(self, extra: object = None, *, name: str | None = None, wait: bool = True) -> CheckpointJob:
        """Makes a checkpoint, as Cluster.checkpoint does.

        Raises:
            BadOption: this cluster has no folder for checkpoints.
        """
        if self.checkpoint_dir is None:
            raise BadOption(
                "this cluster keeps its rows in memory only and has no folder for checkpoints; pass checkpoint_dir=, or "
                "data_dir=, to LocalCluster"
            )
        return super().checkpoint(extra, name=name, wait=wait)

    def close(self) -> None:
        """Sends what is queued, disconnects, and ends the processes; a forked child ends no process. May be called again.

        Raises:
            ShardamError: a queued push failed; the processes have ended all the same.
        """
        super().close()

    def _close(self, *, for_members: bool) -> None:
        """Closes, however that was asked for, and ends the processes."""
        try:
            super()._close(for_members=for_members)
        finally:
            self._process.stop()


def _absolute(path: str | os.PathLike[str] | None, what: str) -> Path | None:
    if path is None:
        return None
    nothing = {"data_dir": "memory only", "checkpoint_dir": "no folder of its own"}[what]
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise BadOption(f"{what} must be the path of a folder, or None for {nothing}; got {path!r}")
    if path == "none":
        raise BadOption(f"{what} 'none': pass None for {nothing}, or './none' for a folder of that name")
    return Path(os.path.abspath(path))


def _command(shards: int, seed: int, data_dir: Path | None, checkpoint_dir: Path | None, device: str) -> list[str]:
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise BadOption(f"shards must be an integer >= 1, got {shards!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BadOption(f"seed must be an integer, got {seed!r}")
    if not isinstance(device, str):
        raise BadOption(f"device must be a string such as 'auto' or 'cpu', got {device!r}")
    command = [sys.executable, "-m", "shardam_server", "up", "--shards", str(shards), "--port", "0", "--admin-port", "0"]
    command += [f"--data-dir={data_dir or 'none'}"]
    command += [] if checkpoint_dir is None else [f"--checkpoint-dir={checkpoint_dir}"]
    return [*command, "--seed", str(seed), "--device", device, "--json", "--exit-with-stdin"]


class _ServerProcess:
    """The parent of all processes of a local cluster."""

    def __init__(self, command: list[str]) -> None:
        # what is set for another cluster must not leak into this one; threads are this machine's
        own = (name for name in os.environ if name == THREADS_VARIABLE or not name.startswith("SHARDAM_"))
        environment = {name: os.environ[name] for name in own}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            bufsize=0,  # a buffer has a lock, which its reader holds while a fork copies it
            start_new_session=True,  # Ctrl-C reaches the program first, which then closes its cluster
        )
        self._is_the_parents = False
        FORKS.add_heir(self)
        self._first_line: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._process.stdout,), name="shardam-up-stdout", daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), name="shardam-up-stderr", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait_until_ready(self, timeout_s: float) -> _Ready:
        """Returns what `up` prints once everything serves.

        Args:
            timeout_s: seconds until it hangs.

        Raises:
            ShardNotReady: it ended before, or took too long.
        """
        try:
            line = self._first_line.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"was not ready within {timeout_s:g} s") from None
        if not line:
            code = self._process.wait(STOP_TIMEOUT_S)
            raise self._failure(f"ended with exit status {code} before it was ready")
        return _Ready.from_json(line)

    def stop(self) -> None:
        """Ends the processes: by the end of input, else by SIGTERM, else by SIGKILL. May be called again."""
        if self._is_the_parents:
            return
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
        for end in (process.terminate, process.kill):
            try:
                process.wait(STOP_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                logger.warning("the local cluster (pid %d) did not end within %g s", process.pid, STOP_TIMEOUT_S)
                end()
        process.wait(STOP_TIMEOUT_S)
        for reader in self._readers:
            reader.join(STOP_TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()

    def _begin_anew(self) -> object:
        """Leaves the processes to the parent, in a forked child: they end with its end of the pipes alone.

        Returns:
            What was dropped; it must not be finalized.
        """
        self._is_the_parents = True
        self._process.returncode = 0  # they are no children of this process, which has nothing to wait for
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None and not stream.closed:
                os.dup2(nothing, stream.fileno(), inheritable=False)
        os.close(nothing)
        return self._process

    def _failure(self, what: str) -> ShardNotReady:
        for reader in self._readers:
            reader.join(1.0)  # the last lines say why
        log = "\n".join(self._log) or "(no output)"
        return ShardNotReady(f"the local cluster {what}; its last lines:\n{log}")

    def _read_stdout(self, stream: IO[bytes]) -> None:
        lines = _lines(stream)
        self._first_line.put(next(lines, ""))
        self._log.extend(lines)

    def _read_stderr(self, stream: IO[bytes]) -> None:
        self._log.extend(_lines(stream))


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Yields what comes through a pipe, line by line."""
    rest = b""
    while data := stream.read(_PIPE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace").rstrip() for line in lines)
    if rest:
        yield rest.decode(errors="replace").rstrip()
