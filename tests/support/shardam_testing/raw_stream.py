"""One Exchange stream made of generated stubs alone: requests as given, answers by request id."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence

import grpc

from shardam_proto.channels import token_metadata, translate
from shardam_proto.errors import ShardamError, make_error
from shardam_proto.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc, row_pb2

Request = (
    embedding_pb2.PullRequest
    | embedding_pb2.PushRequest
    | embedding_pb2.CloseNumberRequest
    | row_pb2.AssignRowsRequest
    | row_pb2.DeleteRowsRequest
    | row_pb2.ClearMomentsRequest
    | embedding_pb2.ArriveRequest
)

KINDS = {
    embedding_pb2.PullRequest: "pull",
    embedding_pb2.PushRequest: "push",
    embedding_pb2.CloseNumberRequest: "close_number",
    row_pb2.AssignRowsRequest: "assign_rows",
    row_pb2.DeleteRowsRequest: "delete_rows",
    row_pb2.ClearMomentsRequest: "clear_moments",
    embedding_pb2.ArriveRequest: "arrive",
}


class RawStream:
    """An open stream; a thread of its own reads the answers, unless it is told not to."""

    def __init__(self, channel: grpc.Channel, token: str | None = None, *, read: bool = True) -> None:
        self._requests: queue.SimpleQueue[embedding_pb2.ExchangeRequest | None] = queue.SimpleQueue()
        stub = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.call = stub.Exchange(iter(self._requests.get, None), metadata=token_metadata(token))
        self.answers: dict[int, embedding_pb2.ExchangeResponse] = {}
        self.order: list[int] = []
        self.error: ShardamError | None = None
        self.ended = threading.Event()
        self._news = threading.Condition()
        if read:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for answer in self.call:
                assert answer.request_id not in self.answers, "a request was answered twice"
                self.answers[answer.request_id] = answer
                self.order.append(answer.request_id)
                with self._news:
                    self._news.notify_all()
        except grpc.RpcError as error:
            self.error = translate(error, "the stream")
        finally:
            self.ended.set()
            with self._news:
                self._news.notify_all()

    def send(self, request: Request) -> int:
        """Sends a request and returns its id."""
        self.send_message(embedding_pb2.ExchangeRequest(**{KINDS[type(request)]: request}))  # type: ignore[arg-type]  # its field
        return int(request.header.request_id)

    def send_message(self, message: embedding_pb2.ExchangeRequest) -> None:
        self._requests.put(message)

    def answer(self, request_id: int, timeout_s: float = 30.0) -> embedding_pb2.ExchangeResponse:
        """Waits for an answer, or for the end of the stream.

        Raises:
            ShardamError: the request was refused, or the stream failed.
        """
        with self._news:
            came = self._news.wait_for(lambda: request_id in self.answers or self.ended.is_set(), timeout_s)
        assert came, f"waited {timeout_s:g} s for the answer of {request_id}"
        answer = self.answers.get(request_id)
        if answer is None:
            raise self.error or ShardamError("the stream ended without an answer")
        if answer.WhichOneof("response") == "refusal":
            raise make_error(answer.refusal.reason, answer.refusal.message, dict(answer.refusal.metadata))
        return answer

    def ask(self, request: Request) -> embedding_pb2.ExchangeResponse:
        """Sends a request and waits for its answer."""
        return self.answer(self.send(request))

    def finish_sending(self) -> None:
        self._requests.put(None)

    def cancel(self) -> None:
        self.call.cancel()
        self.finish_sending()


@contextlib.contextmanager
def raw_stream(channel: grpc.Channel, token: str | None = None, *, read: bool = True) -> Iterator[RawStream]:
    """Opens a stream and cancels it in the end."""
    stream = RawStream(channel, token, read=read)
    try:
        yield stream
    finally:
        stream.cancel()


def chunks_of(request: embedding_pb2.PushRequest, chunk_bytes: int, **changes: int) -> list[embedding_pb2.PushRequest]:
    """Splits a part into chunks of so many bytes of ids and rows."""
    data, num_ids = request.row_ids + request.rows, len(request.row_ids)
    starts: Sequence[int] = range(0, len(data), chunk_bytes) or [0]
    num_chunks = changes.get("num_chunks", max(2, len(starts)))
    chunks = []
    for index in range(num_chunks):
        start, end = index * chunk_bytes, min((index + 1) * chunk_bytes, len(data))
        header = common_pb2.RequestHeader()
        header.CopyFrom(request.header)
        header.chunk_index, header.num_chunks = index, num_chunks
        chunk = embedding_pb2.PushRequest(
            header=header, row_ids=data[start : min(end, num_ids)], rows=data[max(start, num_ids) : max(end, num_ids)]
        )
        if index == 0:
            chunk.options.extend(request.options)
            chunk.sections.extend(request.sections)
            chunk.total_bytes = len(data)
        chunks.append(chunk)
    return chunks
