"""Messages of an Exchange stream as bytes: whoever wrote them, however they are laid out, whatever they claim."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from shardam_testing.held_shard import HeldShard
from shardam_testing.raw_client import RawClient, id_bytes
from shardam_testing.raw_stream import raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto import wire
from shardam_proto.channels import translate
from shardam_proto.limits import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2
from shardam_server.shard.phases import PUSH_PHASES, READ_PHASES

DIM = 16
NUM_ROWS = 2000
"""Rows of 64 bytes: an answer of two chunks of the smallest size, and requests that are split."""


class BytesStream:
    """An Exchange stream of bytes, asked one message after the other."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/shardam.v1.EmbeddingService/Exchange")
        self.call = method(iter(self._requests.get, None))
        self.cancel = threading.Timer(60.0, self.call.cancel)
        self.cancel.daemon = True
        self.cancel.start()

    def send(self, message: bytes) -> None:
        self._requests.put(message)

    def receive(self) -> bytes:
        return next(self.call)

    def ask(self, message: bytes) -> embedding_pb2.ExchangeResponse:
        self.send(message)
        return embedding_pb2.ExchangeResponse.FromString(self.receive())

    def close(self) -> None:
        self.cancel.cancel()
        self.call.cancel()
        self._requests.put(None)


@pytest.fixture
def stream(client: RawClient) -> Iterator[BytesStream]:
    stream = BytesStream(client.channel)
    yield stream
    stream.close()


def framed(kind: int, head: bytes, *payloads: bytes) -> bytes:
    """Lays a message out as `wire` says."""
    frame = wire.frame(kind, head, [len(payload) for payload in (*payloads, b"", b"")[:2]])
    filled = [payload for payload in payloads if payload] or [b""]
    return b"".join(part for pair in zip(frame.prefixes, filled, strict=True) for part in pair)


def pull_head(
    client: RawClient, table: common_pb2.TableInfo, num_rows: int = NUM_ROWS, **fields: int
) -> embedding_pb2.PullRequest:
    section = common_pb2.Section(table_id=table.table_id, num_rows=num_rows, dtype=common_pb2.DTYPE_FLOAT32)
    return embedding_pb2.PullRequest(header=client.header(), sections=[section], **fields)  # type: ignore[arg-type]  # by name


def pull(client: RawClient, table: common_pb2.TableInfo, num_rows: int = NUM_ROWS, **fields: int) -> bytes:
    return framed(1, pull_head(client, table, num_rows, **fields).SerializeToString(), id_bytes(range(num_rows)))


