"""A cluster that is moved to another number of shards while a client works: it goes on there (PROTOCOL.md, section 8)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shardam_testing.random_faults import RandomFaults
from shardam_testing.scripted_client import ScriptedClient, scripted_client
from shardam_testing.scripted_members import PLACE
from shardam_testing.scripted_reshard import Resharding, resharding
from shardam_testing.scripted_shards import INFO, LOSE_ANSWER, Fault, view_of
from shardam_testing.waiting import wait_for

from shardam import _backoff, _moving
from shardam._arrays import Int64s
from shardam._reads import read_weights
from shardam.errors import ClusterRestored, QueueFull, RowLimit, ShardLost, ShardNotReady, ShardUnreachable
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import job_pb2

SHORT_TIMEOUT_S = 4.0
"""For tests that outlast a time-out: a busy machine answers within it."""

LATE = (QueueFull, ShardNotReady, ShardUnreachable)
"""What is raised when faults, or a slow machine, took more than the time-out."""


@pytest.fixture
def client() -> Iterator[ScriptedClient]:
    with scripted_client(2) as client:
        yield client


@pytest.fixture
def moves(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resharding]:
    with resharding(client, monkeypatch) as moves:
        yield moves


def some_ids(seed: int, count: int = 40) -> Int64s:
    return np.random.default_rng(seed).permutation(np.int64(10_000))[:count].astype(np.int64)


def owners_of(row_ids: Int64s, num_shards: int) -> list[list[int]]:
    owners = RouteMap(1, num_shards).shards_of(row_ids)
    return [sorted(row_ids[owners == shard].tolist()) for shard in range(num_shards)]


def check_once(moves: Resharding, pushed: dict[int, Int64s]) -> None:
    """Every push was applied once, and each row by one shard."""
    applied = moves.applied()
    assert sorted(applied) == sorted(pushed)
    for number, row_ids in pushed.items():
        assert sorted(itertools.chain(*applied[number])) == sorted(row_ids.tolist())


@pytest.mark.case("C062")
def test_pushes_reads_and_signs_of_life_go_on_with_other_shards(client: ScriptedClient, moves: Resharding) -> None:
    pushed = {}
    for number, count in enumerate((4, 1, 3), start=1):
        pushed[number] = some_ids(number)
        client.pusher.run(client.push_of(pushed[number]))
        moves.reshard(count)
        (rows,) = read_weights(client.session, [(INFO, pushed[number])])
        assert (rows[:, 0] == pushed[number]).all()
        assert len(client.session.links) == count
    pushed[4] = some_ids(4)
    client.pusher.run(client.push_of(pushed[4]))
    check_once(moves, pushed)
    assert [sorted(shard.applied[4]) for shard in client.shards] == owners_of(pushed[4], 3)
    assert not client.session.ended


@pytest.mark.case("C062")
def test_a_push_that_was_split_by_the_former_map_is_split_anew(client: ScriptedClient, moves: Resharding) -> None:
    row_ids = some_ids(1)
    client.push(0)
    change = client.push_of(row_ids)
    moves.reshard(3)
    read_weights(client.session, [(INFO, row_ids)])
    client.pusher.run(change)
    assert [sorted(shard.applied[2]) for shard in client.shards] == owners_of(row_ids, 3)


@pytest.mark.case("C062")
def test_a_push_that_one_shard_had_applied_is_in_the_cut_and_is_not_applied_again(
    client: ScriptedClient, moves: Resharding
) -> None:
    gate = threading.Event()
    client.shards[1].faults.append(gate)
    pushed = {number: some_ids(number) for number in (1, 2, 3)}
    for row_ids in pushed.values():
        client.pusher.submit(client.push_of(row_ids))
    wait_for("the push on one shard", lambda: client.shards[0].last == 3)
    holding = threading.Thread(target=lambda: moves.reshard(4))
    holding.start()
    gate.set()
    client.pusher.flush()
    holding.join(60)
    check_once(moves, pushed)
    assert all(not shard.applied for shard in client.shards)


def test_the_outcome_of_a_push_whose_answer_was_lost_comes_from_the_new_shards(
    client: ScriptedClient, moves: Resharding
) -> None:
    client.push(0)
    client.push(1)
    for shard in client.shards:
        shard.faults.append(LOSE_ANSWER)
        shard.stream_faults.extend([ShardNotReady("drains")] * 1000)
    change = client.push_of(some_ids(1))
    pushing = threading.Thread(target=lambda: client.pusher.run(change))
    pushing.start()
    wait_for("the push", lambda: client.shards[0].last == client.shards[1].last == 3)
    moves.reshard(3)
    pushing.join(60)
    assert not pushing.is_alive()
    assert change.refusal() is None
    assert len(change.answers) == 3
    assert [shard.num_repeats for shard in client.shards] == [1, 1, 1]
    assert sorted(itertools.chain(*moves.applied()[3])) == sorted(some_ids(1).tolist())


def test_rows_are_written_and_deleted_once_across_a_move(client: ScriptedClient, moves: Resharding) -> None:
    row_ids = some_ids(5)
    client.push(0)
    last, writing = moves.hold(), threading.Thread(target=lambda: client.assign(row_ids))
    writing.start()
    wait_for("the write to be held", lambda: client.shards[0].fired["held"] > 0)
    moves.replace(moves.new_shards(3, last))
    writing.join(60)
    assert not writing.is_alive()
    assert client.delete(row_ids) == 3  # a scripted shard says 1 each
    assert client.endings() == [[(2, "assign", []), (3, "delete", [])]] * 3


def test_a_refused_push_is_refused_once_whatever_shards_close_its_number(client: ScriptedClient, moves: Resharding) -> None:
    client.shards[1].faults.append(RowLimit("no room"))
    with pytest.raises(RowLimit, match="no room"):
        client.pusher.run(client.push_of(some_ids(1)))
    moves.reshard(3)
    client.push(0)
    assert not client.session.ended
    assert [shard.last for shard in client.shards] == [2, 2, 2]


def test_a_move_that_takes_long_does_not_use_up_the_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_client(2, shard_timeout_s=SHORT_TIMEOUT_S) as client, resharding(client, monkeypatch) as moves:
        client.push(0)
        last = moves.hold()
        results: list[BaseException | None] = []

        def push() -> None:
            try:
                client.pusher.run(client.push_of(some_ids(1)))
                results.append(None)
            except ShardNotReady as error:
                results.append(error)

        pushing = threading.Thread(target=push)
        pushing.start()
        began = time.monotonic()
        wait_for("more than the time-out", lambda: time.monotonic() > began + 1.5 * SHORT_TIMEOUT_S or bool(results))
        shards = moves.new_shards(4, last)
        moves.registry.view = view_of(shards)
        moves.registry.view.shards.pop(2)
        moves.registry.view.shards[1] = shards[1].entry(ready=False)
        seen_at = client.session.moving.seen_at
        wait_for("signs in Redis", lambda: client.session.moving.seen_at > seen_at)
        moves.replace(shards)
        pushing.join(60)
        assert results == [None]


class Gated(collections.deque[Fault]):
    """Has a shard answer nothing until a gate is opened."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__([None])
        self._gate = gate

    def popleft(self) -> Fault:
        return None if self._gate.is_set() else self._gate


