"""A member of a bounded group: its pushes are applied on arrival and count on its clock (PROTOCOL.md, section 5)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardam_testing.scripted_client import ScriptedClient, scripted_client
from shardam_testing.scripted_members import fail, hows
from shardam_testing.scripted_shards import INFO, LOSE_ANSWER

from shardam._group import GroupOptions
from shardam.errors import (
    RowLimit,
)

FULL = RowLimit("no room for new rows")


@pytest.fixture
def bounded() -> Iterator[ScriptedClient]:
    with scripted_client(3, group=GroupOptions("workers", 2, rank=1, world_size=3)) as client:
        yield client


def test_pushes_of_a_bounded_member_carry_its_clock_and_are_applied_on_arrival(bounded: ScriptedClient) -> None:
    membership = bounded.session.membership
    assert membership is not None
    membership.step = 5
    for _ in range(20):
        bounded.queue_step()
    bounded.assign(bounded.ids_of(1))
    bounded.step()
    assert [(header.number, header.step) for header in bounded.shards[1].headers] == [
        *[(number, number + 4) for number in range(1, 21)],
        (21, 0),  # row changes are on nobody's clock
        (22, 25),
    ]
    assert all(header.rank == (1 if header.step else 0) for header in bounded.shards[1].headers)
    assert membership.step == 26


@pytest.mark.parametrize("kind", ["empty", "abstain"])
def test_a_bounded_step_without_a_gradient_is_skipped_and_counts(bounded: ScriptedClient, kind: str) -> None:
    bounded.step()
    fail(bounded.shards[1], 2, LOSE_ANSWER)
    bounded.step(kind=kind)  # type: ignore[arg-type]  # a StepKind
    bounded.step()
    assert hows(bounded) == [["push", "skip", "push"]] * 3
    assert [header.step for header in bounded.shards[0].headers] == [1, 2, 3]


def test_what_closes_a_refused_push_of_a_bounded_member_carries_its_clock(bounded: ScriptedClient) -> None:
    bounded.step()
    fail(bounded.shards[1], 2, FULL)
    with pytest.raises(RowLimit):
        bounded.step()
    closing = bounded.shards[1].headers[-1]
    assert (closing.number, closing.step) == (2, 2)
    assert bounded.shards[1].closed[-1] == (2, "void", [INFO.table_id])
