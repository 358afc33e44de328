"""A bare gRPC stream that carries every row as raw bytes, before a table in plain C: what gRPC itself costs."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np
from batches import Float32s, Int64s
from plain_table import PlainTable

PULL, PUSH = "/peer/Pull", "/peer/Push"
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
MOST_STREAMS = 8


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, num_rows: int, dim: int) -> None:
        self._table = PlainTable(num_rows, dim)
        self._dim = dim

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = {PULL: self._pull, PUSH: self._push}.get(handler_call_details.method)
        return None if method is None else grpc.stream_stream_rpc_method_handler(method)

    def _pull(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            row_ids = np.frombuffer(request, np.int64)
            rows = bytes(row_ids.size * self._dim * 4)
            self._table.gather(row_ids, np.frombuffer(rows, np.uint8).ctypes.data)  # nobody else has these bytes yet
            yield rows

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            count = len(request) // (8 + 4 * self._dim)
            row_ids = np.frombuffer(request, np.int64, count)
            gradients = np.frombuffer(request, np.float32, offset=8 * count)
            yield self._table.update(row_ids, gradients).to_bytes(8, "little")


def serve(num_rows: int, dim: int) -> None:
    """Serves for ever."""
    server = grpc.server(futures.ThreadPoolExecutor(MOST_STREAMS), handlers=[_Handler(num_rows, dim)], options=UNLIMITED)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


class GrpcLane:
    """The client's side of it: a stream for pulls and one for pushes."""

    def __init__(self, port: int, dim: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=(*UNLIMITED, ("grpc.enable_http_proxy", 0)))
        self._dim = dim
        self._queues: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._answers: dict[str, Iterator[bytes]] = {}
        for method in (PULL, PUSH):
            requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            self._queues[method] = requests
            exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
            self._answers[method] = exchange(iter(requests.get, None))

    def send_pull(self, row_ids: Int64s) -> None:
        self._queues[PULL].put(row_ids.tobytes())

    def take_pull(self) -> Float32s:
        return np.frombuffer(next(self._answers[PULL]), np.float32).reshape(-1, self._dim)

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        self._queues[PUSH].put(b"".join([row_ids.data, gradients[: row_ids.size].data]))

    def take_push(self) -> None:
        next(self._answers[PUSH])

    def close(self) -> None:
        for requests in self._queues.values():
            requests.put(None)
        self._channel.close()
