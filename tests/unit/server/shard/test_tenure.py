"""When an owner that slept may act again."""

from __future__ import annotations

import pytest

from shardam_proto.errors import ShardNotReady
from shardam_server.shard.tenure import Tenure

LEASE_S = 6.0


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tenure(clock: Clock) -> Tenure:
    tenure = Tenure(LEASE_S, clock)
    tenure.tick()
    return tenure


def test_a_process_without_a_name_has_none_to_oversleep(clock: Clock) -> None:
    tenure = Tenure(LEASE_S, clock)
    clock.seconds += 1000
    tenure.check()


def test_ticks_keep_it_though_redis_confirms_nothing(clock: Clock, tenure: Tenure) -> None:
    for _ in range(100):
        clock.seconds += LEASE_S / 6
        tenure.tick()
        tenure.check()


def test_half_a_lease_without_a_tick_is_no_pause_yet(clock: Clock, tenure: Tenure) -> None:
    clock.seconds += LEASE_S / 2
    tenure.check()


@pytest.mark.parametrize("notices", ["check", "tick", "suspended"])
def test_a_longer_gap_suspends_whoever_notices_it_first_until_redis_confirms(
    clock: Clock, tenure: Tenure, notices: str
) -> None:
    clock.seconds += LEASE_S / 2 + 0.1
    if notices == "tick":
        tenure.tick()
    elif notices == "suspended":
        assert tenure.suspended
    with pytest.raises(ShardNotReady, match="paused beyond half of its lease"):
        tenure.check()
    tenure.tick()
    assert tenure.suspended  # the loop goes on; that alone proves nothing
    tenure.confirm(tenure.tick())
    tenure.check()


def test_an_answer_to_a_question_from_before_the_pause_confirms_nothing(clock: Clock, tenure: Tenure) -> None:
    asked_at = tenure.tick()
    clock.seconds += LEASE_S
    tenure.confirm(asked_at)
    assert tenure.suspended
    tenure.confirm(tenure.tick())
    assert not tenure.suspended


def test_a_second_pause_suspends_again(clock: Clock, tenure: Tenure) -> None:
    for _ in range(2):
        clock.seconds += LEASE_S
        assert tenure.suspended
        tenure.confirm(tenure.tick())
        assert not tenure.suspended


def test_a_fenced_process_never_acts_again(tenure: Tenure) -> None:
    tenure.fence()
    tenure.confirm(tenure.tick())
    assert tenure.fenced
    with pytest.raises(ShardNotReady, match="taken this shard's place"):
        tenure.check()
