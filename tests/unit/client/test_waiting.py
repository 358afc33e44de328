"""What a worker says while its group keeps it waiting."""

from __future__ import annotations

import pytest

from shardam._group import GroupOptions
from shardam._waiting import FIRST_WARNING_S, StepWait, ranks_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("shardam._waiting.time.monotonic", lambda: now[0])
    return now


def test_a_wait_is_said_after_some_seconds_and_then_less_and_less_often(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    wait = StepWait(GroupOptions("ads", None, rank=0, world_size=4))
    wait.begin()
    said: list[float] = []
    for second in range(200):
        clock[0] = 100.0 + second
        wait.note(7, [1, 2, 3], [2, 3])
        if caplog.messages[len(said) :]:
            said.append(second)
    assert said == [FIRST_WARNING_S * factor for factor in (1, 2, 4, 8, 16, 32)]
    assert caplog.messages[0] == (
        "rank 0 of group 'ads' has waited 5 s at step 7 for ranks 2, 3, which have not joined and rank 1, which is behind; "
        "`shardam status` shows where each worker is"
    )


def test_a_wait_for_ranks_that_are_not_known_or_that_has_just_begun_says_nothing(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    wait = StepWait(GroupOptions("ads", None, rank=0, world_size=4))
    wait.begin()
    clock[0] += 60
    wait.note(7, [], [])
    wait.begin()
    wait.note(8, [1], [])
    assert not caplog.messages


def test_ranks_are_read_from_an_errors_metadata() -> None:
    assert ranks_of({"missing_ranks": "1,12"}, "missing_ranks") == [1, 12]
    assert ranks_of({"missing_ranks": "1,12"}, "absent_ranks") == []
