"""The digest of a push, by which a repeat is known after any number of restarts: always the same bytes of the same content."""

from __future__ import annotations

import xxhash

from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2
from shardam_server.shard.services.pushes import PushPart

UNKNOWN = bytes([15 << 3, 77])
"""A field that no version of Section has."""


def test_the_digest_is_of_each_message_as_protobuf_encodes_it_then_of_ids_and_gradients() -> None:
    head = embedding_pb2.PushRequest(header=common_pb2.RequestHeader(number=3, request_id=9))
    head.options.add(lr=0.1, grad_scale=2.0)
    head.sections.add(table_id=2**62 + 1, num_rows=2**20, options_index=1, dtype=common_pb2.DTYPE_FLOAT32)
    head.sections.add()
    head.sections.append(common_pb2.Section.FromString(UNKNOWN))
    encoded = [message.SerializeToString(deterministic=True) for message in (*head.options, *head.sections)]
    assert encoded[2:] == [b"", UNKNOWN]
    content = b"".join(each + b"\n" for each in encoded) + b"the ids" + b"the gradients"
    assert PushPart(head, b"the ids", b"the gradients").digest() == b"push" + xxhash.xxh3_128(content).digest()
    head.header.step = 5
    head.contribution = group_pb2.CONTRIBUTION_KIND_GRADIENT
    content = f"5 {head.contribution}\n".encode() + content
    assert PushPart(head, b"the ids", b"the gradients").digest() == b"step" + xxhash.xxh3_128(content).digest()


def test_the_digest_of_one_push_has_the_value_that_journals_have() -> None:
    head = embedding_pb2.PushRequest()
    head.options.add(lr=0.5, grad_scale=1.0)
    head.sections.add(table_id=7, num_rows=1, dtype=common_pb2.DTYPE_FLOAT32)
    assert PushPart(head, bytes(8), bytes(16)).digest().hex() == "70757368b4b7f51b13db43013c60805641d9430f"
