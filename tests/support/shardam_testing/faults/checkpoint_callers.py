"""Processes that ask home for a job and wait for its end, so that they can be killed or left alone."""

from __future__ import annotations

import subprocess
import sys

from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.workers import SUPPORT
from shardam_testing.processes import clean_environment


class Caller:
    """A process that asks for a job and waits for its end.

    Args:
        cluster: whom it asks.
        what: "create", "restore" or "reshard".
        name: name of the checkpoint; of a reshard: the number of shards.

    Attributes:
        log: where callers of this cluster say how their jobs ended.
    """

    def __init__(self, cluster: FaultCluster, what: str, name: str) -> None:
        module = [sys.executable, "-m", "shardam_testing.faults.checkpoint_calls"]
        self._command = [*module, cluster.valkey.url, cluster.shards.cluster, what, name]
        self.log = cluster.folder / "callers.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it."""
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                self._command,
                env=clean_environment(PYTHONPATH=str(SUPPORT)),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """Kills it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
