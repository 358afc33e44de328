"""What allows to decide a move in Redis ends with the first shard that goes on, whoever else is paused (a real Redis)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from shardam_testing.processes import Valkey, running_valkey

from shardam_proto.registry import Plan
from shardam_server.shard.registration import MOVE_ALLOWED_S, Registration

PLAN = Plan("p", timeline=1, epoch=2, num_shards=4, seed=0, folder="c/reshard", checkpoint_id=9, keep_clients=True)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def registration(valkey: Valkey) -> Iterator[Registration]:
    with contextlib.closing(valkey.client()) as connection:
        connection.flushall()
    registration = Registration(valkey.url, "test", 10.0)
    yield registration
    registration.close()


def test_a_shard_that_goes_on_ends_the_permission_of_its_own_hold_alone(valkey: Valkey, registration: Registration) -> None:
    registration.allow_move(7, [11, 12])
    registration.allow_move(8, [11, 12])
    assert registration.end_move(7) is None
    assert registration.end_move(7) is None  # a repeat, because its answer was lost
    with contextlib.closing(valkey.client()) as connection:
        assert connection.get(registration.keys.move(7)) is None
        assert connection.get(registration.keys.move(8)) == b'["\\"incarnation\\": 11,", "\\"incarnation\\": 12,"]'
        assert 0 < connection.ttl(registration.keys.move(8)) <= MOVE_ALLOWED_S


def test_a_shard_that_asks_after_the_decision_learns_the_plan(valkey: Valkey, registration: Registration) -> None:
    registration.allow_move(7, [11, 12])
    with contextlib.closing(valkey.client()) as connection:
        connection.set(registration.keys.plan, PLAN.to_json())
    assert registration.end_move(7) == PLAN
