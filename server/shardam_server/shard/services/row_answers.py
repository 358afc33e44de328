"""Answers that carry rows, as messages of a stream: laid out first, so that rows are read straight into what is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_proto import wire
from shardam_proto.errors import BadOption, MessageTooLarge
from shardam_proto.limits import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES, MIN_CHUNK_BYTES
from shardam_proto.v1 import common_pb2
from shardam_server.shard.records import Float32s
from shardam_server.shard.services.decoding import FLOAT_BYTES

_HEADER_TAG = b"\x0a"
"""Field 1, length-delimited: the header of both responses."""

_TIME_TAGS = (b"\x48", b"\x50")
"""Fields 9 and 10 of the header, varints: shard_ns and kernel_ns."""

_TIME_BYTES = 6
"""Bytes of each, whatever it is: the rows behind it are in place before it is known. Up to 2**42 ns, which is over an hour."""

_TIMES_BYTES = len(_TIME_TAGS) * (1 + _TIME_BYTES)

Uint8s = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Heading:
    """What an answer has beside its rows.

    Attributes:
        kind: number of its field in ExchangeResponse.
        header: its header, without times.
        fields: its other small fields, encoded.
        positions: uint32, content of field 14.
    """

    kind: int
    header: common_pb2.ResponseHeader
    fields: bytes
    positions: npt.NDArray[np.uint32] | None = None


class Place(NamedTuple):
    """Where rows of one section belong.

    Attributes:
        section: the section's position.
        start: the first of its rows.
        stop: behind the last.
        out: float32 [stop - start, dim], in the message.
    """

    section: int
    start: int
    stop: int
    out: Float32s


class RowAnswer:
    """An answer as messages of a stream, whose rows are yet to be written.

    Args:
        heading: what it has beside rows.
        shapes: rows and dim of each section.
        chunk_bytes: bytes of rows that one message holds at most, or else one row; zero: one message holds all.

    Attributes:
        messages: what to send, in this order, once rows and times are in.
        places: where they belong.

    Raises:
        MessageTooLarge: it has more bytes than an answer may.
    """

    def __init__(self, heading: Heading, shapes: Sequence[tuple[int, int]], chunk_bytes: int) -> None:
        self.messages: list[bytes] = []
        self.places: list[Place] = []
        self._heading = heading
        self._rows_bytes = rows_bytes(shapes)
        chunks = _chunks(shapes, chunk_bytes or self._rows_bytes)
        for index, chunk in enumerate(chunks):
            num_bytes = rows_bytes([(stop - start, dim) for _, start, stop, dim in chunk])
            values = self._add_message(index, len(chunks), num_bytes).view(np.float32)
            at = 0
            for section, start, stop, dim in chunk:
                end = at + (stop - start) * dim
                self.places.append(Place(section, start, stop, values[at:end].reshape(-1, dim)))
                at = end

    def note_times(self, shard_ns: int, kernel_ns: int) -> None:
        """Writes how long the answer took into its header, without which it is no message."""
        times = zip(_TIME_TAGS, (shard_ns, kernel_ns), strict=True)
        encoded = b"".join(tag + wire.fixed_varint(value, _TIME_BYTES) for tag, value in times)
        self._times[:] = np.frombuffer(encoded, np.uint8)

    def _add_message(self, index: int, num_chunks: int, num_bytes: int) -> Uint8s:
        """Lays the next message out and returns the place of its rows."""
        heading, header = self._heading, self._heading.header
        if num_chunks > 1:
            header.chunk_index, header.num_chunks = index, num_chunks
        encoded = header.SerializeToString()
        if index:
            head = _HEADER_TAG + wire.varint(len(encoded)) + encoded
            frame = wire.frame(heading.kind, head, (0, num_bytes), request_id=header.request_id)
            message, (rows,) = native.new_message(frame.prefixes, frame.sizes)
            self.messages.append(message)
            return rows
        head = _HEADER_TAG + wire.varint(len(encoded) + _TIMES_BYTES) + encoded
        positions = heading.positions
        sizes = (0 if positions is None else positions.nbytes, num_bytes)
        frame = wire.frame(heading.kind, head + bytes(_TIMES_BYTES) + heading.fields, sizes, request_id=header.request_id)
        check_size(frame.num_bytes - num_bytes + self._rows_bytes)
        first, *others = frame.prefixes
        cut = frame.head_start + len(head)
        message, payloads = native.new_message(
            [first[:cut], first[cut + _TIMES_BYTES :], *others], [_TIMES_BYTES, *frame.sizes]
        )
        self.messages.append(message)
        self._times = payloads[0]
        if positions is not None and positions.size:
            payloads[1][:] = positions.astype("<u4", copy=False).view(np.uint8)
        return payloads[-1] if num_bytes else payloads[0][:0]


def rows_bytes(shapes: Iterable[tuple[int, int]]) -> int:
    """Returns the bytes of rows, given how many there are and their dim."""
    return FLOAT_BYTES * sum([num_rows * dim for num_rows, dim in shapes])


def check_size(size_bytes: int) -> None:
    """Refuses an answer that is too large, whatever the number of its messages: all of them are in memory at once.

    Raises:
        MessageTooLarge: it is.
    """
    if size_bytes > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"the answer would have {size_bytes} bytes, a message holds at most {MAX_MESSAGE_BYTES}; pull fewer rows at once",
            metadata={"size_bytes": str(size_bytes), "max_bytes": str(MAX_MESSAGE_BYTES)},
        )


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Refuses sizes of messages that are not served.

    Raises:
        BadOption: it is none of these.
    """
    if chunk_bytes and not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise BadOption(
            f"chunk_bytes must be {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}, or 0 for an answer in one message; got {chunk_bytes}",
            metadata={"chunk_bytes": str(chunk_bytes)},
        )


def _chunks(shapes: Sequence[tuple[int, int]], chunk_bytes: int) -> list[list[tuple[int, int, int, int]]]:
    """Distributes rows over messages, whole, at least one to each but an only one.

    Returns:
        Of each message (section, first row, behind the last row, dim).
    """
    chunk: list[tuple[int, int, int, int]] = []
    chunks = [chunk]
    room = chunk_size = chunk_bytes // FLOAT_BYTES
    for section, (num_rows, dim) in enumerate(shapes):
        start = 0
        while start < num_rows:
            stop = num_rows
            if dim * (stop - start) > room:
                fitting = room // dim
                if fitting <= 0 and chunk:
                    chunk = []
                    chunks.append(chunk)
                    room = chunk_size
                    continue
                stop = start + max(fitting, 1)
            chunk.append((section, start, stop, dim))
            room -= dim * (stop - start)
            start = stop
    return chunks
