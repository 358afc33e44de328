"""The codec beside protobuf: for any bytes, what it takes apart is what protobuf reads."""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from shardam._answers import Piece, read_answer
from shardam_proto import wire
from shardam_proto.v1 import embedding_pb2


def check_reading(data: bytes, envelope_type: type[Message]) -> bool:
    """Compares the two readings of an ExchangeRequest or ExchangeResponse.

    Returns:
        Whether the codec read it, rather than leaving it to protobuf.

    Raises:
        AssertionError: it reads another message, or one where there is none.
    """
    found = read(data, envelope_type)
    if found is None:
        return False
    try:
        whole = envelope_type.FromString(data)
    except DecodeError as error:
        raise AssertionError(f"the codec reads {found}, protobuf nothing: {error}") from error
    kind, request_id, message = found
    assert whole.WhichOneof(whole.DESCRIPTOR.oneofs[0].name) == kind
    assert getattr(whole, "request_id", 0) == request_id
    expected = getattr(whole, kind)
    expected.ClearField("padding")
    assert message.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    return True


def check_answer(data: bytes) -> bool:
    """Compares how clients read an ExchangeResponse with protobuf.

    Returns:
        Whether there is one.

    Raises:
        AssertionError: they read another one, or one where there is none.
    """
    try:
        whole = embedding_pb2.ExchangeResponse.FromString(data)
    except DecodeError:
        whole = None
    try:
        answer = read_answer(data)
    except DecodeError:
        answer = None
    if whole is None or answer is None:
        assert whole is answer, "one of both reads an answer"
        return False
    assert answer.request_id == whole.request_id
    kind = whole.WhichOneof("response")
    if not isinstance(answer, Piece):
        assert kind not in ("pull", "pull_changed")
        assert answer == whole
        return True
    expected = getattr(whole, kind or "")
    assert bytes(answer.rows) == expected.rows
    assert bytes(answer.positions) == getattr(expected, "positions", b"")
    assert (answer.head.header, list(answer.head.sections)) == (expected.header, list(expected.sections))
    return True


def read(data: bytes, envelope_type: type[Message]) -> tuple[str, int, Message] | None:
    """Reads a message that carries rows as a shard or a client does; None: it is left to protobuf."""
    envelope = wire.open_envelope(data)
    if envelope is None or (envelope.request_id and "request_id" not in envelope_type.DESCRIPTOR.fields_by_name):
        return None
    field = envelope_type.DESCRIPTOR.fields_by_number.get(envelope.kind)
    if field is None or field.message_type is None or "padding" not in field.message_type.fields_by_name:
        return None
    split = wire.split(data, envelope.start, envelope.end)
    if split is None:
        return None
    inner: type[Message] = getattr(embedding_pb2, field.message_type.name)
    try:
        message = inner.FromString(split.head)
    except DecodeError:
        return None  # it is protobuf's to say so of the whole
    for number, payload in zip(wire.PAYLOAD_FIELDS, (split.first, split.second), strict=True):
        own = inner.DESCRIPTOR.fields_by_number.get(number)
        if own is None:
            unknown = wire.varint(number << 3 | 2) + wire.varint(len(payload)) + bytes(payload)
            message.MergeFromString(unknown if payload else b"")
        elif payload:
            setattr(message, own.name, bytes(payload))
    return field.name, envelope.request_id, message