def rows_of(num_rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(3).normal(size=(num_rows, DIM)).astype("<f4")


def unpadded(push: embedding_pb2.PushRequest) -> bytes:
    """Lays a push out as protobuf does, but for one byte more in its head: what follows lies at odd places."""
    data = push.SerializeToString()
    data = bytes([13 << 3 | 2, 1, 0]) + data if len(data) % 2 else data
    return bytes([2 << 3 | 2]) + wire.varint(len(data)) + data


def headless(push: embedding_pb2.PushRequest) -> bytes:
    """Returns a push's small fields."""
    head = embedding_pb2.PushRequest()
    head.CopyFrom(push)
    head.ClearField("row_ids")
    head.ClearField("rows")
    return head.SerializeToString()


@pytest.mark.parametrize("num_rows", [1, NUM_ROWS])
def test_a_push_laid_out_by_hand_by_protobuf_or_at_odd_places_does_the_same(
    shard: HeldShard, client: RawClient, stream: BytesStream, num_rows: int
) -> None:
    tables = [shard.install(DIM) for _ in range(3)]
    pushes = [client.push_request(number, table, range(num_rows), rows_of(num_rows)) for number, table in enumerate(tables, 1)]
    messages = [
        framed(2, headless(pushes[0]), pushes[0].row_ids, pushes[0].rows),
        embedding_pb2.ExchangeRequest(push=pushes[1]).SerializeToString(),
        unpadded(pushes[2]),
    ]
    for message in messages:
        assert stream.ask(message).push.steps[0].table_step == 1
    pulled = {stream.ask(pull(client, table, num_rows)).pull.rows for table in tables}
    assert len(pulled) == 1
    assert pulled != {stream.ask(pull(client, shard.install(DIM), num_rows)).pull.rows}


def read_chunks(stream: BytesStream, message: bytes) -> list[embedding_pb2.PullResponse]:
    stream.send(message)
    chunks = [embedding_pb2.ExchangeResponse.FromString(stream.receive()).pull]
    while len(chunks) < chunks[0].header.num_chunks:
        chunks.append(embedding_pb2.ExchangeResponse.FromString(stream.receive()).pull)
    return chunks


def test_an_answer_in_chunks_has_the_rows_of_one_in_one_message(
    shard: HeldShard, client: RawClient, stream: BytesStream
) -> None:
    tables = [shard.install(DIM), shard.install(3), shard.install(DIM)]
    for number, table in enumerate(tables, 1):
        stream.ask(framed(2, client.push_request(number, table, [1, 7], np.ones((2, table.spec.dim))).SerializeToString()))
    counts = [1500, 0, 700]
    head = pull_head(client, tables[0])
    head.ClearField("sections")
    for table, count in zip(tables, counts, strict=True):
        head.sections.add(table_id=table.table_id, num_rows=count, dtype=common_pb2.DTYPE_FLOAT32)
    row_ids = id_bytes([*range(1500), *range(700)])
    whole = stream.ask(framed(1, head.SerializeToString(), row_ids)).pull
    head.chunk_bytes = MIN_CHUNK_BYTES
    first, *others = chunks = read_chunks(stream, framed(1, head.SerializeToString(), row_ids))
    assert [(chunk.header.chunk_index, chunk.header.num_chunks) for chunk in chunks] == [(0, 3), (1, 3), (2, 3)]
    assert b"".join(chunk.rows for chunk in chunks) == whole.rows
    assert len(whole.rows) == 2200 * DIM * 4
    assert max(len(chunk.rows) for chunk in chunks) == MIN_CHUNK_BYTES
    assert (first.steps, first.sections) == (whole.steps, whole.sections)
    assert not any(chunk.steps or chunk.sections for chunk in others)
    assert 0 < first.header.kernel_ns < first.header.shard_ns
    assert {chunk.header.change_number for chunk in chunks} == {whole.header.change_number}


def test_a_row_larger_than_a_chunk_has_a_message_of_its_own(shard: HeldShard, client: RawClient, stream: BytesStream) -> None:
    table = shard.install(20_000)
    chunks = read_chunks(stream, pull(client, table, 3, chunk_bytes=MIN_CHUNK_BYTES))
    assert [len(chunk.rows) for chunk in chunks] == [80_000] * 3


def test_a_small_pull_is_read_on_the_event_loop_unless_its_table_is_being_changed(
    shard: HeldShard, client: RawClient, stream: BytesStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = shard.install(DIM)
    with shard.shard.state.table(table.table_id).lock.write():
        stream.send(pull(client, table, 5))
        shard.wait_for_reads(1)
    assert len(embedding_pb2.ExchangeResponse.FromString(stream.receive()).pull.rows) == 5 * DIM * 4
    monkeypatch.setattr(type(shard.shard.sequencer), "read", None)  # no thread to be had
    assert len(stream.ask(pull(client, table, 5)).pull.rows) == 5 * DIM * 4
    assert stream.ask(pull(client, table, NUM_ROWS)).refusal.reason == "INTERNAL"


Spoil = Callable[[RawClient, common_pb2.TableInfo], bytes]


def pull_of(client: RawClient, sections: list[tuple[int, int]], row_ids: bytes, **fields: int) -> bytes:
    head = embedding_pb2.PullRequest(header=client.header(**fields))
    for table_id, num_rows in sections:
        head.sections.add(table_id=table_id, num_rows=num_rows, dtype=common_pb2.DTYPE_FLOAT32)
    return framed(1, head.SerializeToString(), row_ids)


def changed_head(client: RawClient, table: common_pb2.TableInfo, num_rows: int, number: int, **fields: int) -> bytes:
    section = common_pb2.Section(table_id=table.table_id, num_rows=num_rows, dtype=common_pb2.DTYPE_FLOAT32)
    header = client.header(**fields)
    return embedding_pb2.PullChangedRequest(header=header, sections=[section], change_number=number).SerializeToString()


LONG = id_bytes(range(600))
"""Ids of a message that is split by hand."""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda client, table: pull_of(client, [(table.table_id, 600)], LONG[:-3]), "WRONG_SHAPE"),
        (lambda client, table: pull_of(client, [(table.table_id, 599)], LONG), "WRONG_SHAPE"),
        (lambda client, table: pull_of(client, [(table.table_id, 601)], LONG), "WRONG_SHAPE"),
        (lambda client, table: pull_of(client, [(table.table_id, 2**63)], LONG), "WRONG_SHAPE"),
        (lambda client, table: pull_of(client, [(table.table_id, 2**64 - 1), (table.table_id, 601)], LONG), "WRONG_SHAPE"),
        (lambda client, table: pull_of(client, [(table.table_id, 600)], LONG, protocol_version=99), "VERSION_MISMATCH"),
        (lambda client, table: pull_of(client, [(table.table_id + 1, 600)], LONG), "UNKNOWN_TABLE"),
        (lambda client, table: pull(client, table, chunk_bytes=MIN_CHUNK_BYTES - 1), "BAD_OPTION"),
        (lambda client, table: pull(client, table, chunk_bytes=MAX_CHUNK_BYTES + 1), "BAD_OPTION"),
        (lambda client, table: framed(8, changed_head(client, table, 600, 5), LONG), "BAD_OPTION"),
        (lambda client, table: framed(8, changed_head(client, table, 601, 5, timeline=1), LONG), "WRONG_SHAPE"),
        (lambda client, table: framed(8, changed_head(client, table, 600, 5, timeline=2), LONG), "NOT_READY"),
        (
            lambda client, table: framed(2, headless(client.push_request(1, table, range(600), [])), LONG, bytes(600 * 64 - 4)),
            "WRONG_SHAPE",
        ),
        (lambda client, table: framed(2, headless(client.push_request(1, table, range(600), [])), LONG), "WRONG_SHAPE"),
        (
            lambda client, table: framed(
                2, headless(client.push_request(1, table, range(600), [], protocol_version=99)), LONG, bytes(600 * 64)
            ),
            "VERSION_MISMATCH",
        ),
        (lambda client, table: bytes([12 << 3 | 2, 0]), "BAD_OPTION"),
        (lambda client, table: b"", "BAD_OPTION"),
    ],
)
def test_a_message_whose_numbers_do_not_fit_is_refused_and_the_stream_kept(
    shard: HeldShard, client: RawClient, stream: BytesStream, spoil: Spoil, reason: str
) -> None:
    table = shard.install(DIM)
    refusal = stream.ask(spoil(client, table)).refusal
    assert refusal.reason == reason
    assert refusal.message
    assert len(stream.ask(pull(client, table)).pull.rows) == NUM_ROWS * DIM * 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message: message[:-1],
        lambda message: message + b"\x00",
        lambda message: message[:1] + b"\xff" * 12 + message[13:],
        lambda message: b"\xff" * 5000,
    ],
)
def test_what_is_no_protobuf_ends_the_stream_with_a_reason(
    shard: HeldShard, client: RawClient, spoil: Callable[[bytes], bytes]
) -> None:
    table = shard.install(DIM)
    with raw_stream(client.channel, read=False) as other:
        stream = BytesStream(client.channel)
        stream.send(spoil(pull(client, table)))
        with pytest.raises(grpc.RpcError) as error:
            stream.receive()
        assert translate(error.value, "the stream").reason == "BAD_OPTION"
        stream.close()
        other.finish_sending()
    assert client.pull(table, [1]).shape == (1, DIM)


