"""What allows to decide a move in Redis ends with the first shard that goes on, whoever else is paused (a real Redis)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from shardam_testing.processes import Valkey, running_valkey

from shardam_proto.registry import ClusterEntry, Plan, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_server.shard.registration import MOVE_ALLOWED_S, Claim, Lease, Registration
from shardam_server.shard.shared_entries import PlanAnswer, PlanEntry

CLUSTER = ClusterEntry("0123456789abcdef", 2, 0)
HOLD_ID = 7
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


def claim(registration: Registration, index: int, incarnation: int) -> None:
    entry = ShardEntry(index, "127.0.0.1:1", "127.0.0.1:2", incarnation, 5 + index, "cpu", 1, ready=True)
    standing = registration.claim(Claim(entry, 60.0, CLUSTER, route_map=RouteMap(1, 2)))
    assert standing.lease is Lease.HELD


def decide(registration: Registration) -> PlanAnswer:
    return registration.decide_move(PlanEntry(PLAN, ClusterEntry(CLUSTER.cluster_id, 4, 0), ()), None, 11, HOLD_ID, 2)


def test_a_move_is_decided_while_it_is_allowed_and_all_shards_are_those_that_were_cut(registration: Registration) -> None:
    claim(registration, 0, 11)
    claim(registration, 1, 12)
    registration.allow_move(HOLD_ID, [11, 12])
    assert decide(registration) is PlanAnswer.DONE
    assert registration.end_move(HOLD_ID) == PLAN
    assert decide(registration) is PlanAnswer.DONE  # a repeat, because its answer was lost
    view = registration.view()
    assert view.entry == ClusterEntry(CLUSTER.cluster_id, 4, 0)
    assert view.route_map == RouteMap(2, 4)
    assert registration.read_shared().lineages == {}


def test_a_move_is_not_decided_once_a_shard_has_gone_on_or_redis_was_emptied(
    valkey: Valkey, registration: Registration
) -> None:
    claim(registration, 0, 11)
    claim(registration, 1, 12)
    assert decide(registration) is PlanAnswer.NOT_ALLOWED
    registration.allow_move(HOLD_ID, [11, 12])
    assert registration.end_move(HOLD_ID) is None
    assert decide(registration) is PlanAnswer.NOT_ALLOWED
    assert registration.view().entry == CLUSTER
    assert registration.view().route_map == RouteMap(1, 2)


def test_a_move_is_not_decided_over_a_shard_that_was_started_anew_since_it_was_cut(registration: Registration) -> None:
    claim(registration, 0, 11)
    claim(registration, 1, 13)
    registration.allow_move(HOLD_ID, [11, 12])
    assert decide(registration) is PlanAnswer.NOT_ALLOWED


def test_a_move_is_decided_over_a_shard_that_was_cut_and_has_died(registration: Registration) -> None:
    claim(registration, 0, 11)
    registration.allow_move(HOLD_ID, [11, 12])
    assert decide(registration) is PlanAnswer.DONE


def test_a_shard_that_renews_after_the_move_learns_that_its_state_is_from_before_it(registration: Registration) -> None:
    claim(registration, 0, 11)
    claim(registration, 1, 12)
    registration.allow_move(HOLD_ID, [11, 12])
    decide(registration)
    entry = ShardEntry(1, "127.0.0.1:1", "127.0.0.1:2", 12, 6, "cpu", 1, ready=True)
    standing = registration.claim(Claim(entry, 60.0, CLUSTER, route_map=RouteMap(1, 2), change_number=9))
    assert standing.before_plan
    assert registration.view().route_map == RouteMap(2, 4)
    assert registration.read_shared().lineages == {}