def test_shards_that_hold_changes_back_and_say_nothing_are_waited_for_while_home_moves_the_cluster() -> None:
    with scripted_client(2, shard_timeout_s=SHORT_TIMEOUT_S) as client:
        client.push(0)
        gate = threading.Event()
        for shard in client.shards:
            shard.faults = Gated(gate)
        client.shards[0].jobs = [job_pb2.Job(kind=job_pb2.JOB_KIND_RESHARD, state=job_pb2.JOB_STATE_RUNNING)]
        results: list[str] = []

        def push() -> None:
            try:
                client.push(1)
                results.append("applied")
            except LATE as error:
                results.append(error.message)

        pushing = threading.Thread(target=push)
        pushing.start()
        began = time.monotonic()
        wait_for("more than the time-out", lambda: time.monotonic() > began + 1.5 * SHORT_TIMEOUT_S or bool(results))
        gate.set()
        pushing.join(60)
        assert results == ["applied"]


def test_a_move_without_an_end_is_told_after_ten_times_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_moving, "RESHARD_TIMEOUTS", 1)
    with scripted_client(2, shard_timeout_s=0.5) as client, resharding(client, monkeypatch) as moves:
        client.push(0)
        moves.hold()
        with pytest.raises(ShardNotReady, match="resharded"):
            client.push(0)
        moves.release()
        client.pusher.flush()
        assert not client.session.ended


def test_a_move_that_is_given_up_leaves_the_client_where_it_is(client: ScriptedClient, moves: Resharding) -> None:
    client.push(0)
    moves.hold()
    client.queue(1)
    wait_for("the push to be held", lambda: client.shards[1].fired["held"] > 0)
    moves.release()
    client.pusher.flush()
    assert [shard.last for shard in client.shards] == [2, 2]


def test_new_shards_without_what_was_acknowledged_end_the_client(client: ScriptedClient, moves: Resharding) -> None:
    client.push(0)
    client.push(1)
    moves.replace(moves.new_shards(3, last=1))
    with pytest.raises(ShardLost, match="had acknowledged number 2 of this client and now has 1"):
        client.push(0)


def test_new_shards_on_another_timeline_end_the_client(client: ScriptedClient, moves: Resharding) -> None:
    client.push(0)
    shards = moves.new_shards(3, last=1)
    for shard in shards:
        shard.timeline = 2
    moves.replace(shards)
    with pytest.raises(ClusterRestored, match="restored from a checkpoint"):
        client.push(0)


