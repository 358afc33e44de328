"""A TCP proxy that cuts its connections after so many bytes from the client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

BUFFER_BYTES = 4096
"""Small, so that a cut lies where it was asked for."""


class CuttingProxy:
    """Forwards connections to one address.

    Attributes:
        cut_after: bytes from a connection's client after which it is cut both ways; None: never.
        num_bytes: bytes from clients so far.
        num_cuts: connections cut so far.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_after: int | None = None
        self.num_bytes = 0
        self.num_cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        left = self.cut_after
        with client, server, contextlib.suppress(OSError):
            while left is None or left > 0:
                data = client.recv(BUFFER_BYTES if left is None else min(BUFFER_BYTES, left))
                if not data:
                    break
                server.sendall(data)
                self.num_bytes += len(data)
                if left is not None:
                    left -= len(data)
            else:
                self.num_cuts += 1
            for end in (client, server):  # wakes the thread that reads the answers
                end.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(BUFFER_BYTES):
                client.sendall(data)


@contextlib.contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
