"""A raw TCP socket that carries every row, before a table in plain C: the least that a service over TCP can do.

A request is its kind and number of ids as two little-endian int64, the ids, and of a push their gradients. The answer of a pull
is its weights, of a push one int64.
"""

from __future__ import annotations

import collections
import socket
from typing import Any

import numpy as np
import numpy.typing as npt
from batches import Float32s, Int64s
from plain_table import PlainTable

PULL, PUSH = 0, 1
MOST_IDS = 1 << 20


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Returns the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def receive(connection: socket.socket, into: npt.NDArray[Any]) -> bool:
    """Fills an array; False: the other side has closed."""
    view = bytes_of(into)
    while view:
        received = connection.recv_into(view)
        if not received:
            return False
        view = view[received:]
    return True


def serve(num_rows: int, dim: int) -> None:
    """Serves one connection after the other, for ever."""
    table = PlainTable(num_rows, dim)
    ids, rows = np.empty(MOST_IDS, np.int64), np.empty((MOST_IDS, dim), np.float32)
    header = np.empty(2, np.int64)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while receive(connection, header):
                kind, count = header.tolist()
                receive(connection, ids[:count])
                if kind == PULL:
                    table.gather(ids[:count], rows.ctypes.data)
                    connection.sendall(bytes_of(rows[:count]))
                else:
                    receive(connection, rows[:count])
                    distinct = table.update(ids[:count], rows)
                    connection.sendall(np.array([distinct]).data)


class TcpLane:
    """The client's side of it."""

    def __init__(self, port: int, dim: int, most_ids: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rows = np.empty((most_ids, dim), np.float32)
        self._answer = np.empty(1, np.int64)
        self._counts: collections.deque[int] = collections.deque()

    def send_pull(self, row_ids: Int64s) -> None:
        self._connection.sendmsg([np.array([PULL, row_ids.size]).data, row_ids.data])
        self._counts.append(row_ids.size)

    def take_pull(self) -> Float32s:
        rows = self._rows[: self._counts.popleft()]
        receive(self._connection, rows)
        return rows

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        self._connection.sendall(np.array([PUSH, row_ids.size]).tobytes() + row_ids.tobytes())
        self._connection.sendall(bytes_of(gradients[: row_ids.size]))

    def take_push(self) -> None:
        receive(self._connection, self._answer)

    def close(self) -> None:
        self._connection.close()
