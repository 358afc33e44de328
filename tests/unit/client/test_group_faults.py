"""What a member of a sync group does when answers are lost, streams break, shards restart and others are slow."""

from __future__ import annotations

import _thread
import collections
import threading
from collections.abc import Iterator

import pytest
from shardam_testing.scripted_client import ScriptedClient, scripted_client
from shardam_testing.scripted_members import PLACE, Running, calls, contributed, fail, group_of
from shardam_testing.scripted_shards import FAIL_BEFORE, LOSE_ANSWER, SWALLOW
from shardam_testing.waiting import wait_for

from shardam.errors import (
    QueueFull,
    RowLimit,
    ShardamError,
    ShardLost,
    ShardNotReady,
    ShardUnreachable,
)

FULL = RowLimit("no room for new rows")


@pytest.fixture
def client() -> Iterator[ScriptedClient]:
    with scripted_client(3, group=PLACE) as client:
        yield client


# -- what is lost and what breaks


@pytest.mark.parametrize("fault", [LOSE_ANSWER, FAIL_BEFORE])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_stream_that_breaks_around_a_part_has_it_sent_again_under_the_same_number_and_step(
    client: ScriptedClient, shard: int, fault: str
) -> None:
    fail(client.shards[shard], 1, fault, fault)
    client.step()
    assert client.shards[shard].fired[fault] == 2
    assert calls(client.shards[shard]).count(("part", 1)) == 3
    assert {(header.number, header.step) for header in client.shards[shard].headers} == {(1, 1)}
    assert client.endings() == [contributed(1)] * 3
    assert len(group_of(client).arrivals) == 1


@pytest.mark.parametrize("fault", [LOSE_ANSWER, FAIL_BEFORE])
def test_a_stream_that_breaks_around_an_arrival_has_it_sent_again_and_no_part(client: ScriptedClient, fault: str) -> None:
    fail(client.shards[0], 1, None, fault, fault)
    client.step()
    assert client.shards[0].fired[fault] == 2
    assert calls(client.shards[0]) == [("part", 1), *[("arrive", 1)] * 3]
    assert [calls(shard) for shard in client.shards[1:]] == [[("part", 1)]] * 2
    assert client.endings() == [contributed(1)] * 3


def test_answers_that_never_come_are_asked_for_again() -> None:
    with scripted_client(2, shard_timeout_s=2.0, group=PLACE) as client:
        fail(client.shards[0], 1, SWALLOW, None, SWALLOW)
        fail(client.shards[1], 1, SWALLOW)
        client.step()
        assert client.shards[0].fired[SWALLOW] == 2
        assert client.shards[1].fired[SWALLOW] == 1
        assert client.endings() == [contributed(1)] * 2
        client.step()
        assert client.endings() == [contributed(1, 2)] * 2


@pytest.mark.parametrize("error", [QueueFull("full"), ShardNotReady("step 0 is not carried out yet")], ids=str)
def test_what_a_shard_cannot_take_now_is_tried_again_in_both_phases(client: ScriptedClient, error: ShardamError) -> None:
    fail(client.shards[0], 1, error, None, error, error)
    fail(client.shards[2], 1, error)
    client.step()
    assert client.endings() == [contributed(1)] * 3


def test_repeats_of_all_that_was_said_change_nothing(client: ScriptedClient) -> None:
    for shard in client.shards:
        fail(shard, 1, LOSE_ANSWER, LOSE_ANSWER, *[LOSE_ANSWER] * 2 if not shard.index else [])
    client.step()
    client.step()
    assert client.endings() == [contributed(1, 2)] * 3
    assert sorted(group_of(client).results) == [1, 2]


