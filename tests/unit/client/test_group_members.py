"""Joining a group, being dropped from it, coming back and leaving, as a program sees it (PROTOCOL.md, section 5)."""

from __future__ import annotations

import collections
import copy
import pickle
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.scripted_client import ids_of_shard
from shardam_testing.scripted_members import ScriptedMember, scripted_member
from shardam_testing.scripted_shards import INFO
from shardam_testing.waiting import wait_for

import shardam
from shardam import AdamOptions, Cluster
from shardam._forks import FORKS
from shardam._group import GroupOptions
from shardam._parts import TableStepGradient
from shardam._reads import read_weights
from shardam._session_options import SessionOptions
from shardam.errors import (
    BadOption,
    ClientClosed,
    GroupMismatch,
    NonFiniteGradient,
    NotAMember,
    ShardamError,
    ShardLost,
    ShardNotReady,
    StepTimeout,
)

PLACE = GroupOptions("workers", None, rank=1, world_size=3, restart_count=2)
BOUNDED = GroupOptions("eu", 4, rank=0, world_size=2)

OPTIONS = AdamOptions(lr=0.1)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedMember]:
    with scripted_member(2, PLACE, monkeypatch) as member:
        yield member


def push(member: ScriptedMember, value: float = 1.0) -> shardam.PushResult:
    return member.table.push(ids_of_shard(1, 2, 2), np.full((2, 2), value, np.float32), OPTIONS)


def queue(member: ScriptedMember) -> None:
    rows = np.ones((2, 2), np.float32)
    member.cluster._queue_push([TableStepGradient("t", INFO.table_id, ids_of_shard(1, 2, 2), rows, OPTIONS)])


def training_pull(member: ScriptedMember) -> None:
    read_weights(member.cluster._ready_to_read(training=True), [(INFO, np.arange(20))], training=True)


# -- joining


def test_a_worker_joins_on_home_with_its_place_and_terms_before_anything_else(member: ScriptedMember) -> None:
    (join,) = member.group.joins
    assert join.header.client_id == member.opened[0].client_id
    assert (join.group, join.rank, join.restart_count, join.terms) == ("workers", 1, 2, PLACE.terms())
    assert all(not shard.seen for shard in member.shards)
    cluster = member.cluster
    assert (cluster.mode, cluster.group, cluster.rank, cluster.world_size, cluster.group_step) == ("sync", "workers", 1, 3, 1)


def test_a_bounded_member_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(1, BOUNDED, monkeypatch) as member:
        cluster = member.cluster
        push(member)
        assert (cluster.mode, cluster.group, cluster.rank, cluster.world_size) == ("bounded:4", "eu", 0, 2)
        assert cluster.group_step == 2


def test_an_async_client_is_in_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(1, None, monkeypatch) as member:
        cluster = member.cluster
        assert (cluster.mode, cluster.group, cluster.rank, cluster.world_size, cluster.group_step) == ("async", *[None] * 4)
        assert not member.group.joins
        with pytest.raises(BadOption, match="in no group"):
            cluster.rejoin()
        cluster._queue_push([], "empty")
        cluster._queue_push([], "abstain")
        assert not member.shards[0].seen


def opening(member: ScriptedMember, place: GroupOptions = PLACE, shard_timeout_s: float = 20.0) -> Cluster:
    return Cluster(member.open(SessionOptions("redis://nowhere", "scripted", None, shard_timeout_s, place)))


def test_a_join_is_repeated_until_home_and_all_shards_can_take_it(member: ScriptedMember) -> None:
    member.group.first_step = 42
    member.group.join_faults.extend([ShardNotReady("shards [1] could not be told of the group")] * 3)
    member.shards[0].restart()
    with opening(member) as second:
        assert second.group_step == 42
    assert {join.header.client_id for join in member.group.joins[1:]} == {member.opened[1].client_id}
    assert len(member.group.joins) == 5


@pytest.mark.parametrize("metadata", [{}, {"silence_s": "0.000"}], ids=["no silence", "a holder that was just heard"])
def test_a_mismatch_that_will_not_pass_is_raised_and_nothing_stays_open(
    member: ScriptedMember, metadata: dict[str, str]
) -> None:
    member.group.join_faults.extend([GroupMismatch("rank 1 is taken", metadata=metadata)] * 1000)
    with pytest.raises(GroupMismatch, match="rank 1 is taken"):
        opening(member)
    assert len(member.shards[0].left) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "shardam-heartbeat" and len(member.opened) > 1]


def test_a_rank_whose_holder_is_silent_is_asked_for_until_it_is_free(member: ScriptedMember) -> None:
    taken = [GroupMismatch("rank 1 is taken", metadata={"silence_s": f"{25 + number:.3f}"}) for number in range(5)]
    member.group.join_faults.extend(taken)
    opening(member).close()
    assert not member.group.join_faults


