"""One Exchange stream of bytes as they are: what goes out need be no message, and what comes back is read by protobuf alone."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Iterator

import grpc

from shardam_proto.v1 import embedding_pb2

PATH = "/shardam.v1.EmbeddingService/Exchange"

HANG_S = 60.0
"""No answer of these tests takes a hundredth of this."""


class ByteStream:
    """An open stream; a thread of its own reads the answers."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PATH)
        self._call = exchange(iter(self._requests.get, None))
        self.answers: list[embedding_pb2.ExchangeResponse] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._complete: Counter[int] = Counter()
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        status = grpc.StatusCode.OK, ""
        try:
            for data in self._call:
                answer = embedding_pb2.ExchangeResponse.FromString(data)
                with self._news:
                    self.answers.append(answer)
                    self._complete[answer.request_id] += _is_last(answer)
                    self._news.notify_all()
        except grpc.RpcError as error:
            status = error.code(), error.details() or ""
        finally:
            with self._news:
                self.status = status
                self._news.notify_all()

    def send(self, data: bytes) -> None:
        self._requests.put(data)

    def num_answers(self, request_id: int) -> int:
        """Returns how many answers of a request have come as a whole."""
        return self._complete[request_id]

    def wait_for_answer(self, request_id: int, count: int) -> bool:
        """Waits until a request id has so many answers; False: the stream has ended before.

        Raises:
            AssertionError: neither comes.
        """
        with self._news:
            came = self._news.wait_for(lambda: self._complete[request_id] >= count or self.status is not None, HANG_S)
            assert came, f"request {request_id} has no answer after {HANG_S:g} s"
            return self._complete[request_id] >= count

    def finish(self) -> tuple[grpc.StatusCode, str]:
        """Sends nothing more and waits for the stream's end.

        Raises:
            AssertionError: it does not end.
        """
        self._requests.put(None)
        with self._news:
            assert self._news.wait_for(lambda: self.status is not None, HANG_S), "the stream does not end"
        assert self.status is not None
        return self.status

    def cancel(self) -> None:
        self._call.cancel()
        self._requests.put(None)


def _is_last(answer: embedding_pb2.ExchangeResponse) -> bool:
    """Whether an answer is whole with this message."""
    kind = answer.WhichOneof("response")
    header = getattr(getattr(answer, kind or ""), "header", None)
    return header is None or header.chunk_index + 1 >= header.num_chunks


@contextlib.contextmanager
def byte_stream(channel: grpc.Channel) -> Iterator[ByteStream]:
    """Opens a stream and cancels it in the end."""
    stream = ByteStream(channel)
    try:
        yield stream
    finally:
        stream.cancel()
