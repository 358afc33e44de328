"""The messages of an Exchange stream that carry rows, without a protobuf object around the rows.

They are valid protobuf (embedding.proto): all small fields first, then the payload fields, each behind padding that brings it
to a multiple of ALIGNMENT bytes from the message's start. The small fields are protobuf's to encode and decode. A message of
another layout is protobuf's as a whole: `split` says so, and whoever reads it then parses it, which costs copies and changes
nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PADDING_FIELD = 13
"""Number of the field `padding` in every message that carries rows."""

PAYLOAD_FIELDS = (14, 15)
"""Numbers of the fields of ids or positions, and of rows, in every message that carries them."""

REQUEST_ID_FIELD = 1
"""Number of ExchangeResponse.request_id; in ExchangeRequest the field of this number is a message."""

ALIGNMENT = 16
"""Bytes: arrays of every dtype lie aligned in a bytes object, whose content begins at a multiple of 16."""

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf's encoding."""

_LENGTH_BYTES = 4
"""The outer message's length has so many bytes, whatever it is: 2**28 is above the largest message, and the offset of what
follows does not depend on it."""

_MAX_VARINT_BYTES = 10

_MAX_LENGTH_BYTES = 5
"""Protobuf reads no length that is written in more, though it were small."""


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """Where the one message inside an ExchangeRequest or ExchangeResponse lies.

    Attributes:
        kind: number of its field.
        start: its first byte.
        end: behind its last byte.
        request_id: of an ExchangeResponse; 0: none.
    """

    kind: int
    start: int
    end: int
    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A message that carries rows, in its parts.

    Attributes:
        head: the small fields, to be parsed as the message they belong to.
        first: content of field 14; empty if it is absent.
        second: content of field 15.
    """

    head: bytes
    first: memoryview
    second: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A message that carries rows, before its payloads are in it.

    Attributes:
        prefixes: what stands before each payload.
        sizes: bytes of each payload.
        head_start: where the small fields begin.
    """

    prefixes: tuple[bytes, ...]
    sizes: tuple[int, ...]
    head_start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole message."""
        return sum(map(len, self.prefixes)) + sum(self.sizes)


def varint(value: int) -> bytes:
    """Encodes an unsigned integer as protobuf does: 7 bits a byte, the low ones first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def frame(kind: int, head: bytes, sizes: Sequence[int], *, request_id: int = 0) -> Frame:
    """Lays a message out.

    Args:
        kind: number of the message's field in ExchangeRequest or ExchangeResponse.
        head: its small fields, encoded.
        sizes: bytes of the content of field 14 and of field 15; an empty one is left out.
        request_id: of an ExchangeResponse; 0: the message is an ExchangeRequest.
    """
    outer = b"" if not request_id else bytes([REQUEST_ID_FIELD << 3 | _VARINT]) + varint(request_id)
    start = len(outer) + 1 + _LENGTH_BYTES
    fields = []
    at = start + len(head)
    for field, size in zip(PAYLOAD_FIELDS, sizes, strict=True):
        if size:
            prefix = _padded(at, field, size)
            fields.append((prefix, size))
            at += len(prefix) + size
    length = fixed_varint(at - start, _LENGTH_BYTES)
    first = outer + bytes([kind << 3 | _LENGTH_DELIMITED]) + length + head
    if not fields:
        return Frame((first,), (0,), start)
    prefixes = [prefix for prefix, _ in fields]
    prefixes[0] = first + prefixes[0]
    return Frame(tuple(prefixes), tuple(size for _, size in fields), start)


def _padded(at: int, field: int, size: int) -> bytes:
    """Returns padding, tag and length of a payload field that begins at byte `at`."""
    tag = bytes([field << 3 | _LENGTH_DELIMITED]) + varint(size)
    padding = -(at + 2 + len(tag)) % ALIGNMENT
    return bytes([PADDING_FIELD << 3 | _LENGTH_DELIMITED, padding]) + bytes(padding) + tag


def fixed_varint(value: int, num_bytes: int) -> bytes:
    """Encodes an unsigned integer in so many bytes, more than it may need; the largest that fits if it is larger."""
    value = min(value, 2 ** (7 * num_bytes) - 1)
    low = [value >> 7 * place & 0x7F | 0x80 for place in range(num_bytes - 1)]
    return bytes([*low, value >> 7 * (num_bytes - 1)])


def open_envelope(data: bytes) -> Envelope | None:
    """Finds the one message inside an ExchangeRequest or ExchangeResponse; None: it is laid out otherwise, or none."""
    at, size, request_id = 0, len(data), 0
    try:
        if size and data[0] == REQUEST_ID_FIELD << 3 | _VARINT:
            request_id, at = _read_varint(data, 1, size)
        tag = data[at]
        length, start = _read_varint(data, at + 1, size, _MAX_LENGTH_BYTES)
    except (IndexError, ValueError):
        return None
    if tag & 7 != _LENGTH_DELIMITED or tag > 0x7F or start + length != size:
        return None
    return Envelope(tag >> 3, start, size, request_id)


def split(data: bytes, start: int, end: int) -> Split | None:
    """Takes a message that carries rows apart; its payloads are views of `data`.

    Args:
        data: what it is part of.
        start: its first byte.
        end: behind its last byte.

    Returns:
        Its parts, or None if it is laid out in another way than `frame` does, or is no message.
    """
    try:
        head_end = _skip_head(data, start, end)
        payloads: dict[int, tuple[int, int]] = {}
        at = head_end
        while at < end:
            tag = data[at]
            length, begin = _read_varint(data, at + 1, end, _MAX_LENGTH_BYTES)
            field, at = tag >> 3, begin + length
            if tag & 0x87 != _LENGTH_DELIMITED or at > end:
                return None
            if field == PADDING_FIELD:
                continue
            if field not in PAYLOAD_FIELDS or (payloads and field <= max(payloads)):
                return None
            payloads[field] = (begin, at)
    except (IndexError, ValueError):
        return None
    view = memoryview(data)
    first, second = (view[slice(*payloads.get(field, (end, end)))] for field in PAYLOAD_FIELDS)
    return Split(data[start:head_end], first, second)


def _skip_head(data: bytes, start: int, end: int) -> int:
    """Returns where padding and payloads begin."""
    at = start
    while at < end:
        tag = data[at]
        if tag > 0x7F:
            raise ValueError("a field number above 15")
        if tag >> 3 >= PADDING_FIELD:
            return at
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length = data[at + 1]
            if length < 0x80:
                at += 2 + length
            else:
                length, at = _read_varint(data, at + 1, end)
                at += length
        elif wire_type == _VARINT:
            _, at = _read_varint(data, at + 1, end)
        elif wire_type == _FIXED64:
            at += 9
        elif wire_type == _FIXED32:
            at += 5
        else:
            raise ValueError("a group")
    if at != end:
        raise ValueError("a field beyond the message")
    return at


def _read_varint(data: bytes, at: int, end: int, max_bytes: int = _MAX_VARINT_BYTES) -> tuple[int, int]:
    """Returns an unsigned integer and the place behind it."""
    value = 0
    for place in range(max_bytes):
        if at >= end:
            break
        byte = data[at]
        value |= (byte & 0x7F) << 7 * place
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("no end of a varint")
