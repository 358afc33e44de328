"""Messages that carry rows: what `frame` lays out is valid protobuf, and `split` finds the same in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto import wire
from shardam_proto.v1 import common_pb2, embedding_pb2

PUSH = embedding_pb2.ExchangeRequest.DESCRIPTOR.fields_by_name["push"].number
PULL_ANSWER = embedding_pb2.ExchangeResponse.DESCRIPTOR.fields_by_name["pull"].number


def push_head(num_sections: int = 1) -> embedding_pb2.PushRequest:
    sections = [common_pb2.Section(table_id=2**62 + index, num_rows=index) for index in range(num_sections)]
    header = common_pb2.RequestHeader(client_id=b"c" * 16, number=300, request_id=7, budget_s=1.5)
    return embedding_pb2.PushRequest(header=header, sections=sections, total_bytes=2**40)


def assemble(frame: wire.Frame, *payloads: bytes) -> bytes:
    filled = [payload for payload in payloads if payload] or [b""]
    return b"".join(piece for pair in zip(frame.prefixes, filled, strict=True) for piece in pair)


@given(st.integers(0, 40), st.binary(max_size=600), st.binary(max_size=600))
def test_a_framed_push_is_what_protobuf_reads_and_split_finds(num_sections: int, row_ids: bytes, rows: bytes) -> None:
    head = push_head(num_sections)
    frame = wire.frame(PUSH, head.SerializeToString(), (len(row_ids), len(rows)))
    data = assemble(frame, row_ids, rows)
    assert len(data) == frame.num_bytes
    parsed = embedding_pb2.ExchangeRequest.FromString(data).push
    assert (parsed.row_ids, parsed.rows) == (row_ids, rows)
    parsed.ClearField("padding")
    parsed.ClearField("row_ids")
    parsed.ClearField("rows")
    assert parsed == head
    envelope = wire.open_envelope(data)
    assert envelope is not None
    assert (envelope.kind, envelope.request_id) == (PUSH, 0)
    split = wire.split(data, envelope.start, envelope.end)
    assert split is not None
    assert (embedding_pb2.PushRequest.FromString(split.head), bytes(split.first), bytes(split.second)) == (head, row_ids, rows)


@pytest.mark.parametrize("request_id", [1, 127, 128, 2**63])
def test_an_answer_carries_its_request_id_before_the_message(request_id: int) -> None:
    head = embedding_pb2.PullResponse(header=common_pb2.ResponseHeader(shard=3, change_number=9))
    data = assemble(wire.frame(PULL_ANSWER, head.SerializeToString(), (0, 8), request_id=request_id), b"", b"12345678")
    answer = embedding_pb2.ExchangeResponse.FromString(data)
    assert (answer.request_id, answer.pull.header, answer.pull.rows) == (request_id, head.header, b"12345678")
    envelope = wire.open_envelope(data)
    assert envelope is not None
    assert (envelope.kind, envelope.request_id) == (PULL_ANSWER, request_id)


def test_payloads_lie_aligned() -> None:
    for num_sections in range(30):
        head = push_head(num_sections).SerializeToString()
        data = assemble(wire.frame(PUSH, head, (24, 40)), bytes(24), bytes(40))
        envelope = wire.open_envelope(data)
        assert envelope is not None
        split = wire.split(data, envelope.start, envelope.end)
        assert split is not None
        for payload in (split.first, split.second):
            assert np.frombuffer(payload, np.uint8).ctypes.data % wire.ALIGNMENT == 0


def test_what_protobuf_itself_writes_is_split_alike_and_other_orders_are_left_to_protobuf() -> None:
    message = push_head()
    message.row_ids, message.rows = b"i" * 8, b"r" * 16
    data = embedding_pb2.ExchangeRequest(push=message).SerializeToString()
    envelope = wire.open_envelope(data)
    assert envelope is not None
    split = wire.split(data, envelope.start, envelope.end)
    assert split is not None
    assert (bytes(split.first), bytes(split.second)) == (b"i" * 8, b"r" * 16)
    rows_first = embedding_pb2.PushRequest(rows=b"r").SerializeToString() + push_head().SerializeToString()
    assert wire.split(rows_first, 0, len(rows_first)) is None
    twice = embedding_pb2.PushRequest(rows=b"r").SerializeToString() * 2
    assert wire.split(twice, 0, len(twice)) is None
    assert wire.open_envelope(data + data) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_split_or_left_to_protobuf(data: bytes) -> None:
    envelope = wire.open_envelope(data)
    if envelope is not None:
        assert envelope.start <= envelope.end == len(data)
    found = wire.split(data, 0, len(data))
    if found is not None:
        assert len(found.head) + len(found.first) + len(found.second) <= len(data)


@given(st.data())
def test_a_message_cut_anywhere_is_no_other_message(data: st.DataObject) -> None:
    whole = assemble(wire.frame(PUSH, push_head(3).SerializeToString(), (16, 32)), b"i" * 16, b"r" * 32)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    assert wire.open_envelope(cut) is None
