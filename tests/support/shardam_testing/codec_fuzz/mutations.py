"""What becomes of an encoded message on its way: flipped bits, cuts, lengths changed, fields repeated, moved and unknown."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from shardam_proto.wire import varint

BYTE_HOWS = ("flip", "cut", "drop", "insert", "repeat", "byte")
"""What a mutation does to bytes."""

FIELD_HOWS = ("repeat field", "move field", "drop field", "unknown field", "long length")
"""What a mutation does to fields, so that a message stays one."""

_WIDTHS = {1: 8, 5: 4}
"""Bytes of the wire types of a fixed width."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of a message's bytes.

    Attributes:
        how: one of BYTE_HOWS or FIELD_HOWS.
        place: where, taken modulo what there is.
        size: how much, or to where.
        data: what is put in.
        inside: fields of the request's message rather than of the envelope around it.
    """

    how: str
    place: int
    size: int
    data: bytes
    inside: bool


MUTATIONS = st.builds(
    Mutation,
    how=st.sampled_from(BYTE_HOWS + FIELD_HOWS),
    place=st.integers(0, 2**12),
    size=st.integers(0, 64),
    data=st.binary(min_size=1, max_size=12),
    inside=st.booleans(),
)


def fields_of(data: bytes) -> list[bytes] | None:
    """Takes a message apart into its fields, each with its tag; None: it is none."""
    fields, at = [], 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type == 2:
            length, at = _varint(data, at)
            at += length
        elif wire_type in _WIDTHS:
            at += _WIDTHS[wire_type]
        else:
            return None
        if at > len(data):
            return None
        fields.append(data[start:at])
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a varint and the place behind it; one that has no end reads as larger than any message."""
    value, place = 0, 0
    while at < len(data) and place < 10:
        value |= (data[at] & 0x7F) << 7 * place
        place, at = place + 1, at + 1
        if data[at - 1] < 0x80:
            return value, at
    return 2**70, at


def mutate(data: bytes, mutation: Mutation) -> bytes:
    """Returns the changed message."""
    if mutation.how in FIELD_HOWS:
        return _mutate_fields(data, mutation)
    at = mutation.place % (len(data) + 1)
    match mutation.how:
        case "flip" if data:
            at = mutation.place % len(data)
            return data[:at] + bytes([data[at] ^ 1 << mutation.size % 8]) + data[at + 1 :]
        case "byte" if data:
            at = mutation.place % len(data)
            return data[:at] + mutation.data[:1] + data[at + 1 :]
        case "cut":
            return data[:at]
        case "drop":
            return data[:at] + data[at + mutation.size :]
        case "insert":
            return data[:at] + mutation.data + data[at:]
        case "repeat":
            return data[: at + mutation.size] + data[at:]
        case _:
            return data


def _mutate_fields(data: bytes, mutation: Mutation) -> bytes:
    """Changes a message field by field, so that it stays one; what is none already is left as it is."""
    outer = fields_of(data)
    if not outer:
        return data
    place = max(range(len(outer)), key=lambda index: len(outer[index]))
    tag, begin = _varint(outer[place], 0)
    if not mutation.inside or tag & 7 != 2:
        return b"".join(_changed(outer, mutation))
    _, begin = _varint(outer[place], begin)
    inner = fields_of(outer[place][begin:])
    if inner is None:
        return data
    content = b"".join(_changed(inner, mutation))
    outer[place] = varint(tag) + varint(len(content)) + content
    return b"".join(outer)


def _changed(fields: list[bytes], mutation: Mutation) -> list[bytes]:
    at = mutation.place % max(1, len(fields))
    to = mutation.size % (len(fields) + 1)
    match mutation.how:
        case "repeat field" if fields:
            return [*fields[:to], fields[at], *fields[to:]]
        case "move field" if fields:
            rest = fields[:at] + fields[at + 1 :]
            return [*rest[:to], fields[at], *rest[to:]]
        case "drop field":
            return fields[:at] + fields[at + 1 :]
        case "long length" if fields:
            return [*fields[:at], _with_long_length(fields[at], mutation.size % 10), *fields[at + 1 :]]
        case _:
            number = 1 + mutation.size * 37 % 500
            return [*fields[:to], varint(number << 3 | 2) + varint(len(mutation.data)) + mutation.data, *fields[to:]]


def _with_long_length(field: bytes, extra: int) -> bytes:
    """Writes a field's length or value in more bytes than it needs, which stays valid up to a number of bytes."""
    tag, at = _varint(field, 0)
    if tag & 7 not in (0, 2):
        return field
    value, end = _varint(field, at)
    number = bytearray(varint(value))
    for _ in range(extra):
        number[-1] |= 0x80
        number.append(0)
    return varint(tag) + bytes(number) + field[end:]
