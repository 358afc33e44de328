"""Which requests a shard takes as meant for it."""

from __future__ import annotations

import pytest

from shardam_proto.errors import ShardamError, ShardNotReady
from shardam_proto.registry import ClusterEntry
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2
from shardam_server.shard.identity import ShardIdentity, random_63_bits


@pytest.fixture
def identity() -> ShardIdentity:
    identity = ShardIdentity(1, timeline=3)
    identity.cluster = ClusterEntry("abc", 3, 0)
    identity.route_map = RouteMap(epoch=4, num_shards=3)
    return identity


def good_header(identity: ShardIdentity) -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(
        protocol_version=1,
        cluster_id="abc",
        timeline=3,
        epoch=4,
        incarnation=identity.incarnation,
        client_id=b"c" * 16,
        request_id=9,
    )


def test_a_complete_header_and_one_without_optional_fields_pass(identity: ShardIdentity) -> None:
    identity.check(good_header(identity))
    identity.check(common_pb2.RequestHeader(protocol_version=1))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("protocol_version", 0, "VERSION_MISMATCH"),
        ("protocol_version", 99, "VERSION_MISMATCH"),
        ("cluster_id", "other", "WRONG_CLUSTER"),
        ("incarnation", 5, "NEW_INCARNATION"),
        ("timeline", 4, "NOT_READY"),
        ("timeline", 2, "STALE_TIMELINE"),
        ("epoch", 3, "STALE_ROUTE"),
        ("num_chunks", 2, "BAD_OPTION"),
        ("chunk_index", 1, "BAD_OPTION"),
        ("rank", 1, "BAD_OPTION"),
        ("client_id", b"short", "BAD_OPTION"),
    ],
)
def test_each_wrong_field_has_its_reason(identity: ShardIdentity, field: str, value: object, reason: str) -> None:
    header = good_header(identity)
    setattr(header, field, value)
    with pytest.raises(ShardamError) as error:
        identity.check(header)
    assert error.value.reason == reason


def test_a_step_passes_with_and_without_a_rank(identity: ShardIdentity) -> None:
    header = good_header(identity)
    header.step = 7
    identity.check(header)
    header.rank = 3
    identity.check(header)


def test_a_chunk_passes_only_where_the_caller_takes_chunks(identity: ShardIdentity) -> None:
    header = good_header(identity)
    header.chunk_index, header.num_chunks = 1, 2
    identity.check(header, chunks=True)
    with pytest.raises(ShardamError, match="chunk 1 of 2"):
        identity.check(header)


def test_before_it_has_joined_a_shard_is_not_ready() -> None:
    with pytest.raises(ShardNotReady):
        ShardIdentity(0).check(common_pb2.RequestHeader(protocol_version=1, cluster_id="abc"))


def test_random_numbers_are_63_bits_and_never_zero() -> None:
    values = {random_63_bits() for _ in range(1000)}
    assert len(values) == 1000
    assert all(0 < value < 2**63 for value in values)
