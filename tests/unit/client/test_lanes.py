"""Several numbers in flight: whatever a shard refuses, loses or delays, each number ends once on each shard, in order."""

from __future__ import annotations

import collections
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shardam_testing.scripted_client import ScriptedClient, pushed, scripted_client
from shardam_testing.scripted_shards import FAIL_BEFORE, HOLD, INFO, LOSE_ANSWER, SWALLOW, Ending, Fault
from shardam_testing.waiting import wait_for

from shardam._change_log import MAX_IN_FLIGHT
from shardam._pusher import MAX_QUEUED
from shardam._reads import read_weights
from shardam.errors import (
    ClientClosed,
    QueueFull,
    RowLimit,
    SequenceError,
    ShardamError,
    ShardLost,
    ShardNotReady,
    ShardUnreachable,
)

FULL = RowLimit("no room for new rows")


@pytest.fixture
def client() -> Iterator[ScriptedClient]:
    with scripted_client(3) as client:
        yield client


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def fail(client: ScriptedClient, shard: int, number: int, *faults: Fault) -> None:
    client.shards[shard].faults_of[number] = collections.deque(faults)


def in_thread(action: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Runs an action in a thread; its list gets one entry when it ends, the error or None."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            action()
        except ShardamError as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def raised(thread: threading.Thread, ended: list[BaseException | None]) -> BaseException | None:
    thread.join(60)
    assert not thread.is_alive()
    return ended[0]


def test_numbers_are_sent_without_waiting_for_the_former_up_to_a_limit(client: ScriptedClient, gate: threading.Event) -> None:
    fail(client, 1, 1, gate)
    for _ in range(MAX_IN_FLIGHT + 2):
        client.queue(1)
    wait_for("all that may be in flight", lambda: client.shards[0].last == MAX_IN_FLIGHT)
    assert client.shards[1].last == 0
    gate.set()
    client.pusher.flush()
    assert client.endings() == [pushed(*range(1, MAX_IN_FLIGHT + 3))] * 3


def test_a_number_refused_for_now_is_resent_with_all_that_follow_in_order(
    client: ScriptedClient, gate: threading.Event
) -> None:
    fail(client, 1, 1, gate)
    fail(client, 1, 2, QueueFull("full"), QueueFull("full"))
    fail(client, 1, 4, ShardNotReady("drains"))
    for _ in range(6):
        client.queue(1)
    wait_for("all to be in flight", lambda: client.shards[0].last == 6)
    gate.set()
    client.pusher.flush()
    assert client.endings() == [pushed(*range(1, 7))] * 3
    shard = client.shards[1]
    assert shard.fired == {"Event": 1, "QueueFull": 2, "ShardNotReady": 1}
    assert shard.refused["SEQUENCE_GAP"] >= 1  # what came behind the refused 2
    assert [number for _, number, _ in client.shards[0].seen] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("refusing", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_a_number_refused_for_good_is_closed_in_its_place_and_the_following_go_on(
    client: ScriptedClient, gate: threading.Event, refusing: list[int]
) -> None:
    for shard in range(3):
        fail(client, shard, 1, gate)
    for shard in refusing:
        fail(client, shard, 3, FULL)
    for _ in range(6):
        client.queue(1)
    gate.set()
    with pytest.raises(RowLimit, match="number 3: shard 0"):
        client.pusher.flush()
    client.pusher.flush()
    closed: Ending = (3, "skip", []) if len(refusing) == 3 else (3, "void", [INFO.table_id])
    for index, ended in enumerate(client.endings()):
        assert ended == ([*pushed(1, 2), closed, *pushed(4, 5, 6)] if index in refusing else pushed(*range(1, 7)))


def test_a_refusing_shard_waits_at_the_number_until_the_others_outcome_is_known(
    client: ScriptedClient, gate: threading.Event
) -> None:
    fail(client, 0, 1, FULL)
    fail(client, 2, 1, gate)
    for _ in range(3):
        client.queue(0)
    wait_for("shard 1 to be done", lambda: client.shards[1].last == 3)
    wait_for("the refusal", lambda: client.shards[0].refused["ROW_LIMIT"] == 1)
    assert client.shards[0].closed == []
    gate.set()
    with pytest.raises(RowLimit):
        client.pusher.flush()
    assert client.shards[0].closed == [(1, "void", [INFO.table_id]), *pushed(2, 3)]


def test_a_refused_number_whose_shard_restarts_before_it_is_closed_is_closed_there_afterwards(
    client: ScriptedClient, gate: threading.Event
) -> None:
    fail(client, 0, 2, FULL)
    fail(client, 2, 2, gate)
    for _ in range(3):
        client.queue(0)
    wait_for("the refusal", lambda: client.shards[0].refused["ROW_LIMIT"] == 1)
    client.shards[0].restart()
    gate.set()
    with pytest.raises(RowLimit):
        client.pusher.flush()
    assert client.shards[0].opened == 2
    assert client.endings() == [[*pushed(1), (2, "void", [INFO.table_id]), *pushed(3)], pushed(1, 2, 3), pushed(1, 2, 3)]


def test_answers_may_come_in_another_order(client: ScriptedClient, gate: threading.Event) -> None:
    fail(client, 1, 1, gate)
    fail(client, 1, 2, HOLD)
    fail(client, 1, 3, HOLD)
    for _ in range(5):
        client.queue(1)
    wait_for("all to be in flight", lambda: client.shards[0].last == 5)
    gate.set()
    client.pusher.flush()
    assert client.shards[1].fired[HOLD] == 2
    assert client.endings() == [pushed(*range(1, 6))] * 3
    assert [number for _, number, _ in client.shards[1].seen] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("fault", [LOSE_ANSWER, FAIL_BEFORE])
def test_a_cut_stream_is_followed_by_another_with_everything_unanswered_in_order(
    client: ScriptedClient, gate: threading.Event, fault: str
) -> None:
    fail(client, 2, 1, gate)
    fail(client, 2, 3, fault, fault)
    for _ in range(6):
        client.queue(2)
    wait_for("all to be in flight", lambda: client.shards[0].last == 6)
    gate.set()
    client.pusher.flush()
    assert client.shards[2].fired[fault] == 2
    assert client.shards[2].num_streams == 3
    assert client.endings() == [pushed(*range(1, 7))] * 3


def test_a_restart_with_the_same_state_while_numbers_are_in_flight_loses_and_repeats_nothing(
    client: ScriptedClient, gate: threading.Event
) -> None:
    client.push(0)
    fail(client, 1, 2, gate)
    fail(client, 1, 4, LOSE_ANSWER)
    for _ in range(5):
        client.queue(1)
    wait_for("all to be in flight", lambda: client.shards[0].last == 6)
    client.shards[1].restart()
    gate.set()
    client.pusher.flush()
    assert client.shards[1].fired[LOSE_ANSWER] == 1
    assert client.shards[1].opened == 2
    assert client.endings() == [pushed(*range(1, 7))] * 3


def test_numbers_that_a_restarted_shard_has_but_never_acknowledged_get_their_former_answer(client: ScriptedClient) -> None:
    client.push(0)
    client.shards[1].faults.append(SWALLOW)
    client.queue(1)
    wait_for("the push to be applied", lambda: client.shards[1].last == 2)
    client.shards[1].restart()
    client.shards[1].stop()
    client.shards[1].start(int(client.shards[1].address.rpartition(":")[2]))
    client.pusher.flush()
    assert client.endings() == [pushed(1, 2)] * 3


def test_a_shard_that_stands_still_is_tried_over_a_new_connection_and_late_answers_change_nothing(
    gate: threading.Event,
) -> None:
    with scripted_client(2, shard_timeout_s=2.0) as client:
        fail(client, 1, 1, gate)
        for _ in range(3):
            client.queue(1)
        client.pusher.flush()
        assert client.shards[1].num_streams == 2
        gate.set()
        client.push(1)
        wait_for("the late message", lambda: client.shards[1].num_repeats >= 1)
        assert client.endings() == [pushed(1, 2, 3, 4)] * 2


@pytest.mark.parametrize(("what", "reason"), [("content", "SEQUENCE_REUSED"), ("age", "SEQUENCE_EXPIRED")])
def test_a_repeat_that_the_shard_does_not_recognize_ends_the_client(client: ScriptedClient, what: str, reason: str) -> None:
    shard = client.shards[1]
    fail(client, 1, 1, SWALLOW)
    client.queue(1)
    wait_for("the push to be applied", lambda: shard.last == 1)
    with shard.lock:
        if what == "content":
            shard.outcomes[1] = b"other"
        else:
            del shard.outcomes[1]
    client.session.links[1].stream().end(ShardUnreachable("cut"))
    with pytest.raises(SequenceError) as caught:
        client.pusher.flush()
    assert caught.value.reason == reason


def test_a_change_that_takes_longer_than_the_time_out_is_kept_with_all_behind_it_and_nothing_is_lost() -> None:
    with scripted_client(2, shard_timeout_s=1.0) as client:
        client.push(0)
        client.shards[1].faults.extend([FAIL_BEFORE] * 1000)
        for _ in range(MAX_IN_FLIGHT + 3):
            client.queue(1)
        with pytest.raises(ShardUnreachable, match="tried"):
            client.pusher.flush()
        client.queue(1)  # said once; the next goes behind the others
        with pytest.raises(ShardUnreachable):
            client.pusher.flush()
        client.shards[1].faults.clear()
        client.pusher.flush()
        client.push(1)
        assert client.endings() == [pushed(*range(1, MAX_IN_FLIGHT + 7))] * 2


def test_a_caller_that_queues_faster_than_a_silent_shard_takes_is_told_so_and_its_change_is_not_queued() -> None:
    with scripted_client(1, shard_timeout_s=1.0) as client:
        client.shards[0].faults.extend([FAIL_BEFORE] * 1000)
        with pytest.raises(ShardUnreachable):
            client.push(0)
        for _ in range(MAX_IN_FLIGHT - 1 + MAX_QUEUED):
            client.queue(0)
        with pytest.raises(ShardUnreachable, match="an earlier change still has no answer, so this one was not sent"):
            client.queue(0)
        client.shards[0].faults.clear()
        client.pusher.flush()
        assert client.endings() == [pushed(*range(1, MAX_IN_FLIGHT + MAX_QUEUED + 1))]


def test_a_queued_push_that_gets_no_answer_is_told_once_by_the_next_call_that_asks() -> None:
    with scripted_client(1, shard_timeout_s=1.0) as client:
        client.shards[0].faults.extend([FAIL_BEFORE] * 1000)
        client.queue(0)

        def told() -> ShardamError | None:
            try:
                client.pusher.raise_error()
            except ShardUnreachable as error:
                return error
            return None

        wait_for("the error", told)
        client.pusher.raise_error()
        client.shards[0].faults.clear()
        client.pusher.flush()
        assert client.endings() == [pushed(1)]


# -- the end of a client while others wait


def test_whoever_waits_is_told_when_another_shard_ends_the_client(client: ScriptedClient, gate: threading.Event) -> None:
    client.push(0)
    fail(client, 0, 2, gate)
    fail(client, 1, 3, ShardLost("shard 1 is LOST"))
    pushing = in_thread(lambda: client.push(0))
    wait_for("the push to reach home", lambda: len(client.shards[0].seen) > 1)
    wait_for("the push to wait for home", lambda: client.shards[1].last == client.shards[2].last == 2)
    flushing = in_thread(client.pusher.flush)
    client.shards[2].faults.append(gate)
    reading = in_thread(lambda: read_weights(client.session, [(INFO, client.ids_of(2))]))
    wait_for("the read to wait", lambda: len(client.shards[2].seen) > 2)
    client.queue(0)
    for waiting in (reading, pushing, flushing):
        error = raised(*waiting)
        assert isinstance(error, ShardLost)
        assert error.acknowledged == 2


def test_closing_while_changes_are_in_flight_tells_whoever_waits(client: ScriptedClient, gate: threading.Event) -> None:
    fail(client, 0, 1, gate)
    client.shards[2].faults.extend([None, gate])
    pushing = in_thread(lambda: client.push(0))
    wait_for("the push to be in flight", lambda: client.shards[2].last == 1)
    reading = in_thread(lambda: read_weights(client.session, [(INFO, client.ids_of(2))]))
    wait_for("the read to wait", lambda: len(client.shards[2].seen) > 1)
    client.pusher.close()
    assert isinstance(raised(*pushing), ClientClosed)
    client.session.close()
    assert isinstance(raised(*reading), ClientClosed)


def test_an_error_that_ends_the_client_before_queued_pushes_were_applied_is_raised_at_the_end(client: ScriptedClient) -> None:
    fail(client, 1, 1, ClientClosed("left"))
    client.queue(1)
    wait_for("the client to end", lambda: client.session.ended)
    with pytest.raises(ClientClosed):
        client.pusher.finish()
    client.pusher.finish()


def test_no_thread_and_no_stream_is_left_after_close() -> None:
    before = set(threading.enumerate())
    with scripted_client(2) as client:
        for shard in (0, 1):
            client.push(shard)
            read_weights(client.session, [(INFO, client.ids_of(shard))])
        client.shards[1].restart()
        client.push(1)
        client.pusher.close()
        client.session.close()

        def left() -> set[str]:
            return {thread.name for thread in set(threading.enumerate()) - before if "shardam" in thread.name}

        assert left() == set()
    wait_for("gRPC's threads to end", lambda: not set(threading.enumerate()) - before)


def test_an_idle_client_keeps_no_change_alive(client: ScriptedClient) -> None:
    change = client.push_of(client.ids_of(1))
    kept = weakref.ref(change)
    gc.disable()  # nor does it wait for the collector
    try:
        client.pusher.run(change)
        del change
        wait_for("the change to be freed", lambda: kept() is None)
    finally:
        gc.enable()
    np.testing.assert_array_equal(read_weights(client.session, [(INFO, client.ids_of(0))])[0][:, 0], client.ids_of(0))
