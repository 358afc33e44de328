"""The rules of numbers on one shard (PROTOCOL.md, section 4)."""

from __future__ import annotations

import pytest
from shardam_testing.matrix import num_threads

from shardam_proto.errors import ClientClosed, QueueFull, SequenceError, StaleState
from shardam_server.shard.clients import IDLE_S, WINDOW, Origin, Outcome
from shardam_server.shard.last_numbers import settle_number
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.state import ShardState

CLIENT = b"c" * 16


@pytest.fixture
def state() -> ShardState:
    state = ShardState(CpuDevice(num_threads()))
    state.open_client(CLIENT)
    return state


def run(state: ShardState, number: int, content: bytes = b"content", client_id: bytes = CLIENT) -> tuple[Outcome, bool]:
    origin = Origin(client_id, number, content)
    return state.run_number(origin, lambda: state.void([], origin))


def reason_of(state: ShardState, number: int, content: bytes = b"content", client_id: bytes = CLIENT) -> str:
    before = state.change_number
    with pytest.raises((ClientClosed, SequenceError, StaleState)) as error:
        run(state, number, content, client_id)
    assert state.change_number == before
    return error.value.reason


def test_a_repeat_gets_the_former_answer_and_is_not_applied_again(state: ShardState) -> None:
    first, repeated_first = run(state, 1)
    applied = state.change_number
    second, repeated_second = run(state, 1)
    assert (first, repeated_first, repeated_second) == (second, False, True)
    assert state.change_number == applied


def test_another_content_under_a_used_number_is_refused(state: ShardState) -> None:
    for number in (1, 2, 3):
        run(state, number)
    for number in (1, 2, 3):
        assert reason_of(state, number, b"other") == "SEQUENCE_REUSED"


def test_a_gap_names_the_last_number(state: ShardState) -> None:
    with pytest.raises(StaleState) as error:
        run(state, 3)
    assert (error.value.reason, error.value.metadata["last"]) == ("SEQUENCE_GAP", "0")
    assert error.value.rule.retryable


def test_outcomes_of_the_last_numbers_are_kept_and_older_ones_have_expired(state: ShardState) -> None:
    for number in range(1, WINDOW + 11):
        run(state, number)
    assert [run(state, number)[1] for number in range(11, WINDOW + 11)] == [True] * WINDOW
    assert [reason_of(state, number) for number in (-1, 0, 1, 10)] == ["SEQUENCE_EXPIRED"] * 4


def test_a_refused_change_leaves_its_number_open(state: ShardState) -> None:
    def refuse() -> Outcome:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        state.run_number(Origin(CLIENT, 1, b"bad"), refuse)
    assert run(state, 1, b"good") == (Outcome(), False)


def test_a_client_that_left_is_closed_and_an_unknown_one_unknown(state: ShardState) -> None:
    state.end_client(CLIENT)
    state.end_client(CLIENT)
    assert state.clients.num_open == 0
    assert reason_of(state, 1) == "CLIENT_CLOSED"
    with pytest.raises(ClientClosed):
        state.open_client(CLIENT)
    assert reason_of(state, 1, client_id=b"u" * 16) == "UNKNOWN_CLIENT"


def test_home_settles_the_numbers_of_an_ended_client_once_and_in_order(state: ShardState) -> None:
    with pytest.raises(ClientClosed, match="still open"):
        settle_number(state, CLIENT, 1, [])
    run(state, 1)
    state.end_client(CLIENT)
    with pytest.raises(ClientClosed, match="at number 1"):
        settle_number(state, CLIENT, 3, [])
    for _ in range(2):
        settle_number(state, CLIENT, 2, [])
    entry = state.clients.find(CLIENT)
    assert entry is not None
    assert (entry.last_number, entry.settled) == (2, False)


def test_room_for_a_new_client_is_made_of_closed_ones_only_that_are_settled_or_have_no_numbers() -> None:
    state = ShardState(CpuDevice(num_threads()), max_clients=3)
    for client_id in (b"a" * 16, b"b" * 16, b"n" * 16):
        state.open_client(client_id)
    with pytest.raises(QueueFull):
        state.open_client(b"c" * 16)
    run(state, 1, client_id=b"a" * 16)
    state.end_client(b"a" * 16)
    with pytest.raises(QueueFull, match="until all shards agree on their numbers"):
        state.open_client(b"c" * 16)
    state.end_client(b"n" * 16)
    state.open_client(b"c" * 16)
    state.end_client(b"a" * 16, settled=True)
    state.open_client(b"d" * 16)
    assert {client_id[:1] for client_id, _ in state.clients} == {b"b", b"c", b"d"}
    assert (len(state.clients), state.clients.num_open) == (3, 3)


def test_an_idle_client_that_is_closed_is_forgotten_only_when_it_is_settled_or_has_no_numbers(state: ShardState) -> None:
    for client_id in (b"unsettled", b"settled", b"numberless"):
        state.open_client(client_id, heartbeats=True)
    for client_id in (b"unsettled", b"settled"):
        run(state, 1, client_id=client_id)
    for client_id in (b"unsettled", b"settled", b"numberless"):
        state.end_client(client_id, settled=client_id == b"settled")
    late = max(entry.last_contact for _, entry in state.clients) + IDLE_S + 1
    assert state.forget_idle_clients(late) == 3
    assert [client_id for client_id, _ in state.clients] == [b"unsettled"]


def test_a_client_without_heartbeats_is_forgotten_after_a_day_without_contact(state: ShardState) -> None:
    state.open_client(b"h" * 16, heartbeats=True)
    entry = state.clients.find(CLIENT)
    assert entry is not None
    assert state.forget_idle_clients(entry.last_contact + IDLE_S - 1) == 0
    assert state.forget_idle_clients(entry.last_contact + IDLE_S + 60) == 1
    assert state.clients.find(CLIENT) is None
    assert state.clients.find(b"h" * 16) is not None
