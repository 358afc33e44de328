"""The processes of a benchmark, each on its core: shards, peers' servers, workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
STOP_S = 60.0

CORES = tuple(sorted(os.sched_getaffinity(0)))
"""Of this process when it starts; pinning narrows them later."""

WORKER_CORE, SERVER_CORE = CORES[0], CORES[-1]
"""A worker on one and whoever serves it on another: nobody is faster because the other side left it its core."""

QUIET_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Keeps memory instead of giving it back and taking it again with every message: peers' servers get it, too."""


@contextlib.contextmanager
def on_cores(*cores: int) -> Iterator[None]:
    """Has this thread, and what it starts meanwhile, run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def clean_environment() -> dict[str, str]:
    """Returns the environment without settings of shardam."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SHARDAM_")}


class LineProcess:
    """A process that answers on stdout, a line each, and ends with its stdin."""

    def __init__(self, arguments: Sequence[str], cores: Sequence[int], extra: Mapping[str, str] | None = None) -> None:
        with on_cores(*cores):
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**clean_environment(), **(extra or {})},
            )
        self._what = " ".join(arguments)

    def read(self) -> str:
        """Returns the next line.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._what} has ended with status {self._process.wait(STOP_S)}; its message stands above")
        return line

    def tell(self, line: str) -> None:
        """Writes a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> str:
        """Writes a line and returns the answer."""
        self.tell(line)
        return self.read()

    def stop(self) -> None:
        """Ends it and waits."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)
        self._process.stdout.close()


@dataclasses.dataclass(frozen=True)
class Shards:
    """Running shards.

    Attributes:
        redis_url: where they meet.
        cluster: their cluster.
        pids: by index.
    """

    redis_url: str
    cluster: str
    pids: tuple[int, ...]

    def resident_bytes(self) -> int:
        """Returns the resident memory of all of them."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) for pid in self.pids]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def running_shards(count: int = 1, *, cores: Sequence[int] = (SERVER_CORE,), flags: Sequence[str] = ()) -> Iterator[Shards]:
    """Runs shards with everything they need; without a journal unless flags say otherwise."""
    command = ["-m", "shardam_server", "up", "--shards", str(count), "--port", "0", "--admin-port", "0", "--json"]
    command += ["--exit-with-stdin", "--device", "cpu", "--log-level", "warning", *(flags or ("--data-dir=none",))]
    process = LineProcess(command, cores)
    try:
        ready = json.loads(process.read())
        yield Shards(ready["redis_url"], ready["cluster"], tuple(shard["pid"] for shard in ready["shards"]))
    finally:
        process.stop()


@contextlib.contextmanager
def running_peer(module: str, num_rows: int, dim: int, *, core: int = SERVER_CORE) -> Iterator[int]:
    """Runs a peer's server, `serve` of a module here; yields its port."""
    process = LineProcess([str(HERE / "peer_server.py"), module, str(num_rows), str(dim)], (core,), QUIET_ALLOCATOR)
    try:
        yield int(process.read())
    finally:
        process.stop()
