"""Two shards that get the same messages, one of them in a layout that only protobuf reads: their answers and states are equal.

A message of protobuf may come in several pieces, which are merged; so an empty piece behind it changes nothing of what it says
and is no layout that the codec knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import grpc
from google.protobuf.message import DecodeError

from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.services import exchange_messages
from shardam_testing.codec_fuzz.byte_stream import ByteStream, byte_stream
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import RawClient
from shardam_testing.shard_states import seen

DIMS = (2, 5)
"""Dimensions of the tables; rows of the second lie at odd places."""

ROW_IDS = [*range(41), 2**62, 2**63 - 1]
"""Rows that messages name unless their ids are broken; others show in the count of rows."""

CLIENT_ID = b"of a fuzzed call"

OF_A_PROCESS = ("incarnation", "lineage", "shard_ns", "kernel_ns")
"""Fields of an answer's header that differ between two shards, or two calls."""


@dataclasses.dataclass
class Twin:
    """One of the two shards, with its client.

    Attributes:
        shard: the shard.
        client: its client; what is broken is made of its messages.
        tables: its tables.
    """

    shard: HeldShard
    client: RawClient
    tables: list[common_pb2.TableInfo]

    def seen(self) -> Mapping[str, object]:
        """Returns all that its state shows, between two changes."""
        return self.shard.run(self.shard.shard.change(lambda: seen(self.shard.shard.state, ROW_IDS)))

    @property
    def next_number(self) -> int:
        """The number of its client's next change."""
        return self.shard.shard.state.clients.get(CLIENT_ID).last_number + 1


class Twins:
    """The two shards.

    Args:
        one: gets messages as they are.
        other: gets them in two pieces.
    """

    def __init__(self, one: Twin, other: Twin) -> None:
        self.one = one
        self.other = other
        self.num_messages = self.num_refused = self.num_ended = 0
        self._quiet = True

    def play(self, messages: Sequence[bytes]) -> None:
        """Sends messages on a new stream to both.

        Raises:
            AssertionError: a message is not answered, or otherwise than protobuf reads it, or with INTERNAL; a refused one
                changes something; the streams end otherwise; or a reservation is left.
        """
        with byte_stream(self.one.client.channel) as one, byte_stream(self.other.client.channel) as other:
            self._quiet = True
            for data in messages:
                self.num_messages += 1
                if not self._send(one, other, data):
                    self.num_ended += 1
                    break
            ends = one.finish(), other.finish()
            assert ends[0] == ends[1]
            code, details = ends[0]
            if code is not grpc.StatusCode.OK:
                assert code is grpc.StatusCode.INVALID_ARGUMENT, details
                assert "the stream holds what is no ExchangeRequest" in details
            assert _plain(one) == _plain(other)
            self.num_refused += sum(answer.WhichOneof("response") == "refusal" for answer in one.answers)
            assert not [answer for answer in one.answers if answer.refusal.reason == "INTERNAL"]
        assert self.one.seen() == self.other.seen()
        for twin in (self.one, self.other):
            assert twin.shard.on_loop(lambda twin=twin: twin.shard.shard.streams.open_parts.reserved_bytes) == 0  # type: ignore[misc]

    def _send(self, one: ByteStream, other: ByteStream, data: bytes) -> bool:
        """Sends one message; returns whether the stream goes on."""
        try:
            message = embedding_pb2.ExchangeRequest.FromString(data)
        except DecodeError:
            one.send(data)
            other.send(data)
            return False
        kind = message.WhichOneof("request")
        header = common_pb2.RequestHeader() if kind is None else getattr(message, kind).header
        before = self.one.seen()
        counts = [stream.num_answers(header.request_id) for stream in (one, other)]
        one.send(data)
        other.send(data if kind is None else data + _empty_piece(kind))
        if kind == "push" and (header.num_chunks > 1 or header.chunk_index):
            self._quiet = False  # a chunk may have no answer of its own, so nobody knows when its part is applied
            return True
        for stream, count in zip((one, other), counts, strict=True):
            assert stream.wait_for_answer(header.request_id, count + 1), stream.status
        if self._quiet and one.answers[-1].WhichOneof("response") == "refusal":
            assert self.one.seen() == before
        return True

    def check_alive(self) -> None:
        """Pulls once from each.

        Raises:
            ShardamError: a shard does not answer, or refuses.
        """
        for twin in (self.one, self.other):
            assert twin.client.pull(twin.tables[0], [1]).shape == (1, DIMS[0])


def _empty_piece(kind: str) -> bytes:
    """Returns a second piece of a request's message, which says nothing."""
    return bytes([embedding_pb2.ExchangeRequest.DESCRIPTOR.fields_by_name[kind].number << 3 | 2, 0])


def _plain(stream: ByteStream) -> list[tuple[int, str]]:
    """Returns answers by request id, those of one id in their order, without what differs between two shards."""
    plain = []
    for answer in stream.answers:
        message = getattr(answer, answer.WhichOneof("response") or "")
        if "header" in message.DESCRIPTOR.fields_by_name:
            for field in OF_A_PROCESS:
                message.header.ClearField(field)
        if "padding" in message.DESCRIPTOR.fields_by_name:
            message.ClearField("padding")
        plain.append((answer.request_id, str(answer)))
    return sorted(plain, key=lambda pair: pair[0])


async def _leave_open(client_id: bytes) -> None:
    """Home closes a client that arrives without being a member, which is no fault, and would end the whole run."""


@contextlib.contextmanager
def _twin(incarnation: int | None) -> Iterator[Twin]:
    with held_shard() as shard:
        if incarnation is not None:
            shard.identity.incarnation = incarnation
        shard.groups.close_client = _leave_open
        with shard.client(opened=False) as client:
            client.client_id = CLIENT_ID
            client.open()
            tables = [shard.install(dim) for dim in DIMS]
            client.push(1, tables[0], [1, 2, 3], [[1.0, 2.0]] * 3)
            yield Twin(shard, client, tables)


@contextlib.contextmanager
def twins() -> Iterator[Twins]:
    """Runs two shards that differ in nothing that a client sees, and that take small messages apart as they do large ones."""
    with (
        mock.patch.object(exchange_messages, "SPLIT_BYTES", 0),
        _twin(None) as one,
        _twin(one.client.entry.incarnation) as other,
    ):
        other.client._request_ids = one.client._request_ids
        yield Twins(one, other)