def test_a_shard_that_comes_back_restored_ends_the_client(client: ScriptedClient, moves: Resharding) -> None:
    client.push(0)
    client.shards[1].restart(lineage=99)
    client.shards[1].timeline = 2
    with pytest.raises(ClusterRestored, match="restored from a checkpoint"):
        client.push(1)


def test_a_former_shard_at_a_new_ones_address_is_waited_for(client: ScriptedClient, moves: Resharding) -> None:
    client.push(0)
    last = moves.hold()
    former = client.shards
    shards = moves.new_shards(1, last)
    moves.registry.view = view_of(shards)
    moves.registry.view.shards[0] = former[0].entry()  # its lease in Redis outlives it
    client.queue(0)
    opened = former[0].opened
    wait_for("a try to open there", lambda: former[0].opened > opened)
    moves.replace(shards)
    client.pusher.flush()
    assert [shard.last for shard in client.shards] == [2]


class Training:
    """Pushes in a thread of its own until it is told to stop.

    Attributes:
        pushed: what was queued, by number.
        failed: what ended it.
    """

    def __init__(self, client: ScriptedClient, seed: int) -> None:
        self.pushed: dict[int, Int64s] = {}
        self.failed: list[BaseException] = []
        self._client, self._seed = client, seed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                row_ids = self.pushed[len(self.pushed) + 1] = some_ids(1000 * self._seed + len(self.pushed))
                push = self._client.push_of(row_ids)
                self._try(functools.partial(self._client.pusher.submit, push))
            self._try(self._client.pusher.flush)
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the test looks at it
            self.failed.append(error)

    def _try(self, call: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(*LATE):
                return call()

    def has_pushed(self, count: int) -> bool:
        """Whether it has queued so many, or has failed."""
        return len(self.pushed) >= count or bool(self.failed)

    def end(self) -> None:
        """Waits until all that was queued has an outcome."""
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        assert not self.failed


def shake(client: ScriptedClient, seed: int) -> None:
    """Has the shards fail at random, but refuse nothing for good."""
    for shard in client.shards:
        shard.faults = RandomFaults(shard, 100 * seed + 10 * shard.epoch + shard.index, refuses=False)


# -- groups


def test_a_step_that_was_not_decided_is_sent_again_to_the_new_shards_and_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_client(2, group=PLACE) as client, resharding(client, monkeypatch) as moves:
        client.step(0)
        group = client.shards[0].require_group()
        group.hold()
        client.queue_step(1)
        wait_for("the client to arrive", lambda: len(group.arrivals) >= 2)
        assert moves.reshard(3) == 1
        wait_for("the part on the new shards", lambda: all(shard.staged is not None for shard in client.shards))
        client.shards[0].require_group().release()
        client.pusher.flush()
        client.step(2)
        assert client.endings() == [[(2, "gradient", [INFO.table_id]), (3, "gradient", [INFO.table_id])]] * 3
        assert not moves.former[0].last > 1


def test_a_step_whose_end_the_client_did_not_hear_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_client(2, group=PLACE) as client, resharding(client, monkeypatch) as moves:
        client.step(0)
        home = client.shards[0]
        home.faults.extend([None, LOSE_ANSWER])
        home.stream_faults.extend([ShardNotReady("drains")] * 1000)
        change = client.step_of(1)
        client.pusher.submit(change)
        wait_for("the step", lambda: home.last == 2)
        assert moves.reshard(1) == 2
        client.pusher.flush()
        assert change.refusal() is None
        assert client.session.membership is not None
        assert client.session.membership.step == 3
        client.step(0)
        assert client.endings() == [[(3, "gradient", [INFO.table_id])]]


def test_steps_without_a_gradient_of_a_bounded_group_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    place = dataclasses.replace(PLACE, max_staleness=2)
    with scripted_client(2, group=place) as client, resharding(client, monkeypatch) as moves:
        client.step(0, "empty")
        last = moves.hold()
        client.queue_step(0, "empty")
        client.queue_step(1)
        wait_for("both to be held", lambda: client.shards[0].fired["held"] > 0)
        moves.replace(moves.new_shards(3, last))
        client.pusher.flush()
        assert client.endings() == [[(2, "skip", []), (3, "push", [INFO.table_id])]] * 3


# -- faults


@pytest.mark.parametrize("seed", [1, 2])
def test_no_push_is_lost_or_doubled_over_moves_at_any_moment_under_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backoff, "MAX_WAIT_S", 0.1)
    with scripted_client(2, shard_timeout_s=4.0, client_lease_s=0.5) as client, resharding(client, monkeypatch) as moves:
        shake(client, seed)
        training = Training(client, seed)
        for count in (3, 1, 4, 2):
            enough = len(training.pushed) + 10
            wait_for("some pushes", functools.partial(training.has_pushed, enough))
            moves.reshard(count)
            shake(client, seed)
        training.end()
        check_once(moves, training.pushed)
        fired = sum((shard.fired for shard in (*moves.former, *client.shards)), collections.Counter[str]())
        assert set(fired) >= {"held", LOSE_ANSWER, "restart"}
