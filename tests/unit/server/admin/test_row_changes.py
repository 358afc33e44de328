"""One change of one row: every shard takes its part once, a refused number is closed, the client leaves whatever happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from shardam_testing.scripted_shards import FAIL_BEFORE, INFO, LOSE_ANSWER, ScriptedShard, scripted_cluster

from shardam_proto.errors import EtagMismatch, QueueFull, RowLimit, ShardamError, ShardNotReady
from shardam_proto.registry import ClusterView
from shardam_proto.v1 import common_pb2
from shardam_server.admin.cluster import ClusterReader
from shardam_server.admin.etags import Precondition, RowTag, StateId
from shardam_server.admin.row_writes import (
    ChangedRow,
    ChangeTerms,
    RowValues,
    as_column,
    clear_moments,
    delete_row,
    place_of,
    put_row,
)
from shardam_server.admin.shard_calls import ShardCalls

TABLE = common_pb2.TableInfo(spec=INFO.spec.to_proto(), table_id=INFO.table_id)
ANYTHING = ChangeTerms()
TIMEOUT_S = 10.0


class Cluster:
    """Three scripted shards as the admin API sees them, and row 5 of their table."""

    def __init__(self, view: ClusterView, shards: list[ScriptedShard], timeout_s: float = TIMEOUT_S) -> None:
        self.view = view
        self.shards = shards
        self.calls = ShardCalls(ClusterReader(lambda: view, "scripted"), None, timeout_s)
        self.place = place_of(self.calls, TABLE, 5)
        self.owner = shards[self.place.shard]
        self.others = [shard for shard in shards if shard is not self.owner]

    @property
    def owner_state(self) -> StateId:
        return StateId(self.place.shard, self.owner.lineage, self.owner.timeline)

    def put(self, terms: ChangeTerms = ANYTHING) -> ChangedRow:
        values = RowValues(as_column([1.0, 2.0], "weight", self.place))
        return put_row(self.calls, self.place, values, terms, request_id=9)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with scripted_cluster(3) as (view, shards):
        cluster = Cluster(view, shards)
        yield cluster
        cluster.calls.close()


def all_left(cluster: Cluster) -> bool:
    """Whether the one client that was opened has left every shard."""
    ids = {header.client_id for shard in cluster.shards for header in shard.headers} or {cluster.shards[0].left[0]}
    return len(ids) == 1 and all(shard.left == list(ids) for shard in cluster.shards)


@pytest.mark.parametrize("method", ["assign", "delete", "clear"])
def test_every_shard_takes_number_1_once_and_only_the_owner_the_row(cluster: Cluster, method: str) -> None:
    match method:
        case "assign":
            assert cluster.put() == ChangedRow(RowTag(cluster.owner_state, 0), 1, replayed=False)
        case "delete":
            delete_row(cluster.calls, cluster.place, ANYTHING, request_id=9)
        case "clear":
            clear_moments(cluster.calls, cluster.place, ANYTHING, request_id=9)
    assert cluster.owner.seen == [(method, 1, [5])]
    assert [shard.seen for shard in cluster.others] == [[(method, 1, [])]] * 2
    assert [shard.closed for shard in cluster.shards] == [[(1, method, [])]] * 3
    assert [shard.opened for shard in cluster.shards] == [1, 1, 1]
    assert all_left(cluster)
    assert all(header.request_id == 9 and header.timeline == 1 for shard in cluster.shards for header in shard.headers)


def test_each_change_has_a_client_of_its_own() -> None:
    seen = set()
    for _ in range(2):
        with scripted_cluster(1) as (view, shards):
            cluster = Cluster(view, shards)
            cluster.put()
            cluster.calls.close()
            seen.add(shards[0].headers[0].client_id)
    assert len(seen) == 2


def test_a_lost_answer_is_asked_for_again_under_the_same_number(cluster: Cluster) -> None:
    cluster.owner.faults.append(LOSE_ANSWER)
    cluster.others[0].faults.append(FAIL_BEFORE)
    cluster.put()
    assert [number for _, number, _ in cluster.owner.seen] == [1, 1]
    assert not cluster.owner.faults
    assert not cluster.others[0].faults
    assert [shard.closed for shard in cluster.shards] == [[(1, "assign", [])]] * 3
    assert all_left(cluster)


@pytest.mark.parametrize("error", [QueueFull("full"), ShardNotReady("starts")])
def test_a_refusal_that_may_pass_is_tried_again(cluster: Cluster, error: ShardamError) -> None:
    cluster.owner.faults.append(error)
    cluster.put()
    assert cluster.owner.closed == [(1, "assign", [])]
    assert len(cluster.owner.seen) == 2


@pytest.mark.parametrize("error", [RowLimit("too many rows"), EtagMismatch("has changed")])
def test_a_number_refused_by_the_owner_is_voided_there(cluster: Cluster, error: ShardamError) -> None:
    cluster.owner.faults.append(error)
    with pytest.raises(type(error), match=f"{error.message}; the row was not changed"):
        cluster.put()
    assert cluster.owner.closed == [(1, "void", [])]
    assert [shard.closed for shard in cluster.others] == [[(1, "assign", [])]] * 2
    assert all_left(cluster)


def test_a_number_refused_everywhere_is_skipped(cluster: Cluster) -> None:
    for shard in cluster.shards:
        shard.faults.append(RowLimit("full"))
    with pytest.raises(RowLimit):
        cluster.put()
    assert [shard.closed for shard in cluster.shards] == [[(1, "skip", [])]] * 3
    assert all_left(cluster)


def test_a_refused_empty_part_is_told_apart_from_a_refused_row(cluster: Cluster) -> None:
    cluster.others[0].faults.append(RowLimit("full"))
    with pytest.raises(RowLimit, match="the row was changed, but"):
        cluster.put()
    assert cluster.others[0].closed == [(1, "void", [])]


def test_without_an_answer_in_time_the_outcome_is_said_to_be_unknown() -> None:
    with scripted_cluster(2) as (view, shards):
        cluster = Cluster(view, shards, timeout_s=0.5)
        cluster.owner.faults.extend([LOSE_ANSWER] * 50)
        with pytest.raises(ShardamError, match="whether the row was changed is not known") as caught:
            cluster.put()
        cluster.calls.close()
        assert caught.value.reason == "SHARD_UNREACHABLE"
        assert len(cluster.owner.seen) > 1
        assert all_left(cluster)


def test_a_shard_that_restarts_within_a_change_ends_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = cluster.owner.enter

    def restart_first(*arguments: object) -> object:
        if cluster.owner.incarnation == 11:
            cluster.owner.restart(lineage=22)
        return enter(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(cluster.owner, "enter", restart_first)
    with pytest.raises(ShardamError, match="not known: read it") as caught:
        cluster.put()
    assert caught.value.reason == "NEW_INCARNATION"
    assert cluster.owner.closed == []
    assert all_left(cluster)


def test_no_part_is_sent_unless_every_shard_has_opened(cluster: Cluster) -> None:
    down = cluster.others[0].index
    entry = cluster.view.shards.pop(down)
    with pytest.raises(ShardNotReady, match="the row was not changed"):
        cluster.put()
    cluster.view.shards[down] = entry
    assert [shard.seen for shard in cluster.shards] == [[], [], []]
    assert [bool(shard.left) for shard in cluster.shards] == [shard.index != down for shard in cluster.shards]


@pytest.mark.parametrize("change", ["shard", "lineage", "timeline"])
def test_a_tag_of_another_state_is_refused_before_any_part_is_sent(cluster: Cluster, change: str) -> None:
    other = dataclasses.replace(cluster.owner_state, **{change: cluster.others[0].index if change == "shard" else 99})
    tag = RowTag(other, change_number=3)
    with pytest.raises(EtagMismatch):
        cluster.put(ChangeTerms(Precondition(tag)))
    assert [shard.seen for shard in cluster.shards] == [[], [], []]
    assert all(len(shard.left) == 1 for shard in cluster.shards)


def test_places_are_the_route_maps(cluster: Cluster) -> None:
    assert {place_of(cluster.calls, TABLE, row_id).shard for row_id in range(100)} == {0, 1, 2}
