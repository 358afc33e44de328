"""Reads behind this client's own changes: they leave before the changes are answered, and see them all the same."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.scripted_client import ids_of_shard
from shardam_testing.scripted_members import Running
from shardam_testing.scripted_shards import FAIL_BEFORE, HOLD, INFO, SWALLOW, Fault, ScriptedShard, scripted_session
from shardam_testing.waiting import wait_for

from shardam import AdamOptions
from shardam._change_log import MAX_IN_FLIGHT
from shardam._own_reads import read_own_changed, read_own_weights
from shardam._parts import TableStepGradient
from shardam._pusher import Pusher
from shardam._reads import read_weights_later
from shardam.cluster import Cluster
from shardam.errors import RowLimit, ShardUnreachable

IDS = np.concatenate([ids_of_shard(shard, 2, 2) for shard in (0, 1)])

Scripted = tuple[Cluster, list[ScriptedShard]]


@contextlib.contextmanager
def scripted_pair(shard_timeout_s: float = 20.0) -> Iterator[Scripted]:
    """A cluster object on two scripted shards."""
    with scripted_session(2, shard_timeout_s) as (session, shards):
        yield Cluster(session), shards


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with scripted_pair() as pair:
        yield pair


def queue_push(cluster: Cluster) -> None:
    """Queues a push of rows of both shards."""
    step = TableStepGradient("t", INFO.table_id, IDS, np.ones((IDS.size, 2), np.float32), AdamOptions())
    cluster._queue_push([step])


def push(cluster: Cluster) -> None:
    """Queues a push, and sees it leave."""
    queue_push(cluster)
    wait_for("the push to leave", lambda: cluster._pusher.last_on_its_way() > 0)


def expect(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Has the next reads take a push for one that is on its way, however quickly it was answered."""
    monkeypatch.setattr(Pusher, "last_on_its_way", lambda pusher: number)


def script(shards: list[ScriptedShard], *faults: Fault) -> None:
    """What becomes of the first push's tries on each shard."""
    for shard in shards:
        shard.faults_of[1] = collections.deque(faults)


def read(cluster: Cluster) -> npt.NDArray[np.float32]:
    (rows,) = read_own_weights(cluster, [(INFO, IDS)], training=True)
    return rows[:, 0]


def change(shards: list[ScriptedShard], row_id: int) -> None:
    """One change more on each shard, which touches a row."""
    for shard in shards:
        shard.change_number += 1
        shard.changed[row_id] = shard.change_number


def seen(shard: ScriptedShard) -> list[tuple[str, int]]:
    return [(method, number) for method, number, _ in shard.seen]


def test_a_read_leaves_before_the_push_is_answered_and_returns_after(scripted: Scripted) -> None:
    cluster, shards = scripted
    script(shards, HOLD)  # answered behind the read, or never
    push(cluster)
    np.testing.assert_array_equal(read(cluster), IDS)
    assert [seen(shard) for shard in shards] == [[("push", 1), ("pull", 0)]] * 2
    assert not cluster._pusher._open


def test_what_has_changed_is_asked_for_before_the_push_is_answered(scripted: Scripted) -> None:
    cluster, shards = scripted
    change(shards, 30)
    first = read_weights_later(cluster._session, [(INFO, IDS)])
    (rows,) = first.result()
    script(shards, HOLD)
    push(cluster)
    change(shards, int(IDS[-1]))
    assert read_own_changed(cluster, [(INFO, IDS)], first.versions, [rows], training=True) == 1
    np.testing.assert_array_equal(rows[:, 0], [*IDS[:-1], -IDS[-1]])
    assert [seen(shard) for shard in shards] == [[("pull", 0), ("push", 1), ("pull_changed", 0)]] * 2
    assert not cluster._pusher._open


def test_a_read_of_which_a_part_was_carried_out_before_the_push_is_made_again(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, shards = scripted
    queue_push(cluster)
    cluster._synchronize()
    shards[0].last = 2  # as if shard 0 alone had had another push already
    expect(monkeypatch, 2)
    np.testing.assert_array_equal(read(cluster), IDS)
    assert [seen(shard) for shard in shards] == [[("push", 1), ("pull", 0), ("pull", 0)]] * 2


def test_changed_rows_of_which_a_part_came_before_the_push_come_again(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, shards = scripted
    change(shards, 30)
    first = read_weights_later(cluster._session, [(INFO, IDS)])
    (rows,) = first.result()
    change(shards, int(IDS[-1]))
    expect(monkeypatch, 1)
    assert read_own_changed(cluster, [(INFO, IDS)], first.versions, [rows], training=True) == 1
    np.testing.assert_array_equal(rows[:, 0], [*IDS[:-1], -IDS[-1]])
    assert [method for method, _ in seen(shards[1])] == ["pull", "pull_changed", "pull_changed"]


def test_a_read_does_not_return_before_a_push_whose_answer_was_lost_is_known_to_be_applied() -> None:
    with scripted_pair(shard_timeout_s=4.0) as (cluster, shards):
        script(shards, SWALLOW)
        push(cluster)
        np.testing.assert_array_equal(read(cluster), IDS)
        assert [seen(shard) for shard in shards] == [[("push", 1), ("pull", 0), ("push", 1)]] * 2
        assert [shard.num_repeats for shard in shards] == [1, 1]


def test_after_a_broken_stream_the_rows_are_those_behind_the_push(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, shards = scripted
    script(shards, FAIL_BEFORE)
    queue_push(cluster)
    expect(monkeypatch, 1)
    np.testing.assert_array_equal(read(cluster), IDS)
    for shard in shards:
        assert [ending[0] for ending in shard.closed] == [1]
        assert seen(shard).count(("push", 1)) == 2
        assert seen(shard)[-1] == ("pull", 0)


def test_the_error_of_a_refused_push_comes_instead_of_the_rows(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, shards = scripted
    script(shards, RowLimit("the table is full"))
    queue_push(cluster)
    expect(monkeypatch, 1)
    with pytest.raises(RowLimit, match="the table is full"):
        read(cluster)
    assert [("pull", 0) in seen(shard) for shard in shards] == [True, True]
    np.testing.assert_array_equal(read(cluster), IDS)  # it is raised once


def test_shards_that_do_nothing_end_the_read_with_their_error() -> None:
    with scripted_pair(shard_timeout_s=1.0) as (cluster, shards):
        script(shards, *[SWALLOW] * 1000)
        for shard in shards:
            shard.faults.extend([SWALLOW] * 1000)
        push(cluster)
        with pytest.raises(ShardUnreachable, match="no answer"):
            read(cluster)


def test_a_push_that_has_no_number_yet_is_waited_for(scripted: Scripted) -> None:
    cluster, shards = scripted
    gate = threading.Event()
    script(shards, gate)
    for _ in range(MAX_IN_FLIGHT + 1):
        queue_push(cluster)
    wait_for("the first push to come", lambda: bool(shards[0].seen))
    assert cluster._pusher.last_on_its_way() == 0
    reading = Running(lambda: read(cluster))
    gate.set()
    assert reading.outcome() is None
    pushes = [("push", number) for number in range(1, MAX_IN_FLIGHT + 2)]
    assert [seen(shard) for shard in shards] == [[*pushes, ("pull", 0)]] * 2
