"""Members of different speed: a bound on staleness that no pull exceeds, and a sync group that waits without an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.group_rounds import wait_members
from shardam_testing.faults.members import GroupPlan, Member
from shardam_testing.faults.verification import verify
from shardam_testing.raw_client import RawClient

from shardam_proto.v1 import shard_pb2

HANG_S = 120.0
"""What takes seconds on an idle machine."""

pytestmark = pytest.mark.timeout(3 * HANG_S)

PACES_S = (0.0, 0.004, 0.02)
"""Rest before each step, by rank: the first one is at the bound of the others all the time."""

LAST_STEP = 60

TIMEOUT_S = 2.0
"""How long a member waits for a shard that does not answer; waiting for other members is no such thing."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    with running_fault_cluster(tmp_path_factory.mktemp("pace"), 3) as cluster:
        yield cluster


def staleness_of_pulls(members: Sequence[Member]) -> list[int]:
    """Returns for each pull by how many steps another member may at most have been behind when it was answered.

    A member that had sent its push of clock c by then may have been at c; one that had not was not.
    """
    lives = [member.noted.lives[0] for member in members]
    found = []
    for life in lives:
        for pull in life.pulls:
            clocks = [
                other.first_step - 1 + sum(push.at_s <= pull.at_s for push in other.sent)
                for other in lives
                if other is not life
            ]
            found.append(max(pull.step - 1 - clock for clock in clocks))
    return found


def staleness_histogram(cluster: FaultCluster) -> tuple[int, dict[float, int]]:
    """Returns how many pulls of training all shards have answered, and how many with a staleness up to each bound."""
    with cluster.clients() as clients:
        samples = [sample for client in clients for sample in samples_of(client, "shardam_pull_staleness_steps")]
    counts: dict[float, int] = {}
    for name, labels, value in samples:
        if name.endswith("_bucket"):
            bound = float(labels["le"])
            counts[bound] = counts.get(bound, 0) + int(value)
    return sum(int(value) for name, _, value in samples if name.endswith("_count")), counts


def samples_of(client: RawClient, family: str) -> list[tuple[str, dict[str, str], float]]:
    text = client.call(client.shard.GetMetrics, shard_pb2.GetMetricsRequest(header=client.header())).text
    return [
        (sample.name, dict(sample.labels), sample.value)
        for found in text_string_to_metric_families(text)
        if found.name == family
        for sample in found.samples
    ]


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_no_pull_of_a_bounded_group_sees_a_member_further_behind_than_the_bound(cluster: FaultCluster, bound: int) -> None:
    num_before, within_before = staleness_histogram(cluster)
    plan = GroupPlan(20 + bound, 3, LAST_STEP, mode=f"bounded:{bound}", group=f"bounded-{bound}")
    members = [cluster.members.start(plan, rank, pace_s=pace_s) for rank, pace_s in enumerate(PACES_S)]
    assert wait_members(cluster) == []
    for member in members:
        (life,) = member.noted.lives
        assert [ended.step for ended in life.ended] == list(range(life.first_step, LAST_STEP + 1))
    seen = staleness_of_pulls(members)
    assert max(seen) <= bound
    assert bound == 0 or max(seen) > 0, "nobody was ever ahead: this run shows nothing"
    num_pulls, within = staleness_histogram(cluster)
    assert num_pulls > num_before
    bucket = min(limit for limit in within if limit >= bound)
    assert within[bucket] - within_before.get(bucket, 0) == num_pulls - num_before


def waited(cluster: FaultCluster) -> tuple[int, float]:
    """Returns how many steps of sync groups home has decided, and how long the first to arrive waited for the last."""
    with cluster.clients() as clients:
        samples = samples_of(clients[0], "shardam_group_step_seconds")
    values = {name.rpartition("_")[2]: value for name, _, value in samples if not name.endswith("_bucket")}
    return int(values["count"]), values["sum"]


@pytest.mark.case("C061")
@pytest.mark.parametrize(
    ("name", "last_step", "paces_s"), [("thrice", 100, (0.01, 0.03)), ("beyond-every-deadline", 3, (0.0, 1.5 * TIMEOUT_S))]
)
def test_a_sync_group_waits_for_a_slow_member_without_an_error(
    cluster: FaultCluster, name: str, last_step: int, paces_s: tuple[float, float]
) -> None:
    num_before, waited_before_s = waited(cluster)
    plan = GroupPlan(30, 2, last_step, group=name)
    members = [
        cluster.members.start(plan, rank, pace_s=pace_s, shard_timeout_s=TIMEOUT_S) for rank, pace_s in enumerate(paces_s)
    ]
    assert wait_members(cluster) == []
    assert [member.noted.last_step for member in members] == [last_step] * 2
    assert [member.log_text() for member in members] == ["", ""]
    num_steps, waited_s = waited(cluster)
    assert num_steps - num_before == last_step
    assert waited_s > waited_before_s


def test_the_books_of_all_shards_agree_after_the_bounded_runs(cluster: FaultCluster) -> None:
    verified = verify(cluster)
    verified.check()
    clocks = [applied.clock for oracle in verified.oracles for applied in oracle.applied if applied.kind in ("push", "close")]
    assert max(clocks) == LAST_STEP
