"""Messages of the Exchange stream that no client of ours sends: each is answered or refused, and none stops a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest
from shardam_testing.codec_fuzz.byte_stream import ByteStream, byte_stream
from shardam_testing.codec_fuzz.messages import lay_out
from shardam_testing.codec_fuzz.runs import run_shards
from shardam_testing.held_shard import HeldShard
from shardam_testing.raw_client import RawClient, id_bytes

from shardam_proto.v1 import common_pb2, embedding_pb2

NUM_EXAMPLES = 100
"""Streams of up to four messages; `make fuzz` has more."""


@pytest.fixture
def stream(client: RawClient) -> Iterator[ByteStream]:
    with byte_stream(client.channel) as stream:
        yield stream


def test_broken_messages_are_answered_as_protobuf_reads_them_and_refused_ones_change_nothing() -> None:
    counts = run_shards(NUM_EXAMPLES, seed=0)
    assert counts["messages"] > NUM_EXAMPLES
    assert NUM_EXAMPLES // 2 < counts["refused"] < counts["messages"] - counts["ended"]
    assert counts["ended"] > NUM_EXAMPLES // 20


def test_a_mistake_of_the_shard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("beyond the payload")

    monkeypatch.setattr("shardam_server.shard.services.pulls.decode_sections", fail)
    with pytest.raises(AssertionError):
        run_shards(NUM_EXAMPLES, seed=0, shrink=False)


def pull(client: RawClient, table: common_pb2.TableInfo) -> embedding_pb2.ExchangeRequest:
    section = common_pb2.Section(table_id=table.table_id, num_rows=2, dtype=common_pb2.DTYPE_FLOAT32)
    message = embedding_pb2.PullRequest(header=client.header(), sections=[section], row_ids=id_bytes([1, 2]))
    return embedding_pb2.ExchangeRequest(pull=message)


def push(client: RawClient, table: common_pb2.TableInfo) -> embedding_pb2.ExchangeRequest:
    return embedding_pb2.ExchangeRequest(push=client.push_request(1, table, [1, 2], [[1, 1], [1, 1]]))


def more_rows(body: embedding_pb2.PullRequest | embedding_pb2.PushRequest) -> None:
    body.sections[0].num_rows += 1


def most_rows(body: embedding_pb2.PullRequest | embedding_pb2.PushRequest) -> None:
    body.sections[0].num_rows = 2**64 - 1


def second_section(body: embedding_pb2.PullRequest | embedding_pb2.PushRequest) -> None:
    body.sections.add().CopyFrom(body.sections[0])


def half_an_id(body: embedding_pb2.PullRequest | embedding_pb2.PushRequest) -> None:
    body.row_ids = body.row_ids[:-4]


def newer_version(body: embedding_pb2.PullRequest | embedding_pb2.PushRequest) -> None:
    body.header.protocol_version = 77


@pytest.mark.parametrize("make", [pull, push])
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (more_rows, {"WRONG_SHAPE"}),
        (most_rows, {"WRONG_SHAPE", "TOO_MANY_IDS", "MESSAGE_TOO_LARGE"}),
        (second_section, {"WRONG_SHAPE", "BAD_OPTION"}),
        (half_an_id, {"WRONG_SHAPE"}),
        (newer_version, {"VERSION_MISMATCH"}),
    ],
)
def test_numbers_that_do_not_fit_the_payload_are_refused_with_their_reason_and_the_stream_goes_on(
    shard: HeldShard,
    client: RawClient,
    stream: ByteStream,
    make: Callable[[RawClient, common_pb2.TableInfo], embedding_pb2.ExchangeRequest],
    change: Callable[[embedding_pb2.PullRequest | embedding_pb2.PushRequest], None],
    reasons: set[str],
) -> None:
    table = shard.install()
    message = make(client, table)
    body = message.pull if message.HasField("pull") else message.push
    change(body)
    stream.send(lay_out(message))
    assert stream.wait_for_answer(body.header.request_id, 1)
    refusal = stream.answers[-1].refusal
    assert refusal.reason in reasons
    assert refusal.message
    good = push(client, table)
    stream.send(lay_out(good))
    assert stream.wait_for_answer(good.push.header.request_id, 1)
    assert stream.answers[-1].push.steps[0].table_step == 1
    assert stream.finish() == (grpc.StatusCode.OK, "")


@pytest.mark.parametrize("claimed", [-1, 1, 2**20])
def test_a_message_that_claims_another_length_ends_its_stream_alone(
    shard: HeldShard, client: RawClient, stream: ByteStream, claimed: int
) -> None:
    table = shard.install()
    data = bytearray(lay_out(push(client, table)))
    length = len(data) - 5 + claimed
    data[1:5] = [length >> 7 * place & 0x7F | 0x80 * (place < 3) for place in range(4)]
    stream.send(bytes(data))
    code, details = stream.finish()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "use matching shardam packages" in details
    assert client.push(1, table, [1], [[1, 1]]).steps[0].table_step == 1
