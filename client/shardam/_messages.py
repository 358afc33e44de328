"""The parts of changes as they travel on a stream: in one message, or a push's in chunks.

Arrays stay as they are until a message leaves. Its bytes are then put together once, and only one message at a time is in
memory (embedding.proto and shardam_proto/wire.py have the format).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shardam._chunk_setting import DEFAULT_CHUNK_BYTES
from shardam_kernels import native
from shardam_proto import wire
from shardam_proto.sections import SECTIONS_FIELD, section_columns
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, row_pb2

ArrayT = TypeVar("ArrayT", bound=np.generic)

_PUSH = embedding_pb2.ExchangeRequest.PUSH_FIELD_NUMBER


class Payload(Generic[ArrayT]):
    """Arrays behind one another, as little-endian bytes.

    Args:
        arrays: the arrays; nobody writes to them any more, unless keep_copy is called first.

    Attributes:
        arrays: they.
        lock: held while pieces are in use.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[ArrayT]]) -> None:
        self.arrays = [np.ascontiguousarray(array) for array in arrays]
        self.lock = threading.Lock()
        self._ends = list(itertools.accumulate(array.nbytes for array in self.arrays))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Returns some of the bytes as they lie; positions beyond the ends have none."""
        start, stop = max(0, start), min(stop, self.num_bytes)
        if start >= stop:
            return []
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop)
        found = [array.data for array in self.arrays[first : last + 1] if array.size]
        behind, before = self._ends[last] - stop, start - (self._ends[first] - self.arrays[first].nbytes)
        if behind:
            found[-1] = found[-1].cast("B")[:-behind]
        if before:
            found[0] = found[0].cast("B")[before:]
        return found

    def read(self, start: int, stop: int) -> bytes:
        """Copies some of the bytes out; positions beyond the ends have none."""
        with self.lock:
            return b"".join(self.pieces(start, stop))

    def keep_copy(self) -> None:
        """Lets go of the arrays that were handed in: their owner may write to them again."""
        with self.lock:
            self.arrays = [array.copy() for array in self.arrays]


@dataclasses.dataclass(frozen=True)
class PushPart:
    """One shard's part of a push.

    Attributes:
        options: hyper-parameters that tables refer to.
        table_ids: the tables that step.
        options_indexes: of each, which of the hyper-parameters it uses.
        row_ids: the ids of each table.
        rows: the gradients of each table.
        contribution: what it contributes to a step of a sync group.
    """

    options: list[common_pb2.AdamOptions]
    table_ids: list[int]
    options_indexes: list[int]
    row_ids: Payload[np.int64]
    rows: Payload[np.float32]
    contribution: group_pb2.ContributionKind.ValueType = group_pb2.CONTRIBUTION_KIND_UNSPECIFIED

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and gradients."""
        return self.row_ids.num_bytes + self.rows.num_bytes

    def messages(self, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Iterator[bytes]:
        """Makes the part's messages: ids, then gradients, cut every chunk_bytes."""
        num_chunks = max(1, -(-self.num_bytes // chunk_bytes))
        for index in range(num_chunks):
            if num_chunks > 1:
                header.chunk_index, header.num_chunks = index, num_chunks
            head = embedding_pb2.PushRequest(header=header)
            if index == 0 and num_chunks > 1:
                head.total_bytes = self.num_bytes
            fields = head.SerializeToString() + (self._fields if index == 0 else b"")
            yield self._message(fields, index * chunk_bytes, (index + 1) * chunk_bytes)

    @functools.cached_property
    def _fields(self) -> bytes:
        """What every try of the first message says of the rows, encoded."""
        columns = section_columns(self.table_ids, [ids.size for ids in self.row_ids.arrays], self.options_indexes)
        sections = native.encode_messages(SECTIONS_FIELD, columns)
        before = embedding_pb2.PushRequest(options=self.options).SerializeToString()
        return before + sections + embedding_pb2.PushRequest(contribution=self.contribution).SerializeToString()

    def _message(self, head: bytes, start: int, stop: int) -> bytes:
        num_id_bytes = self.row_ids.num_bytes
        with self.row_ids.lock, self.rows.lock:
            payloads = self.row_ids.pieces(start, stop), self.rows.pieces(start - num_id_bytes, stop - num_id_bytes)
            sizes = [sum(piece.nbytes for piece in payload) for payload in payloads]
            prefixes = iter(wire.frame(_PUSH, head, sizes).prefixes)
            message: list[bytes | memoryview] = []
            for payload in payloads:
                if payload:
                    message += (next(prefixes), *payload)
            return b"".join(message or prefixes)

    def keep_copy(self) -> None:
        """Lets go of the arrays that were handed in: their owner may write to them again."""
        self.row_ids.keep_copy()
        self.rows.keep_copy()

    def answer(self, response: embedding_pb2.ExchangeResponse) -> embedding_pb2.PushResponse:
        """Returns the answer to a push."""
        return response.push


@dataclasses.dataclass(frozen=True)
class AssignPart:
    """One shard's part of an assign.

    Attributes:
        request: its message without a header.
    """

    request: row_pb2.AssignRowsRequest

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.request.ByteSize()

    def messages(
        self, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes its one message, which no chunk is too small for."""
        message = embedding_pb2.ExchangeRequest(assign_rows=self.request)
        message.assign_rows.header.CopyFrom(header)
        yield message

    def keep_copy(self) -> None:
        """Does nothing: it holds no array of anybody's."""

    def answer(self, response: embedding_pb2.ExchangeResponse) -> row_pb2.AssignRowsResponse:
        """Returns the answer to an assign."""
        return response.assign_rows


@dataclasses.dataclass(frozen=True)
class DeletePart:
    """One shard's part of a delete.

    Attributes:
        request: its message without a header.
    """

    request: row_pb2.DeleteRowsRequest

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.request.ByteSize()

    def messages(
        self, header: common_pb2.RequestHeader, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes its one message, which no chunk is too small for."""
        message = embedding_pb2.ExchangeRequest(delete_rows=self.request)
        message.delete_rows.header.CopyFrom(header)
        yield message

    def keep_copy(self) -> None:
        """Does nothing: it holds no array of anybody's."""

    def answer(self, response: embedding_pb2.ExchangeResponse) -> row_pb2.DeleteRowsResponse:
        """Returns the answer to a delete."""
        return response.delete_rows
