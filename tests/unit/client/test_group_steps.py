"""A member's contributions to the steps of a sync group, counted, refused or too late (PROTOCOL.md, section 5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from shardam_testing.scripted_client import ScriptedClient, scripted_client
from shardam_testing.scripted_members import PLACE, Running, calls, contributed, fail, group_of, hows
from shardam_testing.scripted_shards import INFO
from shardam_testing.waiting import wait_for

from shardam._contributions import Contribution
from shardam._steps import refused_step, table_step_after
from shardam.errors import (
    GroupMismatch,
    NonFiniteGradient,
    RowLimit,
    StepTimeout,
)

FULL = RowLimit("no room for new rows")


@pytest.fixture
def client() -> Iterator[ScriptedClient]:
    with scripted_client(3, group=PLACE) as client:
        yield client


# -- a step


def test_a_contribution_is_staged_on_every_shard_then_home_is_told_and_its_answer_closes_the_number(
    client: ScriptedClient,
) -> None:
    change = client.step(1)
    assert [calls(shard) for shard in client.shards] == [[("part", 1), ("arrive", 1)], [("part", 1)], [("part", 1)]]
    assert client.endings() == [contributed(1)] * 3
    assert isinstance(change, Contribution)
    assert change.result is not None
    assert change.result.num_contributions == 3
    assert table_step_after(change, INFO.table_id) == 1
    headers = [header for shard in client.shards for header in shard.headers]
    assert {(header.number, header.step, header.rank) for header in headers} == {(1, 1, 1)}
    assert {header.client_id for header in headers} == {client.session.client_id}


def test_every_step_has_the_next_number_and_the_next_step_from_where_the_client_joined() -> None:
    with scripted_client(2, group=PLACE) as client:
        membership = client.session.membership
        assert membership is not None
        membership.step = group_of(client).first_step = 7
        for expected in (7, 8, 9):
            assert membership.step == expected
            assert client.step().step == expected
        assert [header.step for header in client.shards[1].headers] == [7, 8, 9]
        assert [header.number for header in client.shards[1].headers] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["empty", "abstain"])
def test_a_step_without_a_gradient_is_a_contribution_without_tables(client: ScriptedClient, kind: str) -> None:
    client.step(kind=kind)  # type: ignore[arg-type]  # a StepKind
    assert client.endings() == [contributed(1, kind=kind)] * 3
    assert not group_of(client).arrivals[0].peaks


def test_home_is_told_the_largest_peak_of_all_shards(client: ScriptedClient) -> None:
    group_of(client).peak_of = {0: 2.0, 1: 2.0**63, 2: 0.5}
    client.step()
    (arrival,) = group_of(client).arrivals
    assert [(peak.table_id, peak.peak) for peak in arrival.peaks] == [(INFO.table_id, 2.0**63)]
    assert not arrival.HasField("refusal")


def test_one_number_is_in_flight_and_what_is_queued_waits_in_the_client(client: ScriptedClient) -> None:
    group_of(client).hold()
    for shard in (0, 1, 2):
        client.queue_step(shard)
    wait_for("the first to arrive", lambda: len(group_of(client).arrivals) >= 2)
    assert {number for shard in client.shards for _, number in calls(shard)} == {1}
    group_of(client).release()
    client.pusher.flush()
    assert client.endings() == [contributed(1, 2, 3)] * 3


def test_row_changes_of_a_member_carry_its_step_and_take_no_part_in_it(client: ScriptedClient) -> None:
    client.step()
    client.assign(client.ids_of(1))
    client.step()
    assert [(header.number, header.step) for header in client.shards[1].headers] == [(1, 1), (2, 2), (3, 2)]
    assert client.endings() == [[*contributed(1), (2, "assign", []), *contributed(3)]] * 3


def test_a_row_change_refused_by_one_shard_is_closed_there_as_ever(client: ScriptedClient) -> None:
    fail(client.shards[1], 1, FULL)
    with pytest.raises(RowLimit):
        client.assign(client.ids_of(1))
    client.step()
    assert client.endings()[1] == [(1, "void", []), *contributed(2)]


# -- refused steps


def test_a_step_that_is_refused_raises_its_reason_and_the_client_goes_on_with_the_next(client: ScriptedClient) -> None:
    group = group_of(client)
    group.refusals.extend(
        [
            GroupMismatch("other hyper-parameters", metadata={"ranks": "0, 1"}),
            StepTimeout("rank 2 did not arrive", metadata={"ranks": "2"}),
            NonFiniteGradient("a sum is too large"),
        ]
    )
    for error, ranks in ((GroupMismatch, "0, 1"), (StepTimeout, "2")):
        with pytest.raises(error) as caught:
            client.step()
        assert caught.value.metadata["ranks"] == ranks
    client.queue_step()
    with pytest.raises(NonFiniteGradient, match="a sum is too large"):
        client.pusher.flush()
    client.step()
    assert [(number, how) for number, how, _ in client.shards[2].closed] == [
        (1, "refused"),
        (2, "refused"),
        (3, "refused"),
        (4, "gradient"),
    ]
    assert sorted(group.results) == [1, 2, 3, 4]


@pytest.mark.parametrize("refusing", [[0], [1], [0, 2], [0, 1, 2]], ids=str)
def test_a_part_refused_by_a_shard_is_told_to_home_which_refuses_the_step(client: ScriptedClient, refusing: list[int]) -> None:
    for shard in refusing:
        fail(client.shards[shard], 1, FULL)
    with pytest.raises(RowLimit, match=f"no room for new rows \\(refused by shard {refusing[0]}\\)"):
        client.step(1)
    (arrival,) = group_of(client).arrivals
    assert arrival.refusal.reason == "ROW_LIMIT"
    client.step(1)
    assert hows(client) == [["refused", "gradient"]] * 3
    assert all(method != "close" for shard in client.shards for method, _ in calls(shard))


def test_a_step_that_the_client_refuses_itself_is_refused_for_all_and_not_raised_again(client: ScriptedClient) -> None:
    change = refused_step(client.session, NonFiniteGradient("NaN for ids [7]"))
    assert change is not None
    client.pusher.submit(change)
    client.pusher.flush()
    (arrival,) = group_of(client).arrivals
    assert (arrival.refusal.reason, arrival.refusal.message) == ("NON_FINITE_GRADIENT", "NaN for ids [7]")
    client.step()
    assert hows(client) == [["refused", "gradient"]] * 3


# -- steps that were decided without this client


def test_a_contribution_that_comes_after_its_step_raises_and_the_next_one_counts(client: ScriptedClient) -> None:
    group_of(client).decide_without(1)
    with pytest.raises(StepTimeout, match="step 1 was decided without this rank"):
        client.step()
    assert not group_of(client).arrivals
    client.step()
    assert hows(client) == [["late", "gradient"]] * 3


def test_a_step_decided_while_a_part_was_staged_on_some_shards_ends_alike_on_all(client: ScriptedClient) -> None:
    gate = threading.Event()
    fail(client.shards[1], 1, gate)
    running = Running(client.step)
    wait_for("two shards to have it", lambda: client.shards[0].staged and client.shards[2].staged)
    group_of(client).decide_without(1)
    gate.set()
    assert isinstance(running.outcome(), StepTimeout)
    assert not group_of(client).arrivals
    client.step()
    assert hows(client) == [["late", "gradient"]] * 3


def test_an_arrival_at_a_step_that_was_decided_without_it_is_told_so(client: ScriptedClient) -> None:
    group_of(client).hold()
    running = Running(client.step)
    wait_for("the arrival", lambda: bool(group_of(client).arrivals))
    group_of(client).decide_without(1)
    group_of(client).release()
    assert isinstance(running.outcome(), StepTimeout)
    client.step()
    assert hows(client) == [["late", "gradient"]] * 3


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_number_refused_by_a_shard_and_decided_without_it_is_closed_there_by_hand(
    client: ScriptedClient, refusing: int
) -> None:
    gate = threading.Event()
    fail(client.shards[refusing], 1, FULL)
    fail(client.shards[2], 1, gate)
    running = Running(client.step)
    wait_for("the refusal", lambda: client.shards[refusing].refused["ROW_LIMIT"])
    group_of(client).decide_without(1)
    gate.set()
    assert isinstance(running.outcome(), StepTimeout)
    client.step()
    assert hows(client)[refusing] == ["skip", "gradient"]
    assert hows(client)[2] == ["late", "gradient"]
