"""Rows that were read before, brought up to date: only those that changed travel, and never too few."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.scripted_shards import INFO, ScriptedShard, scripted_session

from shardam._reads import read_changed, read_weights, read_weights_later
from shardam.errors import ShardUnreachable
from shardam_proto.v1 import embedding_pb2

IDS = np.array([9, 4, 7, 4, 1, 30, 22, 15], np.int64)
OTHERS = np.array([5, 9, 2], np.int64)
WANTED = [(INFO, IDS), (INFO, OTHERS)]


def change(shards: list[ScriptedShard], *row_ids: int) -> None:
    """One change more on each shard, which touches these rows."""
    for shard in shards:
        shard.change_number += 1
        shard.changed.update(dict.fromkeys(row_ids, shard.change_number))


def methods(shards: list[ScriptedShard]) -> list[str]:
    return [method for shard in shards for method, _, _ in shard.seen]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_only_rows_that_changed_since_the_read_come_and_are_replaced_in_place(num_shards: int) -> None:
    with scripted_session(num_shards) as (session, shards):
        change(shards, 30)
        read = read_weights_later(session, WANTED)
        rows = read.result()
        assert sorted(read.versions) == list(range(num_shards))
        before = [array.copy() for array in rows]
        assert read_changed(session, WANTED, read.versions, rows) == 0
        assert all(np.array_equal(array, known) for array, known in zip(rows, before, strict=True))
        change(shards, 4, 5, 9)
        for shard in shards:
            shard.seen.clear()
        assert read_changed(session, WANTED, read.versions, rows) == 5  # 4 twice, 9 in both tables, and 5
        assert set(methods(shards)) == {"pull_changed"}
        for array, now in zip(rows, read_weights(session, WANTED), strict=True):
            assert np.array_equal(array, now)
        assert (rows[0][IDS == 4] == -4).all()


def counted_anew(shard: ScriptedShard) -> None:
    shard.change_number = 0


@pytest.mark.parametrize("happened", [ScriptedShard.restart, counted_anew], ids=["restart", "counted anew"])
def test_a_shard_that_cannot_say_what_changed_is_read_whole(happened: object) -> None:
    with scripted_session(2) as (session, shards):
        change(shards, 30)
        read = read_weights_later(session, WANTED)
        rows = read.result()
        for shard in shards:
            shard.changed = {4: 0, 9: 0}
        assert callable(happened)
        happened(shards[1])
        assert read_changed(session, WANTED, read.versions, rows) == IDS.size + OTHERS.size
        for array, now in zip(rows, read_weights(session, WANTED), strict=True):
            assert np.array_equal(array, now)


def test_rows_read_by_another_route_map_are_read_whole() -> None:
    with scripted_session(1) as (session, shards):
        change(shards, 30)
        read = read_weights_later(session, WANTED)
        rows = read.result()
        former = {index: dataclasses.replace(version, epoch=version.epoch + 1) for index, version in read.versions.items()}
        assert read_changed(session, WANTED, former, rows) == IDS.size + OTHERS.size
        assert "pull_changed" not in methods(shards)


def in_chunks(answer: embedding_pb2.ExchangeResponse) -> list[embedding_pb2.ExchangeResponse]:
    rows, chunks = answer.pull_changed.rows, []
    for index in range(3):
        chunk = embedding_pb2.ExchangeResponse(request_id=answer.request_id)
        if index == 0:
            chunk.pull_changed.CopyFrom(answer.pull_changed)
        chunk.pull_changed.header.CopyFrom(answer.pull_changed.header)
        chunk.pull_changed.header.chunk_index, chunk.pull_changed.header.num_chunks = index, 3
        chunk.pull_changed.rows = rows[7 * index :] if index == 2 else rows[7 * index : 7 * index + 7]
        chunks.append(chunk)
    return chunks


def test_changed_rows_in_chunks_are_put_together() -> None:
    with scripted_session(1) as (session, shards):
        change(shards, 30)
        read = read_weights_later(session, WANTED)
        rows = read.result()
        change(shards, 4, 22, 2)
        shards[0].cut_answer = in_chunks
        assert read_changed(session, WANTED, read.versions, rows) == 4
        shards[0].cut_answer = lambda answer: [answer]
        for array, now in zip(rows, read_weights(session, WANTED), strict=True):
            assert np.array_equal(array, now)


def uint32s(*values: int) -> bytes:
    array: npt.NDArray[np.uint32] = np.array(values, np.uint32)
    return array.tobytes()


@pytest.mark.parametrize(
    "positions", [uint32s(1), uint32s(4, 1), uint32s(1, 1), uint32s(1, 8), uint32s(1, 2**32 - 1), uint32s(9, 10)], ids=repr
)
def test_positions_that_do_not_fit_the_question_end_the_stream_and_change_nothing(
    positions: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_session(1, shard_timeout_s=0.5) as (session, shards):
        change(shards, 30)
        read = read_weights_later(session, WANTED)
        rows = read.result()
        before = rows[0].copy()
        change(shards, 4)  # positions 1 and 3 of the first table

        def damaged(answer: embedding_pb2.ExchangeResponse) -> list[embedding_pb2.ExchangeResponse]:
            answer.pull_changed.positions = positions
            return [answer]

        shards[0].cut_answer = damaged
        with pytest.raises(ShardUnreachable):  # its last try may as well have ended for want of time
            read_changed(session, WANTED, read.versions, rows)
        assert "does not fit the question" in caplog.text
        assert np.array_equal(rows[0], before)
