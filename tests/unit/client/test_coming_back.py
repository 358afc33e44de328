"""Connections that break, shards that come back elsewhere, and signs of life (PROTOCOL.md, sections 3, 4 and 6)."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest
import redis
from shardam_testing.scripted_client import ScriptedClient, pushed, scripted_client
from shardam_testing.scripted_shards import INFO, ScriptedShard, view_of
from shardam_testing.waiting import wait_for

from shardam._backoff import MAX_HURRIES, Backoff, Deadline
from shardam._discovery import wait_for_cluster
from shardam._link import ShardLink
from shardam._reads import read_weights
from shardam._session import Session
from shardam._shards import open_client
from shardam.errors import BadToken, ClientClosed, ShardLost, ShardNotReady, ShardUnreachable, WrongCluster
from shardam_proto.errors import StaleState
from shardam_proto.registry import ClusterEntry, ClusterView, Keys
from shardam_proto.v1 import embedding_pb2


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedClient]:
    with scripted_client(2) as client:
        monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: view_of(client.shards))
        yield client


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Notes how long whoever tries again waits each time."""
    noted: list[float] = []
    actual = Backoff.next_s

    def next_s(backoff: Backoff, *, hurry: bool = False) -> float:
        noted.append(actual(backoff, hurry=hurry))
        return noted[-1]

    monkeypatch.setattr(Backoff, "next_s", next_s)
    return noted


@contextlib.contextmanager
def running_shard(index: int) -> Iterator[ScriptedShard]:
    """Starts one more shard."""
    shard = ScriptedShard(index)
    shard.start()
    try:
        yield shard
    finally:
        shard.stop()


