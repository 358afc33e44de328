"""Which rows of a read which message to which shard asks for, and where they go when they come.

A table's rows are kept in the order of the shards that own them, so that each message asks for a range of them and each answer
is bytes that lie behind one another; where the ids were not in that order, the rows are brought back to it at the end. What
travels is little-endian, as the hosts are (DESIGN.md, section 6).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardam._answers import Piece
from shardam._arrays import Float32s, Int64s
from shardam._link import ShardLink
from shardam._shards import Shards
from shardam._split import HEADER_BYTES
from shardam._values import TableInfo
from shardam_kernels import native
from shardam_proto import wire
from shardam_proto.errors import ShardUnreachable
from shardam_proto.v1 import common_pb2, embedding_pb2

SECTION_BYTES = 64
"""Room for one section and its table's step in a message, rounded up."""

ID_BYTES = 8

FLOAT_BYTES = 4

Wanted = Sequence[tuple[TableInfo, Int64s]]
"""Tables and ids, int64 [N], duplicates allowed."""


class TableRead:
    """One table's rows of a read.

    Args:
        info: the table.
        row_ids: int64 [N].
        num_shards: shards that may own them.

    Attributes:
        row_ids: int64 [N], those of shard 0 first.
        order: int64 [N], where each of them was; None: there.
        ends: behind each shard's last one.
        dim: elements of a row.
        row_bytes: bytes of a row.
        num_spans: messages that ask for some of them.
    """

    def __init__(self, info: TableInfo, row_ids: Int64s, num_shards: int) -> None:
        row_ids = np.ascontiguousarray(row_ids, np.int64)
        self.table_id = info.table_id
        self.order: Int64s | None = None
        self.ends = [row_ids.size]
        if num_shards > 1:
            self.order, ends = native.split_by_shard(row_ids, num_shards)
            self.ends = ends.tolist()
        self.row_ids = row_ids if self.order is None else row_ids[self.order]
        self.dim = info.spec.dim
        self.row_bytes = FLOAT_BYTES * self.dim
        self.num_spans = 0
        self._rows: Float32s | None = None
        self._bytes: npt.NDArray[np.uint8] | None = None

    def hold(self) -> None:
        """Makes the memory into which messages are copied."""
        self._rows = np.empty((self.row_ids.size, self.dim), np.float32)
        self._bytes = self._rows.reshape(-1).view(np.uint8)

    def put(self, at: int, received: memoryview) -> None:
        """Takes the next bytes of one of its messages; all rows at once are not copied.

        Args:
            at: where they belong, in bytes.
            received: they; nobody else's.
        """
        if self.num_spans == 1 and len(received) == self.row_ids.size * self.row_bytes:
            values = np.frombuffer(received, np.float32)
            if values.flags.aligned:
                self._rows, self._bytes = native.writable(values).reshape(-1, self.dim), None
                return
        if self._bytes is None:
            self.hold()
        held = self._bytes
        if held is not None:
            held[at : at + len(received)] = np.frombuffer(received, np.uint8)

    def result(self) -> Float32s:
        """Returns float32 [N, dim] as the ids were asked for, writable, once all rows have come."""
        if self._rows is None:
            self.hold()
        rows = self._rows
        if rows is None or self.order is None:
            return np.empty((0, 0), np.float32) if rows is None else rows
        result = np.empty_like(rows)
        result[self.order] = rows
        return result


class Span(NamedTuple):
    """A range of a table's rows, in the order of shards.

    Attributes:
        table: the table.
        start: the first row.
        end: behind the last row.
    """

    table: TableRead
    start: int
    end: int


@dataclasses.dataclass
class ShardRead:
    """What one message asks of a shard.

    Attributes:
        link: the shard.
        spans: the rows, in their order.
        num_bytes: bytes of the message or of its answer, whatever is more.
    """

    link: ShardLink
    spans: list[Span] = dataclasses.field(default_factory=list)
    num_bytes: int = HEADER_BYTES

    @property
    def num_rows(self) -> int:
        """Rows that it asks for."""
        return sum(span.end - span.start for span in self.spans)

    def sections(self) -> list[common_pb2.Section]:
        """Returns the sections of the message."""
        return [
            common_pb2.Section(table_id=span.table.table_id, num_rows=span.end - span.start, dtype=common_pb2.DTYPE_FLOAT32)
            for span in self.spans
        ]

    def message(self, kind: int, head: bytes) -> bytes:
        """Returns the message with its ids.

        Args:
            kind: number of its field in ExchangeRequest.
            head: its small fields, encoded.
        """
        frame = wire.frame(kind, head, (ID_BYTES * self.num_rows, 0))
        ids = [span.table.row_ids[span.start : span.end].data for span in self.spans]
        return b"".join((frame.prefixes[0], *ids))


def plan_reads(shards: Shards, tables: Sequence[TableRead], max_bytes: int) -> list[ShardRead]:
    """Fills messages shard by shard so that neither a request nor its answer is above max_bytes."""
    reads = []
    for link in shards.links:
        current = ShardRead(link)
        for table in tables:
            start, end = table.ends[link.index - 1] if link.index else 0, table.ends[link.index]
            row_bytes = max(ID_BYTES, table.row_bytes)
            while start < end:
                room = (max_bytes - current.num_bytes - SECTION_BYTES) // row_bytes
                if room <= 0:
                    reads.append(current)
                    current = ShardRead(link)
                    continue
                count = min(room, end - start)
                current.spans.append(Span(table, start, start + count))
                current.num_bytes += SECTION_BYTES + row_bytes * count
                table.num_spans += 1
                start += count
        if current.spans:
            reads.append(current)
    for table in tables:
        if table.num_spans > 1:
            table.hold()
    return reads


class PullQuestion:
    """Asks for weights, and puts them where they belong as they come; see _calls.Question.

    Args:
        read: the rows.
        chunk_bytes: bytes of rows in one message of the answer at most.
    """

    def __init__(self, read: ShardRead, chunk_bytes: int) -> None:
        self._read = read
        self._fields = embedding_pb2.PullRequest(sections=read.sections(), chunk_bytes=chunk_bytes).SerializeToString()
        self._index = self._at = 0

    def message(self, header: bytes) -> bytes:
        """Returns the request."""
        return self._read.message(embedding_pb2.ExchangeRequest.PULL_FIELD_NUMBER, header + self._fields)

    def begin(self) -> None:
        """Begins with the first row again."""
        self._index = self._at = 0

    def take(self, piece: Piece) -> None:
        """Puts the next bytes of rows where they belong."""
        rows, spans = piece.rows, self._read.spans
        start, num_bytes = 0, len(rows)
        while start < num_bytes and self._index < len(spans):
            table, first, end = spans[self._index]
            size = (end - first) * table.row_bytes
            stop = min(num_bytes, start + size - self._at)
            table.put(first * table.row_bytes + self._at, rows[start:stop])
            self._at += stop - start
            start = stop
            if self._at == size:
                self._index, self._at = self._index + 1, 0
        if start < num_bytes or (piece.is_last and self._index < len(spans)):
            expected = sum((end - first) * table.row_bytes for table, first, end in spans)
            raise ShardUnreachable(
                f"an answer has {'more' if start < num_bytes else 'fewer'} bytes of rows than {expected}, which was asked for"
            )
