"""Which rows have changed since they were read: asked of each shard by the change up to which it was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardam._answers import Piece
from shardam._arrays import Float32s
from shardam._pull_plan import ShardRead, TableRead
from shardam._shards import Shards
from shardam_proto.errors import ShardUnreachable
from shardam_proto.v1 import common_pb2, embedding_pb2


@dataclasses.dataclass(frozen=True)
class ShardVersion:
    """Up to which change of one shard rows were read.

    Attributes:
        epoch: epoch of the route map by which it owns them.
        incarnation: process life that read them; another one may have lost changes, and counted anew.
        lineage: lineage of its state.
        timeline: timeline of its state.
        change_number: changes that it had applied.
    """

    epoch: int
    incarnation: int
    lineage: int
    timeline: int
    change_number: int

    @classmethod
    def of(cls, header: common_pb2.ResponseHeader) -> ShardVersion:
        """Returns the version of an answer."""
        return cls(header.epoch, header.incarnation, header.lineage, header.timeline, header.change_number)

    def same_state(self, other: ShardVersion) -> bool:
        """True: one has become the other by changes that were counted."""
        return dataclasses.replace(self, change_number=other.change_number) == other


Versions = dict[int, ShardVersion]
"""By shard; one of which nothing was read has none."""


def oldest(versions: Sequence[tuple[int, ShardVersion]]) -> Versions:
    """Returns of each shard the version of its oldest answer; one in several lives or states counts as never read.

    Args:
        versions: shard and version of each answer.
    """
    found: Versions = {}
    for shard, version in versions:
        known = found.get(shard, version)
        unknown = dataclasses.replace(version, change_number=0, lineage=0)
        found[shard] = min(known, version, key=lambda each: each.change_number) if known.same_state(version) else unknown
    return found


def are_current(versions: Versions, shards: Shards, reads: Sequence[ShardRead]) -> bool:
    """True: the shards to be asked are, as far as is known, in the states that were read."""
    for read in reads:
        version, link = versions.get(read.link.index), read.link
        if version is None or not version.change_number:
            return False
        now = ShardVersion(shards.epoch, link.incarnation, link.lineage, link.timeline, version.change_number)
        if version != now:
            return False
    return True


class ChangedQuestion:
    """Asks for rows that have changed, and replaces them; see _calls.Question.

    Args:
        read: the rows that were read.
        since: up to which change.
        rows: of each table of the read, float32 [N, dim] as its ids were asked for.
        chunk_bytes: bytes of rows in one message of the answer at most.

    Attributes:
        num_changed: rows that have come.
    """

    def __init__(self, read: ShardRead, since: ShardVersion, rows: dict[TableRead, Float32s], chunk_bytes: int) -> None:
        self.num_changed = 0
        self._read = read
        self._rows = rows
        request = embedding_pb2.PullChangedRequest(chunk_bytes=chunk_bytes, change_number=since.change_number)
        self._fields = read.sections() + request.SerializeToString()
        self._counts: list[int] = []
        self._positions = np.empty(0, np.int64)
        self._pieces: list[memoryview] = []

    def message(self, header: bytes) -> bytes:
        """Returns the request."""
        return self._read.message(embedding_pb2.ExchangeRequest.PULL_CHANGED_FIELD_NUMBER, header + self._fields)

    def begin(self) -> None:
        """Forgets the pieces of another try; rows that it has replaced are replaced again."""
        self.num_changed = 0
        self._pieces = []

    def take(self, piece: Piece) -> None:
        """Keeps a piece; with the last one the rows are replaced."""
        if not self._pieces:
            self._counts = [section.num_rows for section in piece.head.sections]
            self._positions = np.frombuffer(piece.positions, np.uint32).astype(np.int64)
        self._pieces.append(piece.rows)
        if piece.is_last:
            self._replace(b"".join(self._pieces) if len(self._pieces) > 1 else piece.rows)

    def _replace(self, received: bytes | memoryview) -> None:
        self._check(len(received))
        begin = at = first_id = 0
        for span, count in zip(self._read.spans, self._counts, strict=True):
            table, size = span.table, count * span.table.row_bytes
            places = self._positions[begin : begin + count] - first_id + span.start
            if table.order is not None:
                places = table.order[places]
            self._rows[table][places] = np.frombuffer(received[at : at + size], np.float32).reshape(count, table.dim)
            begin, at, first_id = begin + count, at + size, first_id + span.end - span.start
        self.num_changed = begin

    def _check(self, num_bytes: int) -> None:
        spans, counts = self._read.spans, self._counts
        sizes = [span.end - span.start for span in spans]
        fits = len(counts) == len(spans) and sum(counts) == self._positions.size
        fits = fits and bool((np.diff(self._positions) > 0).all())
        fits = fits and num_bytes == sum(count * span.table.row_bytes for span, count in zip(spans, counts, strict=True))
        if fits:  # then each section's positions have to lie in it
            ends = np.searchsorted(self._positions, np.cumsum(sizes))
            fits = np.array_equal(ends, np.cumsum(counts))
        if not fits:
            raise ShardUnreachable(
                f"an answer with {self._positions.size} changed rows in sections of {counts} and {num_bytes} bytes does not "
                f"fit the question, which has sections of {sizes}"
            )
