"""The rules of numbers on one shard (PROTOCOL.md, section 4)."""

from __future__ import annotations

import pytest

from shardam_proto.errors import ClientClosed, QueueFull, SequenceError, StaleState
from shardam_server.shard.clients import Clients, Outcome

CLIENT = b"c" * 16


class Applied:
    """Counts applications and returns an outcome that tells them apart."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Outcome:
        self.count += 1
        return Outcome(steps={7: self.count})


@pytest.fixture
def clients() -> Clients:
    clients = Clients()
    clients.open(CLIENT)
    return clients


def test_a_repeat_gets_the_former_answer_and_is_not_applied_again(clients: Clients) -> None:
    apply = Applied()
    first, repeated_first = clients.run_number(CLIENT, 1, b"content", apply)
    second, repeated_second = clients.run_number(CLIENT, 1, b"content", apply)
    assert (first, repeated_first, repeated_second) == (second, False, True)
    assert apply.count == 1


def test_another_content_under_a_used_number_is_refused(clients: Clients) -> None:
    apply = Applied()
    clients.run_number(CLIENT, 1, b"content", apply)
    with pytest.raises(SequenceError) as error:
        clients.run_number(CLIENT, 1, b"other", apply)
    assert error.value.reason == "SEQUENCE_REUSED"
    assert apply.count == 1


def test_a_gap_names_the_last_number(clients: Clients) -> None:
    with pytest.raises(StaleState) as error:
        clients.run_number(CLIENT, 3, b"content", Applied())
    assert (error.value.reason, error.value.metadata["last"]) == ("SEQUENCE_GAP", "0")
    assert error.value.rule.retryable


@pytest.mark.parametrize("number", [0, -1, 1])
def test_a_number_before_the_last_has_expired(clients: Clients, number: int) -> None:
    for used in (1, 2):
        clients.run_number(CLIENT, used, b"content", Applied())
    with pytest.raises(SequenceError) as error:
        clients.run_number(CLIENT, number, b"content", Applied())
    assert error.value.reason == "SEQUENCE_EXPIRED"


def test_a_refused_change_leaves_its_number_open(clients: Clients) -> None:
    def refuse() -> Outcome:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        clients.run_number(CLIENT, 1, b"bad", refuse)
    apply = Applied()
    clients.run_number(CLIENT, 1, b"good", apply)
    assert apply.count == 1


def test_a_client_that_left_is_closed_and_an_unknown_one_unknown(clients: Clients) -> None:
    clients.leave(CLIENT)
    clients.leave(CLIENT)
    assert len(clients) == 0
    for action in (lambda: clients.open(CLIENT), lambda: clients.run_number(CLIENT, 1, b"", Applied())):
        with pytest.raises(ClientClosed) as error:
            action()
        assert error.value.reason == "CLIENT_CLOSED"
    with pytest.raises(ClientClosed) as error:
        clients.get(b"u" * 16)
    assert error.value.reason == "UNKNOWN_CLIENT"


def test_room_for_a_new_client_is_made_of_closed_ones_only() -> None:
    clients = Clients(max_clients=2)
    clients.open(b"a" * 16)
    clients.open(b"b" * 16)
    with pytest.raises(QueueFull):
        clients.open(b"c" * 16)
    clients.leave(b"a" * 16)
    clients.open(b"c" * 16)
    assert len(clients) == 2
