"""Numbered changes against shards that refuse, fail and restart by script (PROTOCOL.md, sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.scripted_shards import FAIL_BEFORE, INFO, LOSE_ANSWER, ScriptedShard, scripted_session
from shardam_testing.waiting import wait_for

from shardam._arrays import Int64s
from shardam._changes import ChangeLog
from shardam._parts import PushChange, RowWrite, TableStepGradient, assign_change, delete_change, push_change
from shardam._pusher import Pusher
from shardam._reads import read_weights
from shardam._session import Session
from shardam.errors import (
    ClientClosed,
    ClusterRestored,
    MessageTooLarge,
    QueueFull,
    RowLimit,
    SequenceError,
    ShardamError,
    ShardLost,
    ShardUnreachable,
)
from shardam_kernels.factors import AdamOptions
from shardam_proto.routing import RouteMap

Scripted = tuple[Session, list[ScriptedShard]]

FULL = RowLimit("no room for new rows")


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with scripted_session(3) as session_and_shards:
        yield session_and_shards


def ids_of_shard(shard: int, count: int = 2, num_shards: int = 3) -> Int64s:
    row_ids = np.arange(1000, dtype=np.int64)
    owned: Int64s = row_ids[RouteMap(1, num_shards).shards_of(row_ids) == shard][:count]
    return owned


def push_of(row_ids: Int64s, session: Session) -> PushChange:
    gradients = np.ones((row_ids.size, 2), np.float32)
    return push_change([TableStepGradient("t", INFO.table_id, row_ids, gradients, AdamOptions())], session.route_map)


def endings(shards: list[ScriptedShard]) -> list[list[tuple[int, str, list[int]]]]:
    return [shard.closed for shard in shards]


def test_every_shard_gets_a_part_an_empty_one_too(scripted: Scripted) -> None:
    session, shards = scripted
    row_ids = ids_of_shard(1)
    ChangeLog(session).run(push_of(row_ids, session))
    assert [shard.seen for shard in shards] == [[("push", 1, [])], [("push", 1, row_ids.tolist())], [("push", 1, [])]]
    assert endings(shards) == [[(1, "push", [INFO.table_id])]] * 3


def test_every_request_carries_a_full_header(scripted: Scripted) -> None:
    session, shards = scripted
    ChangeLog(session).run(push_of(ids_of_shard(0), session))
    headers = [shard.headers[0] for shard in shards]
    for header in headers:
        assert (header.protocol_version, header.cluster_id, header.timeline, header.epoch) == (1, "scripted", 1, 1)
        assert (header.incarnation, header.client_id, header.number) == (11, session.client_id, 1)
        assert 0 < header.budget_s <= 20.0
        assert (header.step, header.rank, header.chunk_index, header.num_chunks) == (0, 0, 0, 0)
    assert len({header.request_id for header in headers} | {0}) == 4
    assert len(session.client_id) == 16


@pytest.mark.parametrize("fault", [LOSE_ANSWER, FAIL_BEFORE])
def test_a_change_whose_answer_is_lost_is_sent_again_and_applied_once(scripted: Scripted, fault: str) -> None:
    session, shards = scripted
    shards[2].faults.extend([fault, fault])
    log = ChangeLog(session)
    log.run(push_of(ids_of_shard(2), session))
    log.run(push_of(ids_of_shard(2), session))
    assert [(method, number) for method, number, _ in shards[2].seen] == [("push", 1)] * 3 + [("push", 2)]
    assert [(method, number) for method, number, _ in shards[0].seen] == [("push", 1), ("push", 2)]
    assert endings(shards) == [[(1, "push", [INFO.table_id]), (2, "push", [INFO.table_id])]] * 3


def test_a_full_queue_is_tried_again(scripted: Scripted) -> None:
    session, shards = scripted
    shards[1].faults.append(QueueFull("full"))
    ChangeLog(session).run(push_of(ids_of_shard(1), session))
    assert endings(shards) == [[(1, "push", [INFO.table_id])]] * 3


def test_what_no_shard_applied_is_skipped_on_all_and_the_number_is_used(scripted: Scripted) -> None:
    session, shards = scripted
    for shard in shards:
        shard.faults.append(FULL)
    log = ChangeLog(session)
    with pytest.raises(RowLimit, match="no room for new rows"):
        log.run(push_of(ids_of_shard(0), session))
    log.run(push_of(ids_of_shard(0), session))
    assert endings(shards) == [[(1, "skip", []), (2, "push", [INFO.table_id])]] * 3


def test_what_some_shards_applied_is_void_on_the_others_with_the_tables_that_stepped(scripted: Scripted) -> None:
    session, shards = scripted
    shards[1].faults.append(FULL)
    log = ChangeLog(session)
    with pytest.raises(RowLimit) as caught:
        log.run(push_of(ids_of_shard(1), session))
    outcomes = "number 1: shard 0 applied it, shard 1 ROW_LIMIT, shard 2 applied it"
    assert "no room for new rows" in caught.value.message
    assert outcomes in caught.value.message
    log.run(push_of(ids_of_shard(1), session))
    applied = [(1, "push", [INFO.table_id]), (2, "push", [INFO.table_id])]
    assert endings(shards) == [applied, [(1, "void", [INFO.table_id]), (2, "push", [INFO.table_id])], applied]


@pytest.mark.parametrize("kind", ["assign", "delete"])
def test_a_row_change_refused_by_one_shard_is_void_there_and_steps_no_table(scripted: Scripted, kind: str) -> None:
    session, shards = scripted
    shards[0].faults.append(FULL)
    row_ids = ids_of_shard(0)
    write = RowWrite(row_ids, np.ones((row_ids.size, 2), np.float32), None, None, if_absent=False)
    if kind == "assign":
        change = assign_change("t", INFO.table_id, write, session.route_map)
        with pytest.raises(RowLimit):
            ChangeLog(session).run(change)
    else:
        with pytest.raises(RowLimit):
            ChangeLog(session).run(delete_change("t", INFO.table_id, row_ids, session.route_map))
    assert endings(shards) == [[(1, "void", [])], [(1, kind, [])], [(1, kind, [])]]


def test_a_close_whose_answer_is_lost_is_sent_again(scripted: Scripted) -> None:
    session, shards = scripted
    shards[0].faults.extend([FULL, LOSE_ANSWER])
    with pytest.raises(RowLimit):
        ChangeLog(session).run(push_of(ids_of_shard(0), session))
    assert [method for method, _, _ in shards[0].seen] == ["push", "close", "close"]
    assert shards[0].closed == [(1, "void", [INFO.table_id])]


def test_a_silent_shard_is_named_with_the_flag_and_its_change_goes_first_when_it_is_back() -> None:
    with scripted_session(2, shard_timeout_s=1.0) as (session, shards):
        shards[1].faults.extend([FAIL_BEFORE] * 1000)
        log = ChangeLog(session)
        with pytest.raises(ShardUnreachable) as caught:
            log.run(push_of(ids_of_shard(1, num_shards=2), session))
        assert session.links[1].address in caught.value.message
        assert "--advertise" in caught.value.message
        assert log.has_unsettled
        shards[1].faults.clear()
        log.settle()
        assert not log.has_unsettled
        log.run(push_of(ids_of_shard(1, num_shards=2), session))
        expected = [(1, "push", [INFO.table_id]), (2, "push", [INFO.table_id])]
        assert endings(shards) == [expected, expected]


def test_the_pusher_sends_an_unanswered_change_again_before_the_next_and_before_a_read() -> None:
    with scripted_session(2, shard_timeout_s=1.0) as (session, shards):
        pusher = Pusher(session)
        shards[0].faults.extend([FAIL_BEFORE] * 1000)
        with pytest.raises(ShardUnreachable):
            pusher.run(push_of(ids_of_shard(0, num_shards=2), session))
        with pytest.raises(ShardUnreachable, match="an earlier change still has no answer, so this one was not sent"):
            pusher.run(push_of(ids_of_shard(0, num_shards=2), session))
        shards[0].faults.clear()
        pusher.flush()
        assert endings(shards) == [[(1, "push", [INFO.table_id])]] * 2
        pusher.run(push_of(ids_of_shard(0, num_shards=2), session))
        assert [shard.last for shard in shards] == [2, 2]
        pusher.close()


def test_an_error_of_a_queued_push_is_raised_once_by_the_next_call_that_asks(scripted: Scripted) -> None:
    session, shards = scripted
    pusher = Pusher(session)
    for shard in shards:
        shard.faults.append(FULL)
    pusher.submit(push_of(ids_of_shard(0), session))
    wait_for("the number to be closed", lambda: all(shard.last == 1 for shard in shards))
    with pytest.raises(RowLimit):
        pusher.flush()
    pusher.flush()
    pusher.submit(push_of(ids_of_shard(0), session))
    pusher.flush()
    assert endings(shards) == [[(1, "skip", []), (2, "push", [INFO.table_id])]] * 3
    pusher.close()


def test_queued_pushes_keep_their_order(scripted: Scripted) -> None:
    session, shards = scripted
    pusher = Pusher(session)
    batches = [ids_of_shard(1, count) for count in range(1, 41)]
    for row_ids in batches:
        pusher.submit(push_of(row_ids, session))
    pusher.flush()
    assert shards[1].seen == [("push", number, row_ids.tolist()) for number, row_ids in enumerate(batches, start=1)]
    pusher.close()


def test_a_new_life_with_the_same_state_is_opened_again_and_gets_the_change(scripted: Scripted) -> None:
    session, shards = scripted
    log = ChangeLog(session)
    log.run(push_of(ids_of_shard(1), session))
    shards[1].restart()
    log.run(push_of(ids_of_shard(1), session))
    assert shards[1].opened == 2
    assert endings(shards) == [[(1, "push", [INFO.table_id]), (2, "push", [INFO.table_id])]] * 3


def test_a_new_life_of_another_lineage_is_shard_lost_and_nothing_is_sent_again(scripted: Scripted) -> None:
    session, shards = scripted
    log = ChangeLog(session)
    for _ in range(3):
        log.run(push_of(ids_of_shard(1), session))
    shards[1].restart(lineage=99)
    with pytest.raises(ShardLost) as caught:
        log.run(push_of(ids_of_shard(1), session))
    assert (caught.value.acknowledged, caught.value.has) == (3, 0)
    assert "restart the cluster and train again" in caught.value.message
    calls_before = [len(shard.seen) for shard in shards]
    for call in (
        lambda: log.settle(),
        lambda: read_weights(session, [(INFO, ids_of_shard(0))]),
        lambda: session.check(),
    ):
        with pytest.raises(ShardLost) as again:
            call()
        assert (again.value.acknowledged, again.value.has) == (3, 0)
    assert [len(shard.seen) for shard in shards] == calls_before


def test_a_read_that_meets_a_new_lineage_is_shard_lost_too(scripted: Scripted) -> None:
    session, shards = scripted
    shards[0].restart(lineage=99)
    with pytest.raises(ShardLost):
        read_weights(session, [(INFO, ids_of_shard(0))])


def test_a_shard_that_forgot_an_acknowledged_number_is_shard_lost(scripted: Scripted) -> None:
    session, shards = scripted
    log = ChangeLog(session)
    for _ in range(2):
        log.run(push_of(ids_of_shard(2), session))
    shards[2].last = 1
    with pytest.raises(ShardLost) as caught:
        log.run(push_of(ids_of_shard(2), session))
    assert (caught.value.acknowledged, caught.value.has) == (2, 1)


@pytest.mark.parametrize(
    "error",
    [ClusterRestored("timeline 2"), ClientClosed("left"), SequenceError("reused")],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_a_client_is_raised_by_every_later_call(scripted: Scripted, error: ShardamError) -> None:
    session, shards = scripted
    shards[0].faults.append(error)
    with pytest.raises(type(error)):
        ChangeLog(session).run(push_of(ids_of_shard(0), session))
    seen = [len(shard.seen) for shard in shards]
    with pytest.raises(type(error)):
        read_weights(session, [(INFO, ids_of_shard(1))])
    assert [len(shard.seen) for shard in shards] == seen


def test_a_read_is_tried_again_until_it_is_answered(scripted: Scripted) -> None:
    session, shards = scripted
    for shard in shards:
        shard.faults.extend([FAIL_BEFORE, QueueFull("full")])
    row_ids = np.concatenate([ids_of_shard(shard) for shard in (2, 0, 1)])
    (rows,) = read_weights(session, [(INFO, row_ids)])
    np.testing.assert_array_equal(rows, np.repeat(row_ids, 2).reshape(-1, 2))


def test_a_part_above_the_largest_message_is_refused_with_its_size_before_anything_is_sent(scripted: Scripted) -> None:
    _, shards = scripted
    gradients = np.broadcast_to(np.float32(1.0), (6_000_000, 2))
    row_ids = np.arange(6_000_000, dtype=np.int64)
    step = TableStepGradient("t", INFO.table_id, row_ids, np.ascontiguousarray(gradients), AdamOptions())
    with pytest.raises(MessageTooLarge, match=r"has 96000000 bytes, a message holds at most 67108864; use smaller batches"):
        push_change([step], RouteMap(1, 1))
    assert [shard.seen for shard in shards] == [[], [], []]


def test_close_leaves_every_shard(scripted: Scripted) -> None:
    session, shards = scripted
    session.close()
    assert [shard.left for shard in shards] == [[session.client_id]] * 3
    with pytest.raises(ClientClosed, match="connect again"):
        session.check()
