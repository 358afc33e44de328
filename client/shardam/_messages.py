"""The parts of changes as they travel on a stream: in one message, or a push's in chunks.

Arrays stay as they are until a message leaves, and only one message at a time is built (embedding.proto has the format).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, row_pb2

CHUNK_BYTES = 2**20
"""Bytes of ids and rows in one message of a push. On a stream the cost of a message of 1 to 2 MiB is small against that of its
bytes; larger ones are no faster, hold up the messages behind them and make a broken connection cost more."""

ArrayT = TypeVar("ArrayT", bound=np.generic)


class Payload(Generic[ArrayT]):
    """Arrays behind one another, as little-endian bytes.

    Args:
        arrays: the arrays; nobody writes to them any more.

    Attributes:
        arrays: they.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[ArrayT]]) -> None:
        self.arrays = list(arrays)
        little = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays if array.size]
        self._views = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in little]
        self._starts = list(itertools.accumulate((len(view) for view in self._views), initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> bytes:
        """Copies some of the bytes out; positions beyond the ends have none."""
        start, stop = max(0, start), min(stop, self.num_bytes)
        pieces = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[index + 1])
            pieces.append(self._views[index][start - self._starts[index] : end - self._starts[index]])
            start, index = end, index + 1
        return b"".join(pieces)


@dataclasses.dataclass(frozen=True)
class PushPart:
    """One shard's part of a push.

    Attributes:
        options: hyper-parameters that sections refer to.
        sections: the tables that step.
        row_ids: the ids of all sections.
        rows: the gradients of all sections.
        contribution: what it contributes to a step of a sync group.
    """

    options: list[common_pb2.AdamOptions]
    sections: list[common_pb2.Section]
    row_ids: Payload[np.int64]
    rows: Payload[np.float32]
    contribution: group_pb2.ContributionKind.ValueType = group_pb2.CONTRIBUTION_KIND_UNSPECIFIED

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and gradients."""
        return self.row_ids.num_bytes + self.rows.num_bytes

    def messages(self, header: common_pb2.RequestHeader) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes the part's messages: ids, then gradients, cut every CHUNK_BYTES."""
        num_chunks = max(1, -(-self.num_bytes // CHUNK_BYTES))
        for index in range(num_chunks):
            message = embedding_pb2.ExchangeRequest()
            push = message.push
            if num_chunks > 1:
                header.chunk_index, header.num_chunks = index, num_chunks
            push.header.CopyFrom(header)
            if index == 0:
                push.options.extend(self.options)
                push.sections.extend(self.sections)
                push.contribution = self.contribution
                push.total_bytes = self.num_bytes if num_chunks > 1 else 0
            start, stop = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
            push.row_ids = self.row_ids.read(start, stop)
            push.rows = self.rows.read(start - self.row_ids.num_bytes, stop - self.row_ids.num_bytes)
            yield message
            del message, push

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

    def messages(self, header: common_pb2.RequestHeader) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes its one message."""
        message = embedding_pb2.ExchangeRequest(assign_rows=self.request)
        message.assign_rows.header.CopyFrom(header)
        yield message

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

    def messages(self, header: common_pb2.RequestHeader) -> Iterator[embedding_pb2.ExchangeRequest]:
        """Makes its one message."""
        message = embedding_pb2.ExchangeRequest(delete_rows=self.request)
        message.delete_rows.header.CopyFrom(header)
        yield message

    def answer(self, response: embedding_pb2.ExchangeResponse) -> row_pb2.DeleteRowsResponse:
        """Returns the answer to a delete."""
        return response.delete_rows
