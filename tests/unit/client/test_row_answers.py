"""Answers with rows: placed as they come, in whatever pieces, and never wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardam_testing.scripted_client import ids_of_shard
from shardam_testing.scripted_shards import INFO, ScriptedShard, scripted_session
from shardam_testing.waiting import wait_for

from shardam._answers import Piece, read_answer
from shardam._reads import read_weights, read_weights_later
from shardam._session import Session
from shardam.errors import ShardUnreachable
from shardam_proto import wire
from shardam_proto.v1 import common_pb2, embedding_pb2

Answer = embedding_pb2.ExchangeResponse
Scripted = tuple[Session, list[ScriptedShard]]

PULL = Answer.PULL_FIELD_NUMBER


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_session(2) as (session, shards):
        yield session, shards


def chunks_of(answer: Answer, chunk_bytes: int) -> list[Answer]:
    """Cuts a pull's answer as a shard does."""
    rows = answer.pull.rows
    count = max(1, -(-len(rows) // chunk_bytes))
    chunks = []
    for index in range(count):
        chunk = Answer(request_id=answer.request_id)
        if index == 0:
            chunk.pull.CopyFrom(answer.pull)
        chunk.pull.header.CopyFrom(answer.pull.header)
        chunk.pull.header.chunk_index, chunk.pull.header.num_chunks = index, count
        chunk.pull.rows = rows[index * chunk_bytes : (index + 1) * chunk_bytes]
        chunks.append(chunk)
    return chunks


def repeated(row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    return np.repeat(row_ids, INFO.spec.dim).astype(np.float32).reshape(-1, INFO.spec.dim)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    chunk_bytes=st.integers(1, 200),
    seed=st.integers(0, 9),
    is_sorted=st.booleans(),
)
def test_an_answer_in_pieces_of_any_size_is_put_together_as_it_was_asked_for(
    scripted: Scripted, sizes: list[int], chunk_bytes: int, seed: int, is_sorted: bool
) -> None:
    session, shards = scripted
    rng = np.random.default_rng(seed)
    wanted = [(INFO, rng.integers(0, 1000, size)) for size in sizes]
    if is_sorted:
        wanted = [(info, ids[np.argsort(session.route_map.shards_of(ids), kind="stable")]) for info, ids in wanted]
    for shard in shards:
        shard.cut_answer = lambda answer: chunks_of(answer, chunk_bytes)
    for rows, (_, row_ids) in zip(read_weights(session, wanted), wanted, strict=True):
        assert np.array_equal(rows, repeated(row_ids))
        assert rows.flags.writeable


def without_second(answer: Answer) -> list[Answer]:
    first, _, *others = chunks_of(answer, 16)
    return [first, *others]


def swapped(answer: Answer) -> list[Answer]:
    first, second, third, *others = chunks_of(answer, 16)
    return [first, third, second, *others]


def too_long(answer: Answer) -> list[Answer]:
    answer.pull.rows += bytes(8)
    return [answer]


def too_long_in_chunks(answer: Answer) -> list[Answer]:
    chunks = chunks_of(answer, 16)
    chunks[1].pull.rows += bytes(8)
    return chunks


def too_short(answer: Answer) -> list[Answer]:
    answer.pull.rows = answer.pull.rows[:-8]
    return [answer]


def as_a_push(answer: Answer) -> list[Answer]:
    return [Answer(request_id=answer.request_id, push=embedding_pb2.PushResponse(header=answer.pull.header))]


@pytest.mark.parametrize("damage", [without_second, swapped, too_long, too_long_in_chunks, too_short, as_a_push])
def test_a_damaged_answer_ends_the_stream_and_the_next_one_gives_the_rows(damage: Callable[[Answer], list[Answer]]) -> None:
    with scripted_session(1) as (session, (shard,)):

        def once(answer: Answer) -> list[Answer]:
            shard.cut_answer = lambda answer: [answer]
            return damage(answer)

        shard.cut_answer = once
        row_ids = np.arange(10, dtype=np.int64)
        assert np.array_equal(read_weights(session, [(INFO, row_ids)])[0], repeated(row_ids))
        assert shard.num_streams == 2


def test_an_answer_that_is_damaged_again_and_again_is_an_unreachable_shard(caplog: pytest.LogCaptureFixture) -> None:
    with scripted_session(1, shard_timeout_s=0.5) as (session, (shard,)):
        shard.cut_answer = too_long
        with pytest.raises(ShardUnreachable):  # its last try may as well have ended for want of time
            read_weights(session, [(INFO, np.arange(3, dtype=np.int64))])
        assert "more bytes of rows than 24" in caplog.text


def test_rows_that_come_in_one_message_are_views_of_it_and_nobody_elses() -> None:
    with scripted_session(1) as (session, (shard,)):
        row_ids = np.arange(5, dtype=np.int64)

        def laid_out(answer: Answer) -> list[Answer]:
            """Pads the rows to a place that is aligned, as shards do."""
            for size in range(4):
                answer.pull.padding[:] = [bytes(size)]
                if (len(answer.SerializeToString()) - len(answer.pull.rows)) % 4 == 0:
                    return [answer]
            raise AssertionError("no padding aligns the rows")

        shard.cut_answer = laid_out
        reads = [read_weights(session, [(INFO, row_ids), (INFO, row_ids)]) for _ in range(2)]
        for rows in (*reads[0], *reads[1]):
            assert np.array_equal(rows, repeated(row_ids))
            assert not rows.flags.owndata
            rows += 1
        for rows in (*reads[0], *reads[1]):
            assert np.array_equal(rows, repeated(row_ids) + 1)


def test_all_shards_are_asked_before_any_answer_is_waited_for() -> None:
    with scripted_session(2) as (session, shards):
        row_ids = np.concatenate([ids_of_shard(shard, 3, 2) for shard in range(2)])
        answers = []
        for shard in shards:
            shard.cut_answer = lambda answer: answers.append(answer) or [answer]  # type: ignore[func-returns-value]
        pending = [read_weights_later(session, [(INFO, row_ids + place)]) for place in range(3)]
        wait_for("all answers", lambda: len(answers) == 6)
        for place, read in enumerate(pending):
            assert np.array_equal(read.result()[0], repeated(row_ids + place))
            assert read.result() is read.result()


def test_a_read_that_nobody_waits_for_disturbs_no_other() -> None:
    with scripted_session(1) as (session, _):
        row_ids = np.arange(3, dtype=np.int64)
        for _ in range(3):
            read_weights_later(session, [(INFO, row_ids)])
        assert np.array_equal(read_weights(session, [(INFO, row_ids)])[0], repeated(row_ids))


@given(
    num_rows=st.integers(0, 9),
    chunk=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    request_id=st.integers(1, 2**40),
)
def test_an_answer_reads_alike_however_it_is_encoded(num_rows: int, chunk: tuple[int, int], request_id: int) -> None:
    positions = np.arange(num_rows, dtype=np.uint32).tobytes()
    rows = np.arange(2 * num_rows, dtype=np.float32).tobytes()
    header = common_pb2.ResponseHeader(shard=1, chunk_index=chunk[0], num_chunks=chunk[1])
    head = embedding_pb2.PullChangedResponse(header=header, sections=[common_pb2.Section(num_rows=num_rows)])
    frame = wire.frame(
        Answer.PULL_CHANGED_FIELD_NUMBER, head.SerializeToString(), (len(positions), len(rows)), request_id=request_id
    )
    payloads = [payload for payload in (positions, rows) if payload] or [b""]
    by_hand = b"".join(part for pair in zip(frame.prefixes, payloads, strict=True) for part in pair)
    message = Answer.FromString(by_hand)
    assert (message.request_id, message.pull_changed.rows) == (request_id, rows)
    for encoded in (
        by_hand,
        message.SerializeToString(),
        Answer(pull_changed=message.pull_changed, request_id=request_id).SerializeToString(),
    ):
        piece = read_answer(encoded)
        assert isinstance(piece, Piece)
        assert (piece.request_id, bytes(piece.positions), bytes(piece.rows)) == (request_id, positions, rows)
        assert piece.header == header
        assert piece.num_chunks == max(1, chunk[1])