def port_of(shard: ScriptedShard) -> int:
    return int(shard.address.rpartition(":")[2])


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """Takes connections and never says a word, as a host does that has lost its route back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


# -- where a shard is


@pytest.mark.case("C100")
def test_a_shard_that_stopped_for_a_while_is_used_soon_after_it_is_back_by_changes_and_reads(client: ScriptedClient) -> None:
    client.push(1)
    shard = client.shards[1]
    port = port_of(shard)
    shard.stop()
    client.queue(1)
    reading = threading.Thread(target=lambda: read_weights(client.session, [(INFO, client.ids_of(1))]))
    reading.start()
    lane = client.pusher._log._lanes[1]
    wait_for("some tries", lambda: lane._backoff.num_waits >= 5)
    shard.restart()
    shard.start(port)
    client.pusher.flush()
    reading.join(60)
    assert not reading.is_alive()
    assert client.endings() == [pushed(1, 2)] * 2
    assert shard.opened == 2


@pytest.mark.case("C101")
def test_a_shard_is_followed_to_its_new_address_while_another_shard_has_the_old_one(client: ScriptedClient) -> None:
    client.push(1)
    shard = client.shards[1]
    old_port = port_of(shard)
    shard.stop()
    stranger = ScriptedShard(0, incarnation=77)
    stranger.start(old_port)
    try:
        shard.restart()
        shard.start()
        client.push(1)
        read_weights(client.session, [(INFO, client.ids_of(1))])
    finally:
        stranger.stop()
    assert stranger.closed == []
    assert client.endings() == [pushed(1, 2)] * 2
    assert client.session.links[1].address == shard.address


@pytest.mark.case("C101")
def test_a_stranger_at_the_address_is_tried_again_until_the_shard_registers_elsewhere(client: ScriptedClient) -> None:
    client.push(1)
    shard = client.shards[1]
    old_port = port_of(shard)
    shard.stop()
    stranger = ScriptedShard(0, incarnation=77)
    stranger.start(old_port)
    try:
        client.queue(1)
        wait_for("the stranger to be asked", lambda: stranger.opened >= 2)
        assert not client.session.ended
        shard.restart()
        shard.start()
        client.pusher.flush()
    finally:
        stranger.stop()
    assert client.endings() == [pushed(1, 2)] * 2


def test_a_new_process_that_is_registered_is_reached_over_a_new_channel(client: ScriptedClient) -> None:
    client.push(1)
    shard, way = client.shards[1], client.session.links[1]._way
    port = port_of(shard)
    shard.stop()
    shard.restart()
    client.queue(1)
    wait_for("another channel", lambda: client.session.links[1]._way is not way)
    shard.start(port)
    client.pusher.flush()
    assert client.endings() == [pushed(1, 2)] * 2


@pytest.mark.case("C100")
def test_a_shard_that_is_registered_as_ready_again_is_used_without_a_wait_by_changes_and_reads(
    client: ScriptedClient, waits: list[float]
) -> None:
    for call in (lambda: client.push(1), lambda: read_weights(client.session, [(INFO, client.ids_of(1))])):
        client.push(1)
        shard = client.shards[1]
        shard.stop()
        shard.restart()
        shard.start()
        waits.clear()
        call()
        assert set(waits) == {0.0}
    assert client.endings() == [pushed(1, 2, 3)] * 2


@pytest.mark.case("C100")
def test_a_shard_that_is_registered_but_not_ready_yet_is_given_time(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    client.push(1)
    shard = client.shards[1]
    view = view_of(client.shards)
    monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: view)
    shard.stop()
    shard.restart()
    view.shards[1] = shard.entry(ready=False)
    client.queue(1)
    wait_for("some waits", lambda: len(waits) >= 4)
    assert 0.0 not in waits
    shard.start()
    view.shards[1] = shard.entry()
    client.pusher.flush()
    assert client.endings() == [pushed(1, 2)] * 2


def test_two_processes_that_contend_for_a_shard_are_not_asked_in_a_hurry_for_ever(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    shard = client.shards[1]
    shard.faults.extend([StaleState("another life", reason="NEW_INCARNATION")] * 1000)
    numbers = itertools.count(100)

    def opened(session: Session, link: ShardLink, timeout_s: float) -> embedding_pb2.OpenResponse:
        answer = open_client(session, link, timeout_s)
        answer.header.incarnation = shard.incarnation = next(numbers)
        return answer

    monkeypatch.setattr("shardam._recovery.open_client", opened)
    client.queue(1)
    wait_for("some waits", lambda: len(waits) >= 10)
    runs = [len(list(run)) for hurries, run in itertools.groupby(waits, lambda wait_s: wait_s == 0.0) if hurries]
    assert max(runs) == MAX_HURRIES
    shard.faults.clear()
    client.pusher.flush()


def test_a_shard_that_is_not_ready_and_was_replaced_without_knowing_it_is_left_for_the_one_in_its_place(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.push(1)
    suspended = client.shards[1]
    suspended.faults.extend([ShardNotReady("suspended until its name is confirmed")] * 1000)
    client.queue(1)
    wait_for("some tries", lambda: suspended.fired["ShardNotReady"] >= 2)
    with running_shard(1) as successor:
        successor.restart()
        with suspended.lock:
            successor.last, successor.outcomes = suspended.last, dict(suspended.outcomes)
        view = view_of([client.shards[0], successor])
        monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: view)
        client.pusher.flush()
        read_weights(client.session, [(INFO, client.ids_of(1))])
        assert client.session.links[1].address == successor.address
        assert (suspended.closed, successor.closed) == (pushed(1), pushed(2))
        client.pusher.close()
        client.session.close()


def test_a_connection_on_which_nothing_is_heard_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_client(2, shard_timeout_s=2.0) as client, silent_listener() as silence:
        client.push(1)
        link, shard = client.session.links[1], client.shards[1]
        entry = shard.entry()
        link._replace(link._way, silence, ShardUnreachable("moved"))
        monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: view_of(client.shards))
        client.push(1)
        read_weights(client.session, [(INFO, client.ids_of(1))])
        assert link.address == entry.address
        assert client.endings() == [pushed(1, 2)] * 2


def test_another_cluster_under_the_same_name_ends_the_client(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ClusterView(ClusterEntry("another", 2, seed=0), None, {})
    monkeypatch.setattr("shardam._recovery.read_cluster", lambda *_: view)
    client.shards[1].stop()
    with pytest.raises(WrongCluster, match="is another one now"):
        client.push(1)
    with pytest.raises(WrongCluster):
        client.session.check()


def test_a_token_that_is_refused_on_a_stream_ends_the_client(client: ScriptedClient) -> None:
    client.shards[1].stream_faults.append(BadToken("the token is wrong"))
    with pytest.raises(BadToken, match="the token is wrong"):
        client.push(1)
    with pytest.raises(BadToken):
        client.session.check()


def test_a_lost_shard_is_named_with_the_remedy_at_once_when_a_client_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of([ScriptedShard(index) for index in range(3)])
    view.shards[1] = ScriptedShard(1).entry(ready=False, lost=True)
    monkeypatch.setattr("shardam._discovery.read_cluster", lambda *_: view)
    with pytest.raises(ShardLost, match=r"shard 1 is LOST.*`shardam forget-shard --index 1`"):
        wait_for_cluster(redis.Redis(), Keys("prod"), "nowhere", Deadline(60.0))


# -- signs of life


def test_signs_of_life_reach_home_alone_also_while_a_caller_waits() -> None:
    gate = threading.Event()
    with scripted_client(2, client_lease_s=0.3) as client:
        client.shards[1].faults.append(gate)
        pushing = threading.Thread(target=lambda: client.push(1))
        pushing.start()
        wait_for("the push to wait", lambda: bool(client.shards[1].seen))
        beats = client.shards[0].beats
        wait_for("signs of life", lambda: client.shards[0].beats >= beats + 5)
        gate.set()
        pushing.join(60)
        assert not pushing.is_alive()
        assert client.shards[1].beats == 0
        assert all(shard.wants_heartbeats for shard in client.shards)


def test_an_idle_client_outlasts_lost_beats_and_a_restart_of_home(caplog: pytest.LogCaptureFixture) -> None:
    with scripted_client(1, client_lease_s=0.3) as client:
        home = client.shards[0]
        home.beat_faults.extend([ShardNotReady("drains")] * 3)
        wait_for("the beats to be lost", lambda: not home.beat_faults)
        home.restart()
        beats = home.beats
        wait_for("signs of life", lambda: home.beats >= beats + 3)
        assert home.opened == 2
        assert not client.session.ended
        assert caplog.text.count("home did not take a sign of life") <= 2  # one line for each series, not for each beat


def test_an_idle_client_notices_that_home_has_lost_what_it_acknowledged() -> None:
    with scripted_client(1, client_lease_s=0.3) as client:
        client.push(0)
        client.shards[0].restart(lineage=99)
        wait_for("the client to end", lambda: client.session.ended)
        with pytest.raises(ShardLost) as caught:
            client.session.check()
        assert (caught.value.acknowledged, caught.value.has) == (1, 0)


def test_a_client_that_home_has_closed_ends_and_says_that_it_was_silent_too_long() -> None:
    with scripted_client(2, client_lease_s=0.3) as client:
        for shard in client.shards:
            shard.is_closed = True
        wait_for("the client to end", lambda: client.session.ended)
        with pytest.raises(ClientClosed, match=r"silent for 0.3 s.*paused.*Connect again"):
            client.push(0)


def test_a_shard_without_a_lease_gets_no_signs_of_life() -> None:
    with scripted_client(1, client_lease_s=0.0) as client:
        client.push(0)
        assert [thread.name for thread in client.session._threads] == ["shardam-lane-0"]
