"""Which rows of a read which message to which shard asks for, and where they go when they come.

A table's rows are kept in the order of the shards that own them, so that each message asks for a range of them and each answer
is bytes that lie behind one another; where the ids were not in that order, the rows are brought back to it at the end. What
travels is little-endian, as the hosts are (DESIGN.md, section 6).
"""

from __future__ import annotations

import dataclasses
import itertools
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
from shardam_proto.sections import SECTIONS_FIELD, section_columns
from shardam_proto.v1 import embedding_pb2

SECTION_BYTES = 64
"""Room for one section and its table's step in a message, rounded up."""

ID_BYTES = 8

FLOAT_BYTES = 4

Uint8s = npt.NDArray[np.uint8]

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
        rows: float32 [N, dim], in the order of row_ids; None: none have come.
    """

    __slots__ = ("dim", "ends", "order", "row_bytes", "row_ids", "rows", "table_id")

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
        self.rows: Float32s | None = None

    def result(self) -> Float32s:
        """Returns float32 [N, dim] as the ids were asked for, writable, once all rows have come."""
        rows = self.rows
        if rows is None:  # no row was asked for
            return np.empty((self.row_ids.size, self.dim), np.float32)
        if self.order is None:
            return rows
        result = np.empty_like(rows)
        result[self.order] = rows
        return result


class RowMemory:
    """The rows of all tables of a read, behind one another, in the order of shards.

    One piece of memory for all: the system hands large ones out in large pages, and messages, which are small ones, can be used
    again as soon as they are copied.

    Args:
        tables: the tables.
    """

    def __init__(self, tables: Sequence[TableRead]) -> None:
        self._tables = tables
        self._bytes: Uint8s | None = None

    def hold(self) -> Uint8s:
        """Returns the memory into which messages are copied."""
        if self._bytes is None:
            values = np.empty(sum([table.row_ids.size * table.dim for table in self._tables]), np.float32)
            self._share(values)
            self._bytes = values.view(np.uint8)
        return self._bytes

    def keep(self, received: Uint8s) -> None:
        """Takes the rows of all tables as they lie, without a copy, if they lie where floats may.

        Args:
            received: they; nobody else's.
        """
        values = received.view(np.float32)
        if values.flags.aligned:
            self._share(native.writable(values))
            self._bytes = None
        else:
            self.hold()[:] = received

    def _share(self, values: Float32s) -> None:
        start = 0
        for table in self._tables:
            end = start + table.row_ids.size * table.dim
            table.rows = values[start:end].reshape(-1, table.dim)
            start = end


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
        memory: where the rows belong.
        places: there, in bytes: where the next rows of the answer begin, and where they end.
        is_whole: it asks for all rows of the read.
    """

    link: ShardLink
    spans: list[Span] = dataclasses.field(default_factory=list)
    num_bytes: int = HEADER_BYTES
    memory: RowMemory = dataclasses.field(default_factory=lambda: RowMemory([]))
    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    is_whole: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that it asks for."""
        return sum([end - start for _, start, end in self.spans])

    def sections(self) -> bytes:
        """Returns the sections of the message, encoded."""
        num_rows = [end - start for _, start, end in self.spans]
        return native.encode_messages(SECTIONS_FIELD, section_columns([table.table_id for table, _, _ in self.spans], num_rows))

    def message(self, kind: int, head: bytes) -> bytes:
        """Returns the message with its ids.

        Args:
            kind: number of its field in ExchangeRequest.
            head: its small fields, encoded.
        """
        frame = wire.frame(kind, head, (ID_BYTES * self.num_rows, 0))
        ids = [(table.row_ids if self.is_whole else table.row_ids[start:end]).data for table, start, end in self.spans]
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
                start += count
        if current.spans:
            reads.append(current)
    _place(tables, reads)
    return reads


def _place(tables: Sequence[TableRead], reads: Sequence[ShardRead]) -> None:
    """Says of each read where its rows belong."""
    memory = RowMemory(tables)
    sizes = [table.row_ids.size * table.row_bytes for table in tables]
    if len(reads) == 1:
        reads[0].memory, reads[0].places, reads[0].is_whole = memory, [(0, sum(sizes))], True
        return
    starts = dict(zip(tables, itertools.accumulate(sizes, initial=0), strict=False))
    for read in reads:
        read.memory = memory
        read.places = [
            (starts[table] + start * table.row_bytes, starts[table] + end * table.row_bytes) for table, start, end in read.spans
        ]
    if reads:
        memory.hold()  # before answers come, side by side


class PullQuestion:
    """Asks for weights, and puts them where they belong as they come; see _calls.Question.

    Args:
        read: the rows.
        chunk_bytes: bytes of rows in one message of the answer at most.
    """

    def __init__(self, read: ShardRead, chunk_bytes: int) -> None:
        self._read = read
        self._fields = read.sections() + embedding_pb2.PullRequest(chunk_bytes=chunk_bytes).SerializeToString()
        self._index = self._at = 0

    def message(self, header: bytes) -> bytes:
        """Returns the request."""
        return self._read.message(embedding_pb2.ExchangeRequest.PULL_FIELD_NUMBER, header + self._fields)

    def begin(self) -> None:
        """Begins with the first row again."""
        self._index = self._at = 0

    def take(self, piece: Piece) -> None:
        """Puts the next bytes of rows where they belong; all of a read at once stay where they are."""
        received, places, memory = np.frombuffer(piece.rows, np.uint8), self._read.places, self._read.memory
        start, num_bytes = 0, received.size
        if self._read.is_whole and self._index == self._at == 0 and places[0] == (0, num_bytes):
            memory.keep(received)
            self._index, start = len(places), num_bytes
        while start < num_bytes and self._index < len(places):
            begin, end = places[self._index]
            stop = min(num_bytes, start + end - begin - self._at)
            at = begin + self._at
            memory.hold()[at : at + stop - start] = received[start:stop]
            self._at += stop - start
            start = stop
            if begin + self._at == end:
                self._index, self._at = self._index + 1, 0
        if start < num_bytes or (piece.is_last and self._index < len(places)):
            expected = sum(end - begin for begin, end in places)
            raise ShardUnreachable(
                f"an answer has {'more' if start < num_bytes else 'fewer'} bytes of rows than {expected}, which was asked for"
            )