def test_a_rank_whose_holder_is_heard_of_again_is_not_asked_for_any_longer(member: ScriptedMember) -> None:
    silences = ["25.0", "25.1", "0.0"]
    member.group.join_faults.extend(GroupMismatch("taken", metadata={"silence_s": silence}) for silence in silences)
    with pytest.raises(GroupMismatch):
        opening(member)
    assert not member.group.join_faults


def test_a_rank_that_stays_taken_by_a_silent_holder_is_given_up_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(1, PLACE, monkeypatch, shard_timeout_s=1.0) as member:
        began = time.monotonic()

        def silent() -> GroupMismatch:
            return GroupMismatch("rank 1 is taken", metadata={"silence_s": f"{25 + time.monotonic() - began:.3f}"})

        member.group.join_faults = _Endless(silent)
        with pytest.raises(GroupMismatch, match=r"rank 1 is taken \(tried"):
            opening(member)


class _Endless(collections.deque[ShardamError]):
    """Errors made when they are asked for."""

    def __init__(self, make: object) -> None:
        super().__init__([GroupMismatch("one")])
        self._make = make

    def popleft(self) -> ShardamError:
        error: ShardamError = self._make()  # type: ignore[operator]  # a function
        return error


def test_signs_of_life_begin_with_the_join_and_go_on_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(1, PLACE, monkeypatch, client_lease_s=0.3) as member:
        member.cluster.close()
        member.group.join_faults.extend([ShardNotReady("not yet")] * 5)
        beats = member.shards[0].beats
        with opening(member):
            assert member.shards[0].beats > beats
            now = member.shards[0].beats
            wait_for("signs of life", lambda: member.shards[0].beats >= now + 3)


# -- steps of one table


def test_a_push_is_one_contribution_and_waits_for_the_others(member: ScriptedMember) -> None:
    member.group.hold()
    results: list[shardam.PushResult] = []
    pushing = threading.Thread(target=lambda: results.append(push(member)))
    pushing.start()
    wait_for("the arrival", lambda: bool(member.group.arrivals))
    assert member.cluster.group_step == 1
    assert not results
    member.group.release()
    pushing.join(60)
    assert results == [shardam.PushResult(step=1, number=1)]
    assert member.cluster.group_step == 2


def test_a_push_with_a_nan_is_refused_for_all_ranks_and_the_next_step_begins(member: ScriptedMember) -> None:
    with pytest.raises(NonFiniteGradient):
        push(member, float("nan"))
    assert push(member) == shardam.PushResult(step=2, number=2)
    first, second = member.group.arrivals
    assert first.refusal.reason == "NON_FINITE_GRADIENT"
    assert not second.HasField("refusal")


