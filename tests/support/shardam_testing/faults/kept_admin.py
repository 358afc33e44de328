"""An admin API under faults: started again when it dies."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from pathlib import Path

from shardam_testing.processes import clean_environment

LOOK_TIMEOUT_S = 5.0
"""A live admin API answers a probe within milliseconds, a stopped one never."""


class KeptAdmin:
    """One admin API process after the other.

    Args:
        redis_url: of its cluster.
        folder: for its log.
        port: where it listens.
        cluster: name of its cluster.
    """

    def __init__(self, redis_url: str, folder: Path, port: int, cluster: str = "test") -> None:
        self._redis_url = redis_url
        self._log = folder / "admin.log"
        self._port = port
        self._cluster = cluster
        self._process = self._start()
        self.num_restarts = 0

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = ["--cluster", self._cluster, "--port", str(self._port), "--drain-s", "1"]
        with self._log.open("ab") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "shardam_server", "admin", *arguments],
                env=clean_environment(SHARDAM_REDIS=self._redis_url),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def keep(self) -> None:
        """Starts it again if it was killed."""
        if self._process.poll() == -signal.SIGKILL:
            self._process = self._start()
            self.num_restarts += 1

    def send(self, number: signal.Signals) -> bool:
        """Sends it a signal; returns False if it was not alive."""
        if self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def is_ready(self) -> bool:
        """Returns whether it answers, and the cluster behind it, too."""
        assert self._process.poll() in (None, -signal.SIGKILL), f"the admin API ended by itself:\n{self._log.read_text()}"
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LOOK_TIMEOUT_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def close(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
