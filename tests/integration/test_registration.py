"""What a shard writes to Redis, against a real one: each step compares and sets, from any thread, and may be repeated."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Iterator

import pytest
from shardam_testing.processes import Valkey, running_valkey
from shardam_testing.waiting import wait_for

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import ClusterEntry, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_server.shard.known_lineages import HighMark
from shardam_server.shard.registration import Claim, Lease, Registration

CLUSTER = ClusterEntry("0123456789abcdef", 2, 0)
OTHER_CLUSTER = ClusterEntry("fedcba9876543210", 2, 0)
MAP = RouteMap(epoch=3, num_shards=2)
FOLDER, COPY = "machine:7:1", "machine:7:12"
OWNER = Claim(ShardEntry(1, "127.0.0.1:1", "127.0.0.1:2", 11, 2**63 - 1, "cpu", 1, ready=True, folder=FOLDER), 60.0, CLUSTER)
LOST = dataclasses.replace(
    OWNER, entry=dataclasses.replace(OWNER.entry, incarnation=12, lineage=0, ready=False, lost=True, folder="")
)
FORMED = dataclasses.replace(OWNER, route_map=MAP, change_number=40)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def registration(valkey: Valkey) -> Iterator[Registration]:
    connection = valkey.client()
    connection.flushall()
    connection.close()
    registration = Registration(valkey.url, "test", 10.0)
    yield registration
    registration.close()


def another(claim: Claim, *, incarnation: int = 99, lineage: int | None = None, folder: str | None = None) -> Claim:
    """Returns the same claim by another process, which holds a folder or none."""
    entry = dataclasses.replace(claim.entry, incarnation=incarnation, folder=folder or "")
    if lineage is not None:
        entry = dataclasses.replace(entry, lineage=lineage)
    return dataclasses.replace(claim, entry=entry, has_folder=folder is not None)


@pytest.mark.case("C113")
def test_a_name_is_taken_renewed_and_released_from_whatever_thread(registration: Registration) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as first, concurrent.futures.ThreadPoolExecutor(1) as second:
        assert first.submit(registration.claim, OWNER).result().lease is Lease.HELD
        assert second.submit(registration.claim, OWNER).result().lease is Lease.HELD
        assert second.submit(registration.claim, another(OWNER)).result().lease is Lease.TAKEN
    asyncio.run(asyncio.to_thread(registration.release, 1, 11))
    assert registration.view().shards == {}


def test_a_release_by_another_process_frees_nothing(registration: Registration) -> None:
    registration.claim(OWNER)
    registration.release(1, 1)  # a shorter number than 11, and its first digit
    assert registration.view().shards == {1: OWNER.entry}


@pytest.mark.parametrize(
    ("holder", "claim", "lease"),
    [
        (OWNER, another(OWNER), Lease.TAKEN),
        (OWNER, another(OWNER, folder=FOLDER), Lease.HELD),  # the same folder is locked: its former owner is dead
        (OWNER, another(OWNER, folder=COPY), Lease.TAKEN),
        (another(OWNER), another(OWNER, incarnation=98, folder=FOLDER), Lease.TAKEN),
        (LOST, another(OWNER), Lease.TAKEN),
        (LOST, another(OWNER, folder=FOLDER), Lease.HELD),  # who has the state comes before who has none
        (OWNER, another(LOST, folder=FOLDER), Lease.TAKEN),
    ],
    ids=["a stranger", "the folder itself", "a copy of it", "memory only", "no folder", "LOST", "LOST takes nothing"],
)
def test_a_held_name_is_given_to_the_holder_of_its_folder_alone(
    registration: Registration, holder: Claim, claim: Claim, lease: Lease
) -> None:
    registration.claim(holder)
    assert registration.claim(claim).lease is lease
    expected = claim if lease is Lease.HELD else holder
    assert registration.view().shards[1] == expected.entry


def test_everything_that_redis_lost_is_there_after_one_claim(registration: Registration) -> None:
    claim = dataclasses.replace(OWNER, route_map=MAP, lineages={0: 7})
    standing = registration.claim(claim)
    assert (standing.lease, standing.had_map, standing.known_lineage) == (Lease.HELD, False, None)
    shared = registration.read_shared()
    assert (shared.cluster, shared.route_map, shared.lineages) == (CLUSTER, MAP, {0: 7, 1: 2**63 - 1})
    again = registration.claim(claim)
    assert (again.lease, again.had_map, again.known_lineage) == (Lease.HELD, True, 2**63 - 1)
    assert registration.read_shared() == shared


def test_no_lineage_is_recorded_before_the_cluster_has_formed(registration: Registration) -> None:
    registration.claim(OWNER)
    assert registration.read_shared().lineages == {}


def test_no_mark_is_recorded_without_a_lineage(registration: Registration) -> None:
    entry = dataclasses.replace(OWNER.entry, lineage=0, ready=False)
    assert registration.claim(dataclasses.replace(FORMED, entry=entry)).lease is Lease.HELD
    shared = registration.read_shared()
    assert (shared.lineages, shared.marks) == ({}, {})


def test_a_lineage_yields_to_the_one_that_redis_knows_even_of_a_process_that_had_the_name_before(
    registration: Registration,
) -> None:
    registration.claim(FORMED)
    registration.release(1, 11)
    newcomer = another(FORMED, lineage=5)
    refused = registration.claim(newcomer)
    assert (refused.lease, refused.known_lineage) == (Lease.OTHER_LINEAGE, 2**63 - 1)
    assert registration.view().shards == {}
    # A successor was told to forget the state, and its lease has run out: the former owner wakes up and renews.
    registration.claim(LOST)
    assert registration.replace_lineage(1, 12, 2**63 - 1, 5)
    registration.release(1, 12)
    assert registration.claim(FORMED).lease is Lease.OTHER_LINEAGE
    assert registration.claim(newcomer).lease is Lease.HELD
    assert registration.read_shared().lineages == {1: 5}
    # What others remember does not replace what stands there.
    registration.claim(dataclasses.replace(newcomer, lineages={1: 4}))
    assert registration.read_shared().lineages == {1: 5}


def test_a_state_behind_what_the_cluster_has_seen_of_it_is_refused_unless_that_is_given_up(registration: Registration) -> None:
    registration.claim(FORMED)
    registration.claim(dataclasses.replace(FORMED, change_number=105))
    mark = HighMark(2**63 - 1, 105)
    assert registration.read_shared().marks == {1: mark}
    assert registration.claim(FORMED).lease is Lease.BEHIND
    registration.release(1, 11)
    copy = another(FORMED, folder=COPY)  # 40 is above 105 as text
    assert registration.claim(copy).lease is Lease.BEHIND
    assert (registration.view().shards, registration.read_shared().marks) == ({}, {1: mark})
    assert registration.claim(dataclasses.replace(copy, accepts_loss=True)).lease is Lease.HELD
    assert registration.read_shared().marks == {1: HighMark(2**63 - 1, 40)}
    assert registration.claim(copy).lease is Lease.HELD


def test_a_mark_of_another_lineage_or_of_a_shard_that_keeps_nothing_refuses_nobody(registration: Registration) -> None:
    registration.claim(dataclasses.replace(FORMED, change_number=105))
    registration.release(1, 11)
    registration.claim(LOST)
    registration.replace_lineage(1, 12, 2**63 - 1, 5)
    registration.release(1, 12)
    memory_only = dataclasses.replace(another(FORMED, lineage=5), change_number=None)
    assert registration.claim(memory_only).lease is Lease.HELD
    assert registration.claim(dataclasses.replace(memory_only, change_number=1)).lease is Lease.HELD
    assert registration.read_shared().marks == {1: HighMark(5, 1)}


def test_marks_that_redis_lost_are_written_again_by_others_and_no_present_one_is_replaced(registration: Registration) -> None:
    registration.claim(dataclasses.replace(FORMED, lineages={0: 7}, marks={0: HighMark(7, 3)}))
    registration.claim(dataclasses.replace(FORMED, marks={0: HighMark(7, 2)}))
    shared = registration.read_shared()
    assert (shared.lineages, shared.marks) == ({0: 7, 1: 2**63 - 1}, {0: HighMark(7, 3), 1: HighMark(2**63 - 1, 40)})


def test_another_cluster_of_the_same_name_is_not_written_to(registration: Registration) -> None:
    assert registration.publish_cluster(OTHER_CLUSTER) == OTHER_CLUSTER
    assert registration.publish_cluster(CLUSTER, MAP) == OTHER_CLUSTER
    claim = dataclasses.replace(OWNER, route_map=MAP, lineages={0: 7})
    assert registration.claim(claim).lease is Lease.OTHER_CLUSTER
    shared = registration.read_shared()
    assert (shared.cluster, shared.route_map, shared.lineages) == (OTHER_CLUSTER, None, {})
    assert registration.view().shards == {}


def test_the_map_of_the_higher_epoch_stays(registration: Registration) -> None:
    higher, lower = MAP, RouteMap(epoch=2, num_shards=2)
    assert registration.publish_route_map(lower) == lower
    assert registration.publish_route_map(higher) == higher
    assert registration.publish_route_map(lower) == higher
    registration.claim(dataclasses.replace(OWNER, route_map=lower))
    assert registration.read_shared().route_map == higher


def test_a_lineage_is_replaced_only_by_the_holder_of_the_name_and_only_from_the_known_one(registration: Registration) -> None:
    registration.claim(dataclasses.replace(OWNER, route_map=MAP))
    registration.release(1, 11)
    registration.claim(LOST)
    known = OWNER.entry.lineage
    assert not registration.replace_lineage(1, 11, known, 5)
    assert not registration.replace_lineage(1, 12, 4, 5)
    for _ in range(2):  # an answer that was lost is asked for again
        assert registration.replace_lineage(1, 12, known, 5)
    assert not registration.replace_lineage(1, 12, known, 6)
    assert registration.read_shared().lineages == {1: 5}


def test_what_cannot_be_read_is_said_with_the_cluster_s_name(registration: Registration, valkey: Valkey) -> None:
    connection = valkey.client()
    connection.set(registration.keys.route_map, b'{"epoch": 1, "num_shards": 2, "version": 99}')
    connection.close()
    with pytest.raises(RedisUnreachable, match=r"cluster 'test'.*version 99.*matching shardam packages"):
        registration.read_shared()


def test_a_lease_runs_out_by_itself(registration: Registration) -> None:
    registration.claim(dataclasses.replace(OWNER, lease_s=0.1))
    wait_for("the lease to run out", lambda: not registration.view().shards)
    assert registration.claim(another(OWNER)).lease is Lease.HELD