def test_a_push_with_a_nan_counts_on_the_clock_of_a_bounded_member(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(2, BOUNDED, monkeypatch) as member:
        with pytest.raises(NonFiniteGradient):
            push(member, float("inf"))
        push(member)
        assert [[how for _, how, _ in shard.closed] for shard in member.shards] == [["skip", "push"]] * 2
        assert member.cluster.group_step == 3


# -- dropped


@pytest.mark.parametrize("reason", ["CLIENT_CLOSED", "UNKNOWN_CLIENT", "NOT_A_MEMBER"])
@pytest.mark.parametrize("phase", ["part", "arrival", "training pull"])
def test_a_dropped_member_is_told_so_with_group_rank_and_remedy(member: ScriptedMember, reason: str, phase: str) -> None:
    kind = NotAMember if reason == "NOT_A_MEMBER" else ClientClosed
    error = kind("was dropped", reason=reason)
    shard = member.shards[1 if phase == "part" else 0]
    shard.faults_of[0 if phase == "training pull" else 1] = collections.deque([None, error] if phase == "arrival" else [error])
    with pytest.raises(NotAMember, match=r"rank 1 of group 'workers' has been dropped: shard . at .*rejoin\(\)") as caught:
        training_pull(member) if phase == "training pull" else push(member)
    assert (caught.value.metadata["group"], caught.value.metadata["rank"]) == ("workers", "1")
    for call in (lambda: member.table.pull([1]), lambda: push(member), member.cluster.tables):
        with pytest.raises(NotAMember):
            call()


def test_a_member_that_home_has_dropped_learns_it_by_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(2, PLACE, monkeypatch, client_lease_s=0.3) as member:
        member.drop()
        wait_for("the client to end", lambda: member.opened[0].ended)
        with pytest.raises(NotAMember, match=r"silent for 0.3 s"):
            push(member)
        member.cluster.rejoin()
        push(member)


@pytest.mark.parametrize("held", [True, False], ids=["while its step waits", "between steps"])
def test_a_dropped_worker_rejoins_as_a_new_client_at_the_groups_next_step(member: ScriptedMember, held: bool) -> None:
    push(member)
    if held:
        member.group.hold()
        queue(member)
        queue(member)
        wait_for("the arrival", lambda: len(member.group.arrivals) >= 2)
    member.drop()
    with pytest.raises(NotAMember):
        training_pull(member)
    member.group.release()
    member.group.first_step = 9
    table = member.table
    member.cluster.rejoin()
    first, second = member.opened
    assert first.client_id != second.client_id
    assert member.cluster.group_step == 9
    assert member.group.joins[1].header.client_id == second.client_id
    assert (member.group.joins[1].rank, member.group.joins[1].restart_count) == (1, 2)
    arrivals = len(member.group.arrivals)
    assert table.push([1], np.ones((1, 2), np.float32), OPTIONS).number == 1
    assert [arrival.header.step for arrival in member.group.arrivals[arrivals:]] == [9]  # nothing of what was queued
    member.cluster._pusher.raise_error()
    assert not [thread for thread in first._threads if thread.is_alive()]


def test_rejoining_as_a_member_does_nothing(member: ScriptedMember) -> None:
    push(member)
    member.cluster.rejoin()
    assert len(member.opened) == 1
    assert push(member).number == 2


def test_rejoining_mends_no_lost_shard_and_no_closed_object(member: ScriptedMember) -> None:
    push(member)
    member.shards[1].restart(lineage=99)
    with pytest.raises(ShardLost):
        push(member)
    with pytest.raises(ShardLost):
        member.cluster.rejoin()
    member.cluster.close()
    with pytest.raises(ClientClosed):
        member.cluster.rejoin()
    assert len(member.opened) == 1


def test_a_rejoin_that_fails_may_be_tried_again(member: ScriptedMember) -> None:
    member.drop()
    with pytest.raises(NotAMember):
        push(member)
    member.group.join_faults.append(GroupMismatch("rank 1 is taken"))
    with pytest.raises(GroupMismatch):
        member.cluster.rejoin()
    with pytest.raises(NotAMember):
        push(member)
    member.cluster.rejoin()
    push(member)


# -- leaving, and who is no member


@pytest.mark.case("C054")
def test_closing_waits_for_the_step_then_leaves_the_group_at_once(member: ScriptedMember) -> None:
    member.group.hold()
    queue(member)
    wait_for("the arrival", lambda: bool(member.group.arrivals))
    closing = threading.Thread(target=member.cluster.close)
    closing.start()
    arrivals = len(member.group.arrivals)
    wait_for("home to be told again", lambda: len(member.group.arrivals) >= arrivals + 2)
    assert closing.is_alive()
    assert not member.shards[0].left
    member.group.release()
    closing.join(60)
    assert member.shards[0].left == [member.opened[0].client_id]
    assert [shard.closed for shard in member.shards] == [[(1, "gradient", [INFO.table_id])]] * 2


def test_closing_raises_that_the_last_step_was_refused_and_leaves(member: ScriptedMember) -> None:
    member.group.refusals.append(StepTimeout("rank 2 did not arrive"))
    queue(member)
    with pytest.raises(StepTimeout):
        member.cluster.close()
    assert member.shards[0].left == [member.opened[0].client_id]


def test_a_childs_client_joins_no_group_is_async_and_may_pull(member: ScriptedMember) -> None:
    left_behind = member.cluster._begin_anew()  # what happens in a forked child
    FORKS._left_behind.append(left_behind)
    cluster = member.cluster
    assert (cluster.mode, cluster.group, cluster.rank, cluster.group_step) == ("async", None, None, None)
    ids = ids_of_shard(1, 2, 2)
    np.testing.assert_array_equal(member.table.pull(ids)[:, 0], ids)
    assert len(member.group.joins) == 1
    assert not member.opened[1].options.group
    member.opened[0].close()


def test_what_comes_out_of_a_pickle_is_in_no_group(member: ScriptedMember) -> None:
    unpickled = pickle.loads(pickle.dumps(member.cluster))
    assert (unpickled.mode, unpickled.group, unpickled.name) == ("async", None, "scripted")
    assert copy.copy(member.cluster).group == "workers"


def test_a_change_from_outside_of_a_sync_group_is_refused_and_the_client_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(2, None, monkeypatch) as member:
        for shard in member.shards:
            shard.faults_of[1] = collections.deque([NotAMember("group 'workers' trains in sync")])
        with pytest.raises(NotAMember, match="trains in sync"):
            push(member)
        member.table.pull([1, 2])
        push(member)
        assert [[how for _, how, _ in shard.closed] for shard in member.shards] == [["skip", "push"]] * 2
