"""Parts that arrive in chunks: their memory is reserved whole, filled in order, and freed with their stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from shardam_proto.errors import BadOption, MessageTooLarge, OutOfMemory, QueueFull, ShardamError, ShardUnreachable, WrongShape
from shardam_proto.v1 import embedding_pb2

MAX_RESERVED_BYTES = 512 * 2**20
"""Bytes reserved by default: twice the apply queue, since a part moves there when it is whole."""

RETRY_AFTER_S = 0.5
"""A part of some 100 MB arrives in about this time and then leaves its reservation."""


@dataclasses.dataclass(frozen=True)
class PartSizes:
    """What a part's sections need.

    Attributes:
        row_ids_bytes: bytes of its ids.
        rows_bytes: bytes of its gradients.
    """

    row_ids_bytes: int
    rows_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.row_ids_bytes + self.rows_bytes


Buffer = bytes | memoryview
"""Bytes of a message, or of a part that was put together from chunks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a part.

    Attributes:
        head: its message; ids and gradients in it are not looked at.
        row_ids: the next bytes of the part's ids.
        rows: the next bytes of its gradients.
    """

    head: embedding_pb2.PushRequest
    row_ids: Buffer
    rows: Buffer


class ChunkedPart:
    """A part on its way: one buffer, ids first, then gradients.

    Args:
        first: chunk 0; all but its ids and gradients is kept.
        sizes: what its sections need.
        refuse: called with the reason when another stream of the same client takes its place.
        arrived: when chunk 0 came, by time.perf_counter().

    Attributes:
        head: header, options, sections and contribution.
        sizes: what its sections need.
        refuse: ends it.
        arrived: when chunk 0 came.
    """

    def __init__(
        self, first: embedding_pb2.PushRequest, sizes: PartSizes, refuse: Callable[[ShardamError], None], arrived: float
    ) -> None:
        # A message of its own: parts of a message keep all of it alive.
        self.head = embedding_pb2.PushRequest(
            header=first.header, options=first.options, sections=first.sections, contribution=first.contribution
        )
        self.sizes = sizes
        self.refuse = refuse
        self.arrived = arrived
        self._buffer = np.empty(sizes.total_bytes, np.uint8)
        self._filled = 0
        self._next_chunk = 0

    @property
    def row_ids(self) -> memoryview:
        """The ids' bytes."""
        return self._buffer.data[: self.sizes.row_ids_bytes]

    @property
    def rows(self) -> memoryview:
        """The gradients' bytes."""
        return self._buffer.data[self.sizes.row_ids_bytes :]

    def add(self, chunk: Chunk) -> bool:
        """Appends the next chunk; returns whether the part is whole.

        Raises:
            BadOption: it is not the part's next chunk, or repeats what only chunk 0 has.
            WrongShape: its bytes do not fit the part.
        """
        self._check_place(chunk.head)
        self._next_chunk += 1
        self._append(chunk.row_ids, self.sizes.row_ids_bytes, "row_ids")
        if chunk.rows and self._filled < self.sizes.row_ids_bytes:
            raise WrongShape(
                f"chunk {chunk.head.header.chunk_index} has bytes of rows before the last of row_ids; {self._filled} of "
                f"{self.sizes.row_ids_bytes} bytes of row_ids have come"
            )
        self._append(chunk.rows, self.sizes.total_bytes, "rows")
        whole = self._next_chunk == self.head.header.num_chunks
        if whole and self._filled != self.sizes.total_bytes:
            raise WrongShape(f"the part's chunks have {self._filled} bytes, its sections need {self.sizes.total_bytes}")
        return whole

    def _check_place(self, chunk: embedding_pb2.PushRequest) -> None:
        header, own = chunk.header, self.head.header
        place = f"chunk {header.chunk_index} of {header.num_chunks}"
        if (header.chunk_index, header.num_chunks) != (self._next_chunk, own.num_chunks):
            raise BadOption(
                f"{place} came where chunk {self._next_chunk} of {own.num_chunks} belongs; send the part again from chunk 0"
            )
        if (header.client_id, header.number) != (own.client_id, own.number):
            raise BadOption(
                f"{place} is of client {header.client_id.hex()}, number {header.number}; the part is of client "
                f"{own.client_id.hex()}, number {own.number}; send the part again from chunk 0"
            )
        if header.chunk_index and (chunk.options or chunk.sections or chunk.total_bytes):
            raise BadOption(f"{place} has options, sections or total_bytes; they belong in chunk 0 alone")

    def _append(self, data: Buffer, end: int, what: str) -> None:
        if self._filled + len(data) > end and data:
            raise WrongShape(
                f"{what} of the part has {self._filled + len(data) - end} bytes more than its sections need; send it again"
            )
        self._buffer[self._filled : self._filled + len(data)] = np.frombuffer(data, np.uint8)
        self._filled += len(data)


class OpenParts:
    """All parts that are arriving in chunks: one a client, and together within a bound of bytes. Used on the event loop.

    Args:
        max_reserved_bytes: what they may hold together.

    Attributes:
        reserved_bytes: what they hold.
    """

    def __init__(self, max_reserved_bytes: int = MAX_RESERVED_BYTES) -> None:
        self._max_reserved_bytes = max_reserved_bytes
        self._parts: dict[bytes, ChunkedPart] = {}
        self.reserved_bytes = 0

    def open(
        self, first: embedding_pb2.PushRequest, sizes: PartSizes, refuse: Callable[[ShardamError], None], arrived: float
    ) -> ChunkedPart:
        """Reserves a part's memory; its chunk 0 is not in it yet. A part of the same client on another stream is refused:
        that stream has ended, though the shard may not know it yet.

        Args:
            first: chunk 0.
            sizes: what its sections need.
            refuse: called with the reason when another stream takes its place.
            arrived: when chunk 0 came, by time.perf_counter().

        Raises:
            MessageTooLarge: it would never fit.
            QueueFull: it does not fit now; the metadata says after how many seconds to try again.
            OutOfMemory: the machine has none.
        """
        client_id, total = first.header.client_id, sizes.total_bytes
        former = self._parts.get(client_id)
        if former is not None:
            former.refuse(
                ShardUnreachable(
                    "another stream of this client began a part in chunks; send this one again there: a client has one stream "
                    "per shard"
                )
            )
        if total > self._max_reserved_bytes:
            raise MessageTooLarge(
                f"the part has {total} bytes, the shard reserves at most {self._max_reserved_bytes} for parts in chunks; push "
                "fewer rows at once, or start the shard with a larger --max-reserved-mib",
                metadata={"size_bytes": str(total), "max_bytes": str(self._max_reserved_bytes)},
            )
        if self.reserved_bytes + total > self._max_reserved_bytes:
            raise QueueFull(
                f"parts in chunks have reserved {self.reserved_bytes} bytes, {total} more would be above the limit of "
                f"{self._max_reserved_bytes}; try again, or start the shard with a larger --max-reserved-mib",
                metadata={"retry_after_s": str(RETRY_AFTER_S), "reserved_bytes": str(self.reserved_bytes)},
            )
        try:
            part = ChunkedPart(first, sizes, refuse, arrived)
        except MemoryError as error:
            raise OutOfMemory(f"the shard has no memory for a part of {total} bytes; push fewer rows at once") from error
        self._parts[client_id] = part
        self.reserved_bytes += total
        return part

    def close(self, part: ChunkedPart) -> None:
        """Gives a part's reservation back; what is closed already is passed over."""
        client_id = part.head.header.client_id
        if self._parts.get(client_id) is part:
            del self._parts[client_id]
            self.reserved_bytes -= part.sizes.total_bytes