# -- restarts


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_restarts_before_its_part_came_gets_it(client: ScriptedClient, shard: int) -> None:
    client.step()
    client.shards[shard].restart()
    client.step()
    assert client.shards[shard].opened == 2
    assert client.endings() == [contributed(1, 2)] * 3


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_restarts_with_a_part_staged_that_it_never_acknowledged_gets_it_again(
    client: ScriptedClient, shard: int
) -> None:
    fail(client.shards[shard], 1, SWALLOW)
    client.queue_step()
    wait_for("the part to be staged", lambda: client.shards[shard].staged)
    client.shards[shard].restart()
    client.session.links[shard].stream().end(ShardUnreachable("cut"))
    client.pusher.flush()
    assert client.shards[shard].opened == 2
    assert client.endings() == [contributed(1)] * 3


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_restarts_after_staged_gets_no_part_again(client: ScriptedClient, shard: int) -> None:
    group_of(client).hold()
    client.queue_step()
    wait_for("the arrival", lambda: bool(group_of(client).arrivals))
    client.shards[shard].restart()
    client.session.links[shard].stream().end(ShardUnreachable("cut"))
    arrivals = len(group_of(client).arrivals)
    wait_for("home to be told again", lambda: len(group_of(client).arrivals) >= arrivals + 2)
    group_of(client).release()
    client.pusher.flush()
    assert calls(client.shards[shard]).count(("part", 1)) == 1
    client.step()
    assert client.shards[shard].opened == 2
    assert client.endings() == [contributed(1, 2)] * 3


def test_a_home_that_restarts_after_it_has_decided_says_how_the_step_ended(client: ScriptedClient) -> None:
    fail(client.shards[0], 1, None, SWALLOW)
    client.queue_step()
    wait_for("the decision", lambda: 1 in group_of(client).results)
    client.shards[0].restart()
    client.session.links[0].stream().end(ShardUnreachable("cut"))
    client.pusher.flush()
    client.step()
    assert client.endings() == [contributed(1, 2)] * 3


def test_a_shard_that_lost_a_part_which_it_had_acknowledged_is_lost(client: ScriptedClient) -> None:
    group_of(client).hold()
    client.queue_step()
    wait_for("the arrival", lambda: bool(group_of(client).arrivals))
    client.shards[0].restart(lineage=99)
    with pytest.raises(ShardLost) as caught:
        client.pusher.flush()
    assert (caught.value.acknowledged, caught.value.has) == (1, 0)


def test_staged_numbers_count_as_acknowledged(client: ScriptedClient) -> None:
    group_of(client).hold()
    client.queue_step()
    wait_for("the arrival", lambda: bool(group_of(client).arrivals))
    assert [link.acknowledged for link in client.session.links] == [1, 1, 1]
    group_of(client).release()
    client.pusher.flush()


# -- waiting


@pytest.mark.case("C061")
def test_a_step_may_wait_for_a_slow_worker_for_any_time_without_an_error_a_warning_or_a_new_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted_client(2, shard_timeout_s=0.5, client_lease_s=0.3, group=PLACE) as client:
        group_of(client).hold()
        running = Running(client.step)
        beats = client.shards[0].beats
        wait_for("several time-outs", lambda: client.shards[0].beats >= beats + 15)
        client.pusher.raise_error()
        assert not running.is_over
        group_of(client).release()
        assert running.outcome() is None
        assert client.shards[0].num_streams == 1
        assert caplog.text == ""


def test_a_home_that_does_nothing_while_a_step_waits_is_named_after_the_time_out() -> None:
    with scripted_client(2, shard_timeout_s=1.0, group=PLACE) as client:
        client.shards[0].faults_of[1] = collections.deque([None, *[FAIL_BEFORE] * 1000])
        with pytest.raises(ShardUnreachable, match="shard 0 at"):
            client.step()
        client.shards[0].faults_of.clear()
        client.pusher.flush()
        assert client.endings() == [contributed(1)] * 2


def test_a_wait_that_is_interrupted_leaves_the_contribution_under_way(client: ScriptedClient) -> None:
    group_of(client).hold()

    def interrupt() -> None:
        wait_for("the arrival", lambda: bool(group_of(client).arrivals))
        _thread.interrupt_main()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        client.step()
    interrupting.join(60)
    group_of(client).release()
    client.pusher.flush()
    client.step()
    assert client.endings() == [contributed(1, 2)] * 3


def test_finishing_waits_for_the_decision(client: ScriptedClient) -> None:
    group_of(client).hold()
    client.queue_step()
    wait_for("the arrival", lambda: bool(group_of(client).arrivals))
    running = Running(client.pusher.finish)
    wait_for("home to be told again", lambda: len(group_of(client).arrivals) >= 3)
    assert not running.is_over
    group_of(client).release()
    assert running.outcome() is None
    assert client.endings() == [contributed(1)] * 3
