"""A client and a shard whose answers come late: a try that was given up is answered while the next one is on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.waiting import wait_for

from shardam._backoff import Deadline
from shardam._parts import PushChange, TableStepGradient, push_change
from shardam._pusher import Pusher
from shardam._reads import read_weights
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam._stream import StreamRequest
from shardam._values import TableInfo
from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import ShardUnreachable
from shardam_proto.registry import ClusterView, Keys, ShardEntry, connect_redis
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec

DIM = 64
LARGE = 60_000
"""Rows of 16 chunks: more than gRPC takes from a client before the shard reads them."""

CHUNK_BYTES = 2**20
"""Whatever the matrix says: of chunks of 4 MiB gRPC may take not even the first before the shard reads it."""

QUEUE_BYTES = 2**20
"""One large part fills the shard's queue, and what is behind it is not read."""


@contextlib.contextmanager
def client_of(shard: HeldShard) -> Iterator[tuple[Session, Pusher]]:
    """Opens a client; there is no Redis behind it."""
    identity, nowhere = shard.identity, "redis://127.0.0.1:1/0"
    entry = ShardEntry(0, shard.address, "", identity.incarnation, identity.lineage, "cpu", 0, True)
    options = SessionOptions(nowhere, "test", None, shard_timeout_s=240.0, chunk_bytes=CHUNK_BYTES)
    session = Session(options, connect_redis(nowhere), Keys("test"))
    session.start(ClusterView(identity.cluster, RouteMap(epoch=1, num_shards=1), {0: entry}), Deadline(60.0))
    pusher = Pusher(session)
    try:
        yield session, pusher
    finally:
        pusher.close()
        session.close()


def push_of(table_id: int, rows: int, value: float) -> PushChange:
    gradients = np.full((rows, DIM), value, np.float32)
    step = TableStepGradient("t1", table_id, np.arange(rows, dtype=np.int64), gradients, AdamOptions())
    return push_change([step], RouteMap(epoch=1, num_shards=1))


def try_again(pusher: Pusher) -> None:
    """Has the lane give up the try of its only number, and keep the connection, as one does that hears other answers on it."""
    lane = pusher._log._lanes[0]
    with lane._wake:
        (waiting,) = lane._waiting.values()
        assert waiting.attempt is not None
        lane._send_again_from(waiting.change.number, ShardUnreachable("late"), waiting.attempt.incarnation)


def tries_of(pusher: Pusher) -> list[StreamRequest]:
    (waiting,) = pusher._log._lanes[0]._waiting.values()
    return list(waiting.tries)


def wait_for_tries(pusher: Pusher, count: int) -> list[StreamRequest]:
    """Waits until a client has made so many tries of its only number, and returns them."""
    return wait_for(f"{count} tries", lambda: tries if len(tries := tries_of(pusher)) == count else None)


@pytest.mark.parametrize("rows", [LARGE, 10], ids=["large", "small"])
@pytest.mark.parametrize("read", [True, False], ids=["and a read", "alone"])
def test_a_try_that_a_late_answer_cuts_off_between_its_chunks_is_in_the_way_of_nothing(rows: int, read: bool) -> None:
    with held_shard(max_queue_bytes=QUEUE_BYTES) as shard:
        info = shard.install(DIM)
        with client_of(shard) as (session, pusher):
            with shard.held_changes():
                pusher.submit(push_of(info.table_id, LARGE, 1.0))
                (first,) = wait_for_tries(pusher, 1)
                wait_for("it to fill the queue", lambda: shard.shard.sequencer.queue_bytes > QUEUE_BYTES)
                try_again(pusher)
                _, second = wait_for_tries(pusher, 2)
                wait_for("the second try to begin to leave", lambda: second.num_sent > 0)
                assert second.stream is first.stream
                assert second.sent_at is None
            pusher.flush()
            assert second.sent_at is None
            if read:
                table = TableInfo(TableSpec("t1", DIM), info.table_id, 1)
                read_weights(session, [(table, np.arange(3, dtype=np.int64))])
            pusher.submit(push_of(info.table_id, rows, 2.0))
            pusher.flush()
            assert shard.on_loop(lambda: shard.shard.state.table(info.table_id).step) == 2
            assert shard.on_loop(lambda: shard.shard.streams.open_parts.reserved_bytes) == 0


def test_a_late_answer_to_the_first_of_several_tries_settles_it_and_those_behind_it_are_applied_once() -> None:
    with held_shard(max_queue_bytes=QUEUE_BYTES) as shard:
        info = shard.install(DIM)
        with client_of(shard) as (_, pusher):
            with shard.held_changes():
                pusher.submit(push_of(info.table_id, LARGE, 1.0))
                (first,) = wait_for_tries(pusher, 1)
                wait_for("it to have left", lambda: first.sent_at)
                for count in (2, 3):
                    try_again(pusher)
                    wait_for_tries(pusher, count)
                for value in (2.0, 3.0):
                    pusher.submit(push_of(info.table_id, LARGE, value))
            pusher.flush()
            assert shard.on_loop(lambda: shard.shard.state.table(info.table_id).step) == 3
            assert shard.on_loop(lambda: shard.shard.streams.open_parts.reserved_bytes) == 0
