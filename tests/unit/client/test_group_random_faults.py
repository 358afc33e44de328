"""Random faults on three shards at once while a member contributes: each step ends once and alike on every shard."""

from __future__ import annotations

import collections

import pytest
from shardam_testing.random_faults import RandomFaults
from shardam_testing.scripted_client import ScriptedClient, scripted_client
from shardam_testing.scripted_members import PLACE, contributed, group_of
from shardam_testing.scripted_shards import FAIL_BEFORE, LOSE_ANSWER, SWALLOW

from shardam import _backoff
from shardam._group import GroupOptions
from shardam._steps import StepKind
from shardam.errors import QueueFull, RowLimit, ShardNotReady, ShardUnreachable

NUM_STEPS = 60

KINDS: tuple[StepKind, ...] = ("gradient", "gradient", "empty", "gradient", "abstain")

LATE = (QueueFull, ShardNotReady, ShardUnreachable)
"""What is raised when faults, or a slow machine, took more than the time-out."""


def settle(client: ScriptedClient) -> int:
    """Waits until what was queued has ended; returns how many refusals were raised."""
    num_refused = 0
    while not client.session.ended:
        try:
            client.pusher.flush()
        except RowLimit:
            num_refused += 1
        except LATE:
            continue  # what is queued is sent on
        else:
            return num_refused
    raise AssertionError(f"the client has ended: {client.session.failure!r}")


def train(client: ScriptedClient) -> int:
    """Contributes to all steps, some of them queued behind one another; returns how many refusals were raised."""
    num_refused = 0
    for step in range(NUM_STEPS):
        num_refused += settle(client) if step % 3 == 0 else 0
        while True:
            try:
                client.queue_step(step % 3, KINDS[step % len(KINDS)])
            except RowLimit:
                num_refused += 1
            except LATE:
                num_refused += settle(client)
            else:
                break
    return num_refused + settle(client)


def shaken(client: ScriptedClient, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backoff, "MAX_WAIT_S", 0.1)
    for shard in client.shards:
        shard.faults = RandomFaults(shard, 30 * seed + shard.index, holds=False)


def require_fired(client: ScriptedClient) -> None:
    fired = sum((shard.fired for shard in client.shards), collections.Counter[str]())
    assert set(fired) >= {LOSE_ANSWER, FAIL_BEFORE, SWALLOW, "QueueFull", "RowLimit", "restart"}


@pytest.mark.parametrize("seed", [1, 2])
def test_every_contribution_ends_once_in_order_and_alike_on_every_shard(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_client(3, shard_timeout_s=4.0, client_lease_s=0.5, group=PLACE) as client:
        shaken(client, seed, monkeypatch)
        num_refused = train(client)
        require_fired(client)
        first, *others = client.endings()
        for other in others:
            assert [ending[:2] for ending in other] == [ending[:2] for ending in first]
        assert [number for number, _, _ in first] == list(range(1, NUM_STEPS + 1))
        for number, how, tables in first:
            expected = contributed(number, kind=KINDS[(number - 1) % len(KINDS)])
            assert how == "refused" or [(number, how, tables)] == expected
        assert sum(how == "refused" for _, how, _ in first) == num_refused > 0
        results = group_of(client).results
        assert sorted(results) == list(range(1, NUM_STEPS + 1))
        told = {arrival.header.number: arrival.header.step for arrival in group_of(client).arrivals}
        assert told == {number: number for number in range(1, NUM_STEPS + 1)}


def test_every_step_of_a_bounded_member_has_the_same_clock_on_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    place = GroupOptions("workers", 0, rank=0, world_size=2)
    with scripted_client(3, shard_timeout_s=4.0, client_lease_s=0.5, group=place) as client:
        shaken(client, 3, monkeypatch)
        train(client)
        require_fired(client)
        assert [[number for number, _, _ in endings] for endings in client.endings()] == [list(range(1, NUM_STEPS + 1))] * 3
        clocks = {(header.number, header.step) for shard in client.shards for header in shard.headers}
        assert clocks == {(number, number) for number in range(1, NUM_STEPS + 1)}
