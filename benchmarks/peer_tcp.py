"""A raw TCP socket that carries every row, before a table in plain C: the least that a service over TCP can do.

A request is its kind and number of ids as two little-endian int64, the ids, and of a push their gradients. The answer of a pull
is its weights, of a push one int64.
"""

from __future__ import annotations

import collections
import socket

import numpy as np
from batches import Float32s, Int64s
from plain_table import PlainTable

PULL, PUSH = 0, 1
HEADER_BYTES, ANSWER_BYTES = 16, 8
MOST_IDS = 1 << 20


def receive(connection: socket.socket, size: int, into: memoryview) -> bool:
    """Fills the first bytes of a buffer; False: the other side has closed."""
    view = into[:size]
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
    id_bytes, row_bytes = memoryview(ids).cast("B"), memoryview(rows).cast("B")
    header = np.empty(2, np.int64)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while receive(connection, HEADER_BYTES, memoryview(header).cast("B")):
                kind, count = header.tolist()
                receive(connection, count * 8, id_bytes)
                if kind == PULL:
                    table.gather(ids[:count], rows.ctypes.data)
                    connection.sendall(row_bytes[: count * dim * 4])
                else:
                    receive(connection, count * dim * 4, row_bytes)
                    distinct = table.update(ids[:count], rows)
                    connection.sendall(distinct.to_bytes(ANSWER_BYTES, "little"))


class TcpLane:
    """The client's side of it."""

    def __init__(self, port: int, dim: int, most_ids: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rows = np.empty((most_ids, dim), np.float32)
        self._counts: collections.deque[int] = collections.deque()

    def send_pull(self, row_ids: Int64s) -> None:
        self._connection.sendmsg([np.array([PULL, row_ids.size]).data, row_ids.data])
        self._counts.append(row_ids.size)

    def take_pull(self) -> Float32s:
        rows = self._rows[: self._counts.popleft()]
        receive(self._connection, rows.nbytes, memoryview(rows).cast("B"))
        return rows

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        self._connection.sendall(np.array([PUSH, row_ids.size]).tobytes() + row_ids.tobytes())
        self._connection.sendall(memoryview(gradients[: row_ids.size]).cast("B"))

    def take_push(self) -> None:
        receive(self._connection, ANSWER_BYTES, memoryview(bytearray(ANSWER_BYTES)))

    def close(self) -> None:
        self._connection.close()
