"""Pulls of a member: one that trains waits for the group's steps, any other waits for no one (PROTOCOL.md, section 5)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shardam_testing.scripted_client import ids_of_shard
from shardam_testing.scripted_members import PLACE, Running, ScriptedMember, fail, scripted_member
from shardam_testing.scripted_shards import FAIL_BEFORE, INFO
from shardam_testing.waiting import wait_for

from shardam import AdamOptions
from shardam._group import GroupOptions
from shardam._own_reads import read_own_weights
from shardam._parts import TableStepGradient
from shardam.errors import ShardUnreachable, StepTimeout
from shardam_proto.v1 import common_pb2

BOUNDED = GroupOptions("workers", 2, rank=1, world_size=3)

PARKED = ShardUnreachable("the pull waited for its budget", metadata={"budget_s": "0.2"})

IDS = np.concatenate([ids_of_shard(shard, 2, 2) for shard in (0, 1)])


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedMember]:
    with scripted_member(2, PLACE, monkeypatch) as member:
        yield member


def queue(member: ScriptedMember) -> None:
    step = TableStepGradient("t", INFO.table_id, IDS, np.ones((IDS.size, 2), np.float32), AdamOptions())
    member.cluster._queue_push([step])


def training_pull(member: ScriptedMember) -> None:
    (rows,) = read_own_weights(member.cluster, [(INFO, IDS)], training=True)
    np.testing.assert_array_equal(rows[:, 0], IDS)


def pulls(member: ScriptedMember) -> list[common_pb2.RequestHeader]:
    """Headers of all pulls that came."""
    return [
        header
        for shard in member.shards
        for (method, _, _), header in zip(shard.seen, shard.headers, strict=True)
        if method == "pull"
    ]


def test_a_training_pull_carries_the_step_that_the_worker_works_on(member: ScriptedMember) -> None:
    for step in (1, 2, 3):
        training_pull(member)
        assert {(header.step, header.rank, header.number) for header in pulls(member)[-1:]} == {(step, 1, 0)}
        queue(member)


def test_a_training_pull_waits_until_the_step_that_was_pushed_is_decided(member: ScriptedMember) -> None:
    member.group.hold()
    queue(member)
    pulling = Running(lambda: training_pull(member))
    wait_for("home to be told several times", lambda: len(member.group.arrivals) >= 4)
    assert not pulling.is_over
    assert not pulls(member)
    member.group.release()
    assert pulling.outcome() is None
    assert [header.step for header in pulls(member)] == [2, 2]


def test_a_block_that_an_exception_leaves_does_not_wait_for_other_ranks(member: ScriptedMember) -> None:
    member.group.hold()

    def train() -> None:
        with member.cluster:
            queue(member)
            queue(member)
            raise KeyboardInterrupt

    def be_interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            train()

    leaving = Running(be_interrupted)
    assert leaving.outcome() is None
    numbers = [None if shard.staged is None else shard.staged.number for shard in member.shards]
    assert numbers == [1, 1]  # it may still be counted
    assert not member.group.results


def test_a_training_pull_raises_that_the_step_before_was_refused_and_the_next_one_reads(member: ScriptedMember) -> None:
    member.group.refusals.append(StepTimeout("rank 2 did not arrive"))
    queue(member)
    with pytest.raises(StepTimeout):
        training_pull(member)
    training_pull(member)
    assert [header.step for header in pulls(member)] == [2, 2]


def test_no_other_read_waits_for_other_ranks_also_with_steps_queued_behind(member: ScriptedMember) -> None:
    member.group.hold()
    for _ in range(3):
        queue(member)
    np.testing.assert_array_equal(member.table.pull(IDS)[:, 0], IDS)
    assert [header.step for header in pulls(member)] == [1, 1]  # of the step before, which is decided
    assert not member.group.results
    member.group.release()


def test_a_read_waits_until_every_shard_has_this_clients_part(member: ScriptedMember) -> None:
    gate = threading.Event()
    fail(member.shards[1], 1, gate)
    member.group.hold()
    queue(member)
    pulling = Running(lambda: member.table.pull(IDS))
    wait_for("home to have its part", lambda: member.shards[0].staged)
    assert not pulling.is_over
    assert not pulls(member)
    gate.set()
    assert pulling.outcome() is None
    member.group.release()


def test_synchronizing_waits_for_the_decision(member: ScriptedMember) -> None:
    member.group.hold()
    queue(member)
    waiting = Running(member.cluster._synchronize)
    wait_for("home to be told several times", lambda: len(member.group.arrivals) >= 4)
    assert not waiting.is_over
    member.group.release()
    assert waiting.outcome() is None


READS: dict[str, Callable[[ScriptedMember], object]] = {
    "pull": lambda member: member.table.pull(IDS)[:, 0].tolist(),
    "rows": lambda member: member.table.rows(IDS).weight[:, 0].tolist(),
    "scan": lambda member: sorted(weight for rows in member.table.scan() for weight in rows.weight[:, 0].tolist()),
    "stats": lambda member: member.table.stats().num_rows,
}
"""What may be read without training."""


@pytest.mark.parametrize("read", READS)
def test_a_read_waits_for_the_shards_that_have_yet_to_be_told_of_a_step_that_this_client_knows_to_be_decided(
    member: ScriptedMember, read: str
) -> None:
    member.group.told[1] = 0
    queue(member)
    member.cluster._synchronize()
    member.shards[0].changed = dict.fromkeys(IDS.tolist(), 1)
    seen: list[object] = []
    reading = Running(lambda: seen.append(READS[read](member)))
    wait_for("the read to come to shard 1 again and again", lambda: member.group.parked[1] >= 2 or reading.is_over)
    assert not reading.is_over
    assert all(method in ("part", "pull") for method, _, _ in member.shards[1].seen)  # unary calls could not wait there
    member.shards[1].changed = member.shards[0].changed
    member.group.tell(1)
    assert reading.outcome() is None
    expected = (-IDS).tolist()
    assert seen == [{"scan": sorted(2 * expected), "stats": 2 * IDS.size}.get(read, expected)]


@pytest.mark.parametrize("read", READS)
def test_a_read_does_not_wait_for_a_shard_to_be_told_of_a_step_that_is_not_decided(member: ScriptedMember, read: str) -> None:
    queue(member)
    member.cluster._synchronize()
    member.group.told[1] = 1
    member.group.hold()
    queue(member)
    READS[read](member)
    assert not member.group.parked


@pytest.mark.parametrize("place", [BOUNDED, None])
@pytest.mark.parametrize("read", READS)
def test_outside_sync_groups_reads_carry_no_step(
    monkeypatch: pytest.MonkeyPatch, read: str, place: GroupOptions | None
) -> None:
    with scripted_member(2, place, monkeypatch) as member:
        queue(member)
        member.cluster._synchronize()
        READS[read](member)
        assert {header.step for shard in member.shards for header in shard.headers if not header.number} == {0}
        assert len(pulls(member)) == (2 if read == "pull" else 0)


def test_a_pull_of_a_bounded_member_carries_the_clock_of_its_next_push(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(2, BOUNDED, monkeypatch) as member:
        training_pull(member)
        queue(member)
        training_pull(member)
        member.table.pull(IDS)
        assert [header.step for header in pulls(member)] == [1, 2, 0] * 2
        assert all(header.rank == (1 if header.step else 0) for header in pulls(member))


@pytest.mark.case("C061")
def test_a_bounded_pull_waits_for_a_slow_member_for_any_time_and_is_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_member(2, BOUNDED, monkeypatch, shard_timeout_s=1.0, client_lease_s=0.3) as member:
        fail(member.shards[1], 0, *[PARKED] * 100_000)
        pulling = Running(lambda: training_pull(member))
        beats = member.shards[0].beats
        wait_for("several time-outs", lambda: member.shards[0].beats >= beats + 30)
        assert not pulling.is_over
        member.shards[1].faults_of.clear()
        assert pulling.outcome() is None
        headers = pulls(member)
        assert all(header.budget_s < 0.25 for header in headers)  # so that it is answered before it is given up
        assert len({header.request_id for header in headers}) == len(headers)
        assert caplog.text == ""


def test_a_bounded_pull_from_a_shard_that_does_nothing_fails_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(2, BOUNDED, monkeypatch, shard_timeout_s=0.5) as member:
        fail(member.shards[1], 0, *[FAIL_BEFORE] * 1000)
        with pytest.raises(ShardUnreachable, match="tried"):
            training_pull(member)


def test_a_sync_pull_from_a_shard_that_does_not_carry_the_step_out_fails_after_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted_member(2, PLACE, monkeypatch, shard_timeout_s=0.5) as member:
        fail(member.shards[1], 0, *[PARKED] * 1000)
        with pytest.raises(ShardUnreachable, match=r"waited for its budget .*tried"):
            training_pull(member)


def test_pulls_of_an_async_client_have_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_member(2, None, monkeypatch) as member:
        queue(member)
        training_pull(member)
        assert {(header.step, header.rank) for header in pulls(member)} == {(0, 0)}
        assert [len(shard.closed) for shard in member.shards] == [1, 1]
