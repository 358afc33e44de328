"""Ticks go on whatever Redis does, and the loss of the name ends everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from shardam_testing.waiting import wait_for

from shardam_proto.errors import RedisUnreachable
from shardam_server.shard.registration import Lease
from shardam_server.shard.renewal import Renewal
from shardam_server.shard.tenure import Tenure

LEASE_S = 0.06


class Watched:
    """A renewal whose Redis is a function."""

    def __init__(self, redis: Callable[[], Lease]) -> None:
        self.now = 0.0
        self.num_ticks = 0
        self.tenure = Tenure(1000.0, self._read_clock)
        self.ended = threading.Event()
        self.renewal = Renewal(self.tenure, redis, LEASE_S, self.ended.set)
        self.renewal.start()

    def _read_clock(self) -> float:
        self.num_ticks += 1
        return self.now


@pytest.fixture
def watch() -> Iterator[Callable[[Callable[[], Lease]], Watched]]:
    started: list[Watched] = []

    def start(redis: Callable[[], Lease]) -> Watched:
        started.append(Watched(redis))
        return started[-1]

    yield start
    for watched in started:
        watched.renewal.stop()


Watch = Callable[[Callable[[], Lease]], Watched]


def test_ticks_do_not_wait_for_a_redis_that_hangs(watch: Watch) -> None:
    hanging, asked = threading.Event(), threading.Event()

    def redis() -> Lease:
        asked.set()
        hanging.wait(30)
        return Lease.HELD

    watched = watch(redis)
    assert asked.wait(30)
    before = watched.num_ticks
    wait_for("more ticks", lambda: watched.num_ticks > before + 10)
    assert not watched.tenure.suspended
    hanging.set()


def test_a_redis_that_fails_is_said_once_and_asked_again(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([RedisUnreachable("no answer")] * 5)
    asked = []

    def redis() -> Lease:
        asked.append(1)
        error = next(answers, None)
        if error is not None:
            raise error
        return Lease.HELD

    with caplog.at_level("INFO"):
        watched = watch(redis)
        wait_for("an answer", lambda: len(asked) > 7)
    assert not watched.tenure.fenced
    said = [record.message for record in caplog.records]
    assert said == ["no answer; pulls and pushes go on, creating tables and new connections wait", "Redis answers again"]


@pytest.mark.parametrize("lease", [Lease.TAKEN, Lease.OTHER_LINEAGE])
def test_another_owner_fences_at_once(watch: Watch, lease: Lease, caplog: pytest.LogCaptureFixture) -> None:
    watched = watch(lambda: lease)
    assert watched.ended.wait(30)
    assert watched.tenure.fenced
    assert "fenced" in caplog.text


def test_another_cluster_in_redis_is_said_once_and_stops_nothing(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def redis() -> Lease:
        asked.append(1)
        return Lease.OTHER_CLUSTER

    watched = watch(redis)
    wait_for("several renewals", lambda: len(asked) > 3)
    assert not watched.tenure.fenced
    assert caplog.text.count("Redis knows another cluster") == 1


def test_a_renewal_that_breaks_ends_the_process_rather_than_the_name_alone(watch: Watch) -> None:
    def redis() -> Lease:
        raise ZeroDivisionError

    watched = watch(redis)
    assert watched.ended.wait(30)
    assert watched.tenure.fenced
