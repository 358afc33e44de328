"""What a plan does to a cluster's entries in a real Redis, and what becomes of shards from before it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
from shardam_testing.processes import Valkey, running_valkey
from shardam_testing.shard_states import shard_context

from shardam_proto.errors import ShardNotReady
from shardam_proto.registry import ClusterEntry, Plan, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.checkpoints import plans
from shardam_server.shard.known_lineages import HighMark
from shardam_server.shard.membership import Membership
from shardam_server.shard.registration import Claim, Lease, Registration
from shardam_server.shard.shared_entries import PlanAnswer, PlanEntry
from shardam_server.shard.tenure import Tenure

LEASE_S = 6.0

CLUSTER = ClusterEntry("0123456789abcdef", 2, 0)
MAP = RouteMap(epoch=1, num_shards=2)
HOME = Claim(
    ShardEntry(0, "127.0.0.1:1", "", 11, 2**63 - 1, "cpu", 1, ready=True), 60.0, CLUSTER, route_map=MAP, change_number=40
)
OTHER = dataclasses.replace(HOME, entry=ShardEntry(1, "127.0.0.1:2", "", 12, 77, "cpu", 1, ready=True))
PLAN = Plan("aa", 2, 1, 2, 9, "test/one", 2**62 + 1, load=("t",))
TABLES = [common_pb2.TableInfo(spec=TableSpec("t", 2).to_proto(), table_id=5, table_seed=3)]
ENTRY = PlanEntry(PLAN, ClusterEntry(CLUSTER.cluster_id, 2, 9), TABLES)


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
    registration.claim(HOME)
    registration.claim(OTHER)
    registration.publish_tables([common_pb2.TableInfo(spec=TableSpec("old", 2).to_proto(), table_id=4)])
    yield registration
    registration.close()


def test_a_plan_replaces_entry_and_tables_and_forgets_lineages_in_one_step(registration: Registration) -> None:
    assert registration.read_shared().lineages == {0: 2**63 - 1, 1: 77}
    assert registration.decide_plan(ENTRY, None, 11) is PlanAnswer.DONE
    assert registration.decide_plan(ENTRY, None, 11) is PlanAnswer.DONE  # its answer was lost
    shared = registration.read_shared()
    assert (shared.plan, shared.cluster, shared.route_map) == (PLAN, ENTRY.cluster, MAP)
    assert (shared.lineages, shared.marks) == ({}, {})
    assert [(table.spec.name, table.table_id) for table in registration.load_tables()] == [("t", 5)]


def test_a_plan_is_decided_by_home_alone_and_after_the_former_one(registration: Registration) -> None:
    assert registration.decide_plan(ENTRY, None, 12) is PlanAnswer.NAME_NOT_HELD
    other = dataclasses.replace(ENTRY, cluster=ClusterEntry("fedcba9876543210", 2, 0))
    assert registration.decide_plan(other, None, 11) is PlanAnswer.OTHER_CLUSTER
    assert registration.decide_plan(ENTRY, None, 11) is PlanAnswer.DONE
    second = dataclasses.replace(ENTRY, plan=dataclasses.replace(PLAN, plan_id="bb"))
    assert registration.decide_plan(second, None, 11) is PlanAnswer.OTHER_PLAN
    assert registration.decide_plan(second, PLAN, 11) is PlanAnswer.OTHER_PLAN  # not ahead of it
    later = dataclasses.replace(second, plan=dataclasses.replace(second.plan, timeline=3))
    assert registration.decide_plan(later, PLAN, 11) is PlanAnswer.DONE


def test_a_shard_from_before_the_plan_keeps_its_name_and_writes_nothing_else(registration: Registration) -> None:
    registration.decide_plan(ENTRY, None, 11)
    standing = registration.claim(dataclasses.replace(OTHER, lineages={0: 5}, marks={0: HighMark(5, 1)}))
    assert (standing.lease, standing.before_plan) == (Lease.HELD, True)
    shared = registration.read_shared()
    assert (shared.lineages, shared.marks) == ({}, {})
    after = dataclasses.replace(OTHER, timeline=2, entry=dataclasses.replace(OTHER.entry, lineage=78))
    assert not registration.claim(after).before_plan
    assert registration.read_shared().lineages == {1: 78}
    # Another process that has taken it over since is known by its lineage.
    assert registration.claim(OTHER).lease is Lease.OTHER_LINEAGE


def test_a_plan_that_redis_lost_is_put_back_with_what_is_known_since(registration: Registration, valkey: Valkey) -> None:
    registration.decide_plan(ENTRY, None, 11)
    connection = valkey.client()
    connection.flushall()
    registration.claim(OTHER)  # from before the plan: it was the first to come back
    back = dataclasses.replace(ENTRY, lineages={0: 9}, marks={0: HighMark(9, 4)})
    assert registration.put_plan_back(back) is PlanAnswer.DONE
    shared = registration.read_shared()
    assert (shared.plan, shared.lineages, shared.marks) == (PLAN, {0: 9}, {0: HighMark(9, 4)})
    newer = dataclasses.replace(ENTRY, plan=dataclasses.replace(PLAN, timeline=3))
    assert registration.put_plan_back(newer) is PlanAnswer.DONE
    assert registration.put_plan_back(back) is PlanAnswer.OTHER_PLAN
    connection.close()


def test_a_shard_that_overslept_a_plan_is_not_confirmed_until_it_has_taken_it_over(registration: Registration) -> None:
    async def run() -> None:
        shard, seen, clock = shard_context(1, num_shards=2), list[Plan](), [0.0]
        shard.identity.cluster, shard.identity.route_map = CLUSTER, MAP
        shard.identity.incarnation, shard.identity.lineage = 12, 77
        shard.tenure = Tenure(LEASE_S, lambda: clock[0])
        shard.tenure.tick()
        membership = Membership(shard, registration, 60.0, lambda _: None, seen.append)
        registration.decide_plan(ENTRY, None, 11)
        clock[0] += LEASE_S
        assert await asyncio.to_thread(membership.renew) is Lease.HELD
        assert (seen, shard.tenure.suspended) == ([PLAN], True)
        membership.turn_to(PLAN)
        assert (shard.identity.timeline, shard.identity.lineage, shard.identity.require_cluster().seed) == (2, 0, 9)
        assert await asyncio.to_thread(membership.renew) is Lease.HELD
        assert (seen, shard.tenure.suspended) == ([PLAN], False)
        assert registration.read_shared().lineages == {}
        shard.sequencer.close()

    asyncio.run(run())


def test_a_home_that_has_lost_its_name_decides_nothing(registration: Registration) -> None:
    async def run() -> None:
        home = shard_context(0, num_shards=2)
        home.identity.cluster, home.identity.route_map, home.identity.incarnation = CLUSTER, MAP, 99
        with pytest.raises(ShardNotReady, match="name not held"):
            await plans.commit(home, registration, PLAN, TABLES)
        assert not await plans.is_decided(registration, PLAN)
        home.identity.incarnation = 11
        await plans.commit(home, registration, PLAN, TABLES)
        assert await plans.is_decided(registration, PLAN)
        home.sequencer.close()

    asyncio.run(run())
