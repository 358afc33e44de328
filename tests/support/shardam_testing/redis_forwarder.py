"""A way to Redis that a test bends: it changes the server for new connections, goes silent, or says that Redis is loading."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from typing import Literal

_CHUNK_BYTES = 65_536
_COMMAND = re.compile(rb"(?:^|\r\n)\*\d+(?=\r\n\$)")  # RESP writes a command as an array of strings


class RedisForwarder:
    """Listens on a free port and passes bytes on, a thread for each direction of each connection.

    Attributes:
        target: port of the server that new connections lead to.
        mode: "forward"; "swallow": no byte passes any more, and no connection ends; "loading": each command is answered
            -LOADING.
        num_swallowed: chunks that were swallowed.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.mode: Literal["forward", "swallow", "loading"] = "forward"
        self.num_swallowed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink, source is client), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, from_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if self.mode == "swallow":
                    self.num_swallowed += 1
                elif self.mode == "loading" and from_client:
                    source.sendall(b"-LOADING Valkey is loading the dataset in memory\r\n" * len(_COMMAND.findall(data)))
                else:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def redis_forwarder(target: int) -> Iterator[RedisForwarder]:
    """Runs a forwarder to a port of this machine."""
    forwarder = RedisForwarder(target)
    try:
        yield forwarder
    finally:
        forwarder.close()
