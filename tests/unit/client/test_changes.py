"""Numbered changes against shards that refuse, fail and restart by script (PROTOCOL.md, sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.scripted_client import ScriptedClient, pushed, scripted_client
from shardam_testing.scripted_shards import FAIL_BEFORE, INFO, LOSE_ANSWER, SWALLOW
from shardam_testing.waiting import wait_for

from shardam._parts import RowWrite, TableStepGradient, assign_change, push_change
from shardam._reads import read_weights
from shardam.errors import (
    ClientClosed,
    ClusterRestored,
    EtagMismatch,
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

FULL = RowLimit("no room for new rows")


@pytest.fixture
def client() -> Iterator[ScriptedClient]:
    with scripted_client(3) as client:
        yield client


def test_every_shard_gets_a_part_an_empty_one_too(client: ScriptedClient) -> None:
    row_ids = client.push(1)
    ids = client.ids_of(1).tolist()
    assert [shard.seen for shard in client.shards] == [[("push", 1, [])], [("push", 1, ids)], [("push", 1, [])]]
    assert client.endings() == [pushed(1)] * 3
    assert row_ids.number == 1


def test_every_request_carries_a_full_header(client: ScriptedClient) -> None:
    client.push(0)
    headers = [shard.headers[0] for shard in client.shards]
    for header in headers:
        assert (header.protocol_version, header.cluster_id, header.timeline, header.epoch) == (1, "scripted", 1, 1)
        assert (header.incarnation, header.client_id, header.number) == (11, client.session.client_id, 1)
        assert 0 < header.budget_s <= 20.0
        assert (header.step, header.rank, header.chunk_index, header.num_chunks) == (0, 0, 0, 0)
    assert len({header.request_id for header in headers} | {0}) == 4
    assert len(client.session.client_id) == 16


@pytest.mark.parametrize("fault", [LOSE_ANSWER, FAIL_BEFORE])
def test_a_change_whose_answer_is_lost_is_sent_again_and_applied_once(client: ScriptedClient, fault: str) -> None:
    client.shards[2].faults.extend([fault, fault])
    client.push(2)
    client.push(2)
    assert [(method, number) for method, number, _ in client.shards[2].seen] == [("push", 1)] * 3 + [("push", 2)]
    assert [(method, number) for method, number, _ in client.shards[0].seen] == [("push", 1), ("push", 2)]
    assert client.shards[2].fired[fault] == 2
    assert client.endings() == [pushed(1, 2)] * 3


def test_a_change_that_is_never_answered_is_sent_again_on_the_same_stream_after_its_budget() -> None:
    with scripted_client(2, shard_timeout_s=2.0) as client:
        client.push(0)
        client.shards[1].faults.append(SWALLOW)
        client.queue(1)
        client.queue(1)
        client.pusher.flush()
        assert client.shards[1].fired[SWALLOW] == 1
        assert client.endings() == [pushed(1, 2, 3)] * 2
        assert [number for _, number, _ in client.shards[1].seen].count(2) == 2
        assert len({header.request_id for header in client.shards[1].headers}) == len(client.shards[1].headers)


def test_a_full_queue_is_tried_again(client: ScriptedClient) -> None:
    client.shards[1].faults.append(QueueFull("full"))
    client.push(1)
    assert client.endings() == [pushed(1)] * 3


def test_what_no_shard_applied_is_skipped_on_all_and_the_number_is_used(client: ScriptedClient) -> None:
    for shard in client.shards:
        shard.faults.append(FULL)
    with pytest.raises(RowLimit, match="no room for new rows"):
        client.push(0)
    client.push(0)
    assert client.endings() == [[(1, "skip", []), *pushed(2)]] * 3


@pytest.mark.parametrize("error", [FULL, EtagMismatch("has changed")], ids=lambda error: type(error).__name__)
def test_what_some_shards_applied_is_void_on_the_others_with_the_tables_that_stepped(
    client: ScriptedClient, error: ShardamError
) -> None:
    client.shards[1].faults.append(error)
    with pytest.raises(type(error)) as caught:
        client.push(1)
    outcomes = f"number 1: shard 0 applied it, shard 1 {error.reason}, shard 2 applied it"
    assert error.message in caught.value.message
    assert outcomes in caught.value.message
    client.push(1)
    assert client.endings() == [pushed(1, 2), [(1, "void", [INFO.table_id]), *pushed(2)], pushed(1, 2)]


@pytest.mark.parametrize("kind", ["assign", "delete"])
def test_a_row_change_refused_by_one_shard_is_void_there_and_steps_no_table(client: ScriptedClient, kind: str) -> None:
    client.shards[0].faults.append(FULL)
    row_ids = client.ids_of(0)
    change = client.assign if kind == "assign" else client.delete
    with pytest.raises(RowLimit):
        change(row_ids)
    assert client.endings() == [[(1, "void", [])], [(1, kind, [])], [(1, kind, [])]]


def test_a_close_whose_answer_is_lost_is_sent_again(client: ScriptedClient) -> None:
    client.shards[0].faults.extend([FULL, LOSE_ANSWER])
    with pytest.raises(RowLimit):
        client.push(0)
    assert [method for method, _, _ in client.shards[0].seen] == ["push", "close", "close"]
    assert client.shards[0].closed == [(1, "void", [INFO.table_id])]


def test_a_silent_shard_is_named_with_the_flag_and_its_change_goes_first_when_it_is_back() -> None:
    with scripted_client(2, shard_timeout_s=1.0) as client:
        client.shards[1].faults.extend([FAIL_BEFORE] * 1000)
        with pytest.raises(ShardUnreachable) as caught:
            client.push(1)
        assert client.session.links[1].address in caught.value.message
        assert "--advertise" in caught.value.message
        client.shards[1].faults.clear()
        client.pusher.flush()
        client.push(1)
        assert client.endings() == [pushed(1, 2)] * 2


def test_the_pusher_sends_an_unanswered_change_again_before_the_next_and_before_a_read() -> None:
    with scripted_client(2, shard_timeout_s=1.0) as client:
        client.shards[0].faults.extend([FAIL_BEFORE] * 1000)
        with pytest.raises(ShardUnreachable):
            client.push(0)
        with pytest.raises(ShardUnreachable, match="an earlier change still has no answer, so this one was not sent"):
            client.push(0)
        with pytest.raises(ShardUnreachable):
            client.pusher.flush()
        client.shards[0].faults.clear()
        client.pusher.flush()
        assert client.endings() == [pushed(1)] * 2
        client.push(0)
        assert [shard.last for shard in client.shards] == [2, 2]


def test_an_error_of_a_queued_push_is_raised_once_by_the_next_call_that_asks(client: ScriptedClient) -> None:
    for shard in client.shards:
        shard.faults.append(FULL)
    client.queue(0)
    wait_for("the number to be closed", lambda: all(shard.last == 1 for shard in client.shards))
    with pytest.raises(RowLimit):
        client.pusher.flush()
    client.pusher.flush()
    client.queue(0)
    client.pusher.flush()
    assert client.endings() == [[(1, "skip", []), *pushed(2)]] * 3


def test_queued_pushes_keep_their_order(client: ScriptedClient) -> None:
    batches = [client.ids_of(1, count) for count in range(1, 41)]
    for row_ids in batches:
        client.pusher.submit(client.push_of(row_ids))
    client.pusher.flush()
    expected = [("push", number, row_ids.tolist()) for number, row_ids in enumerate(batches, start=1)]
    assert client.shards[1].seen == expected


def test_a_new_life_with_the_same_state_is_opened_again_and_gets_the_change(client: ScriptedClient) -> None:
    client.push(1)
    client.shards[1].restart()
    client.push(1)
    assert client.shards[1].opened == 2
    assert client.endings() == [pushed(1, 2)] * 3


def test_a_new_life_of_another_lineage_is_shard_lost_and_nothing_is_sent_again(client: ScriptedClient) -> None:
    for _ in range(3):
        client.push(1)
    client.shards[1].restart(lineage=99)
    with pytest.raises(ShardLost) as caught:
        client.push(1)
    assert (caught.value.acknowledged, caught.value.has) == (3, 0)
    assert "`shardam forget-shard --index 1`" in caught.value.message
    assert "give it its data folder back" in caught.value.message
    calls_before = [len(shard.seen) for shard in client.shards]
    for call in (
        client.pusher.flush,
        lambda: client.queue(0),
        lambda: read_weights(client.session, [(INFO, client.ids_of(0))]),
        client.session.check,
    ):
        with pytest.raises(ShardLost) as again:
            call()
        assert (again.value.acknowledged, again.value.has) == (3, 0)
    assert [len(shard.seen) for shard in client.shards] == calls_before


def test_a_shard_that_says_it_is_lost_is_shard_lost_with_what_it_had_acknowledged(client: ScriptedClient) -> None:
    for _ in range(2):
        client.push(1)
    client.shards[1].restart(lineage=99)
    client.shards[1].open_faults.append(ShardLost("shard 1 is LOST: `shardam forget-shard --index 1`"))
    with pytest.raises(ShardLost, match="forget-shard --index 1") as caught:
        client.push(1)
    assert (caught.value.acknowledged, caught.value.has) == (2, 0)
    with pytest.raises(ShardLost):
        client.session.check()


def test_a_read_that_meets_a_new_lineage_is_shard_lost_too(client: ScriptedClient) -> None:
    client.shards[0].restart(lineage=99)
    with pytest.raises(ShardLost):
        read_weights(client.session, [(INFO, client.ids_of(0))])


def test_a_shard_that_forgot_an_acknowledged_number_is_shard_lost(client: ScriptedClient) -> None:
    for _ in range(2):
        client.push(2)
    client.shards[2].last = 1
    with pytest.raises(ShardLost) as caught:
        client.push(2)
    assert (caught.value.acknowledged, caught.value.has) == (2, 1)


@pytest.mark.parametrize(
    "error",
    [ClusterRestored("timeline 2"), ClientClosed("left"), SequenceError("reused")],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_a_client_is_raised_by_every_later_call(client: ScriptedClient, error: ShardamError) -> None:
    client.shards[0].faults.append(error)
    with pytest.raises(type(error)):
        client.push(0)
    seen = [len(shard.seen) for shard in client.shards]
    with pytest.raises(type(error)):
        read_weights(client.session, [(INFO, client.ids_of(1))])
    assert [len(shard.seen) for shard in client.shards] == seen


def test_a_read_is_tried_again_until_it_is_answered(client: ScriptedClient) -> None:
    for shard in client.shards:
        shard.faults.extend([FAIL_BEFORE, QueueFull("full")])
    row_ids = np.concatenate([client.ids_of(shard) for shard in (2, 0, 1)])
    (rows,) = read_weights(client.session, [(INFO, row_ids)])
    np.testing.assert_array_equal(rows, np.repeat(row_ids, 2).reshape(-1, 2))


def test_a_read_whose_answer_is_swallowed_is_asked_again_under_another_request_id() -> None:
    with scripted_client(1, shard_timeout_s=2.0) as client:
        client.shards[0].faults.append(SWALLOW)
        (rows,) = read_weights(client.session, [(INFO, client.ids_of(0))])
        np.testing.assert_array_equal(rows[:, 0], client.ids_of(0))
        first, second = (header.request_id for header in client.shards[0].headers)
        assert first != second


@pytest.mark.case("C088")
def test_a_part_above_the_limit_is_refused_with_its_size_before_anything_is_sent(client: ScriptedClient) -> None:
    gradients = np.broadcast_to(np.float32(1.0), (6_000_000, 24))
    row_ids = np.arange(6_000_000, dtype=np.int64)
    step = TableStepGradient("t", INFO.table_id, row_ids, gradients, AdamOptions())
    with pytest.raises(MessageTooLarge, match=r"has 624000000 bytes, it may have at most 536870912; use smaller batches"):
        push_change([step], RouteMap(1, 1))
    assert [shard.seen for shard in client.shards] == [[], [], []]


def test_an_assign_above_one_message_is_refused_with_its_size_before_anything_is_sent(client: ScriptedClient) -> None:
    row_ids = np.arange(1_000_000, dtype=np.int64)
    write = RowWrite(row_ids, np.broadcast_to(np.float32(1.0), (1_000_000, 24)), None, None, if_absent=False)
    with pytest.raises(MessageTooLarge, match=r"has 104000256 bytes, it may have at most 67108864; use smaller batches"):
        assign_change("t", INFO.table_id, write, RouteMap(1, 1))
    assert [shard.seen for shard in client.shards] == [[], [], []]


def test_close_leaves_home_which_tells_the_others(client: ScriptedClient) -> None:
    client.session.close()
    assert [shard.left for shard in client.shards] == [[client.session.client_id], [], []]
    with pytest.raises(ClientClosed, match="connect again"):
        client.session.check()


def test_a_home_that_cannot_be_told_of_the_end_is_logged(client: ScriptedClient, caplog: pytest.LogCaptureFixture) -> None:
    client.shards[0].stop()
    client.session.close()
    assert "closes it after 30 s of silence" in caplog.text