def ask_changed(
    client: RawClient, stream: BytesStream, table: common_pb2.TableInfo, row_ids: list[int], number: int
) -> tuple[list[int], bytes]:
    """Returns the positions of changed rows, and their weights."""
    message = framed(8, changed_head(client, table, len(row_ids), number, timeline=1), id_bytes(row_ids))
    answer = stream.ask(message)
    assert not answer.refusal.reason, answer.refusal
    changed = answer.pull_changed
    positions = np.frombuffer(changed.positions, "<u4").tolist()
    assert [section.num_rows for section in changed.sections] == [len(positions)]
    return positions, changed.rows


def test_rows_changed_created_or_deleted_since_a_read_are_read_again_and_no_others(
    shard: HeldShard, client: RawClient, stream: BytesStream
) -> None:
    table = shard.install(DIM)
    row_ids = [5, 1, 9, 5, 7, 2]
    numbers = iter(range(1, 100))

    def push(*changed: int) -> int:
        head = client.push_request(next(numbers), table, changed, np.ones((len(changed), DIM)))
        return int(stream.ask(embedding_pb2.ExchangeRequest(push=head).SerializeToString()).push.header.change_number)

    def now(chosen: list[int]) -> bytes:
        return client.pull(table, chosen).tobytes()

    read = push(1, 5, 9)
    assert ask_changed(client, stream, table, row_ids, read) == ([], b"")
    push(5, 7, 1000)
    assert ask_changed(client, stream, table, row_ids, read) == ([0, 3, 4], now([5, 5, 7]))
    later = push(2)
    delete = row_pb2.DeleteRowsRequest(header=client.header(next(numbers)), table_id=table.table_id, row_ids=id_bytes([9]))
    assert stream.ask(embedding_pb2.ExchangeRequest(delete_rows=delete).SerializeToString()).delete_rows.num_deleted == 1
    assert ask_changed(client, stream, table, row_ids, later) == ([2], now([9]))
    assert ask_changed(client, stream, table, row_ids, read) == ([0, 2, 3, 4, 5], now([5, 9, 5, 7, 2]))
    assert ask_changed(client, stream, table, [*row_ids, 44], later) == (
        [2, 6],
        now([9, 44]),
    )  # 44 may have been the deleted one
    assert ask_changed(client, stream, table, row_ids, 10_000)[0] == list(range(6))  # a number that this shard has not given
    shard.shard.state.loaded_change = shard.shard.state.change_number  # as after a start, which forgets deletes
    last = push(5)
    assert ask_changed(client, stream, table, [*row_ids, 44], last - 1) == ([0, 3], now([5, 5]))
    assert ask_changed(client, stream, table, [*row_ids, 44], last - 2)[0] == [0, 2, 3, 6]


