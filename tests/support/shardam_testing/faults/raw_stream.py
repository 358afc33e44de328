"""One Exchange stream made of generated stubs alone, over which a test sends what it wants and when it wants."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import grpc

from shardam_proto.v1 import embedding_pb2
from shardam_testing.raw_client import RawClient
from shardam_testing.waiting import wait_for

ANSWER_TIMEOUT_S = 60.0
"""An answer comes within milliseconds; longer means that it is lost."""


class StreamEnded(Exception):
    """The stream ended; the request's outcome is unknown."""


class RawStream:
    """Sends requests and keeps answers by request id. Ends with its channel.

    Args:
        client: whose stub and headers are used.
    """

    def __init__(self, client: RawClient) -> None:
        self._requests: queue.SimpleQueue[embedding_pb2.ExchangeRequest | None] = queue.SimpleQueue()
        self._answers: dict[int, embedding_pb2.ExchangeResponse] = {}
        self._order: list[int] = []
        self._ended: grpc.StatusCode | None = None
        self._call = client.embedding.Exchange(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="raw stream", daemon=True)
        self._reader.start()

    def send(self, request: embedding_pb2.PushRequest | embedding_pb2.PullRequest) -> int:
        """Sends a request and returns its id."""
        wrapped = embedding_pb2.ExchangeRequest()
        if isinstance(request, embedding_pb2.PushRequest):
            wrapped.push.CopyFrom(request)
        else:
            wrapped.pull.CopyFrom(request)
        self._requests.put(wrapped)
        return request.header.request_id

    def answer(self, request_id: int) -> embedding_pb2.ExchangeResponse:
        """Waits for an answer.

        Raises:
            StreamEnded: the stream has ended without it.
        """

        def look() -> embedding_pb2.ExchangeResponse | None:
            ended = self._ended
            found = self._answers.get(request_id)
            if found is None and ended is not None and not self._reader.is_alive():
                raise StreamEnded(ended.name)
            return found

        return wait_for(f"the answer of request {request_id}", look, ANSWER_TIMEOUT_S)

    def push(self, request: embedding_pb2.PushRequest) -> embedding_pb2.PushResponse:
        """Sends a push and returns its answer.

        Raises:
            StreamEnded: as answer.
            AssertionError: it was refused.
        """
        answer = self.answer(self.send(request))
        assert answer.HasField("push"), answer
        return answer.push

    def refusal(self, request_id: int) -> embedding_pb2.Refusal:
        """Returns why a request was refused."""
        answer = self.answer(request_id)
        assert answer.HasField("refusal"), answer
        return answer.refusal

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers[answer.request_id] = answer
                self._order.append(answer.request_id)
            self._ended = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self._ended = error.code()

    def close(self) -> None:
        """Ends the stream."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join(ANSWER_TIMEOUT_S)


@contextlib.contextmanager
def raw_stream(client: RawClient) -> Iterator[RawStream]:
    """Opens a stream."""
    stream = RawStream(client)
    try:
        yield stream
    finally:
        stream.close()