def test_an_answer_of_changed_rows_comes_in_chunks_too(shard: HeldShard, client: RawClient, stream: BytesStream) -> None:
    table = shard.install(DIM)
    push = client.push_request(1, table, range(NUM_ROWS), rows_of(NUM_ROWS))
    stream.ask(embedding_pb2.ExchangeRequest(push=push).SerializeToString())
    head = embedding_pb2.PullChangedRequest.FromString(changed_head(client, table, NUM_ROWS, 1, timeline=1))
    head.chunk_bytes = MIN_CHUNK_BYTES
    stream.send(framed(8, head.SerializeToString(), id_bytes(range(NUM_ROWS))))
    first, second = (embedding_pb2.ExchangeResponse.FromString(stream.receive()).pull_changed for _ in range(2))
    assert np.array_equal(np.frombuffer(first.positions, "<u4"), np.arange(NUM_ROWS))
    assert not second.positions
    assert first.rows + second.rows == client.pull(table, range(NUM_ROWS)).tobytes()
    assert 0 < first.header.kernel_ns < first.header.shard_ns


@pytest.mark.case("C028")
def test_metrics_split_the_time_of_a_push_and_a_pull_into_their_phases(
    shard: HeldShard, client: RawClient, stream: BytesStream
) -> None:
    table = shard.install(DIM)
    for number in range(1, 4):
        push = client.push_request(number, table, range(NUM_ROWS), rows_of(NUM_ROWS))
        stream.ask(embedding_pb2.ExchangeRequest(push=push).SerializeToString())
    stream.ask(pull(client, table))
    stream.ask(framed(8, changed_head(client, table, 600, 1, timeline=1), LONG))
    sums, counts = phases(shard)
    assert {phase for kind, phase in sums if kind == "push"} == set(PUSH_PHASES)
    assert {phase for kind, phase in sums if kind == "pull"} == set(READ_PHASES)
    assert {phase for kind, phase in sums if kind == "pull_changed"} == set(READ_PHASES)
    assert {counts["push", phase] for phase in PUSH_PHASES} == {3}
    assert all(seconds >= 0 for seconds in sums.values())
    assert min(sums["push", phase] for phase in ("decode", "merge", "update")) > 0


def phases(shard: HeldShard) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Returns the sums and counts of the histograms of phases, once the last answer is counted."""
    wait_for("the last phase to be counted", lambda: 'kind="pull_changed",phase="send"' in shard.shard.metrics.text())
    values: dict[str, dict[tuple[str, str], float]] = {"sum": {}, "count": {}}
    for family in text_string_to_metric_families(shard.shard.metrics.text()):
        for sample in family.samples if family.name == "shardam_phase_seconds" else []:
            what = sample.name.rpartition("_")[2]
            if what in values:
                values[what][sample.labels["kind"], sample.labels["phase"]] = sample.value
    return values["sum"], values["count"]
