"""Snapshots: what they hold, how much they keep, and that nobody waits for one that has ended."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from shardam_testing.group_changes import MEMBERS, SYNC, decision, members, part
from shardam_testing.shard_histories import all_bits, every_change, new_state
from shardam_testing.shard_histories import make_tables as make_every_table
from shardam_testing.shard_states import journaled_state, make_tables, seen
from shardam_testing.snapshot_model import Copying
from shardam_testing.waiting import wait_for

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import JournalFailed, OutOfMemory
from shardam_proto.schema import TableSpec
from shardam_server.shard import snapshots
from shardam_server.shard.clients import Outcome
from shardam_server.shard.pre_images import LEAST_PRE_IMAGE_BYTES, PreImageRoom, row_bytes
from shardam_server.shard.records import CpuRecords
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.snapshots import Snapshot, SnapshotFailed
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import RowStorage
from shardam_server.shard.table import GradientSection

HANG_S = 60.0
"""Ten times what anything here takes on a busy machine."""

NUM_ROWS = 100
PAGE_ROWS = 8
ROW_BYTES = row_bytes(2)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PAGE_BYTES", PAGE_ROWS * ROW_BYTES)


@pytest.fixture
def state() -> ShardState:
    """One table of NUM_ROWS rows."""
    state = ShardState(new_state().device)
    state.install(make_tables([TableSpec("t", 2)]))
    push(state, range(NUM_ROWS))
    return state


def push(state: ShardState, row_ids: range) -> Outcome:
    ids = np.array(row_ids, np.int64)
    return state.push([GradientSection(state.table(1), ids, np.ones((ids.size, 2), np.float32), AdamOptions(lr=0.1), 1.0)])


def copied_rows(snapshot: Snapshot) -> int:
    return sum(record.rows.num_rows for record, _ in snapshot.records(parts=True))


@pytest.fixture
def applier() -> Iterator[ThreadPoolExecutor]:
    """Stands for the sequencer's thread."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_a_snapshot_of_a_history_of_every_kind_holds_the_state_while_it_goes_on() -> None:
    changes = every_change()
    for num_before in range(1, len(changes)):
        state = new_state()
        for change in changes[:num_before]:
            change(state)
        copying = Copying(state)
        for change in changes[num_before:]:
            change(state)
            copying.copy(1)
        copying.check()


def test_parts_are_in_it_only_where_they_are_asked_for() -> None:
    state, rng = new_state(), np.random.default_rng(1)
    state.install(make_every_table())
    for client_id in MEMBERS:
        state.open_client(client_id)
    members(SYNC, 1, 0, 1)(state)
    part(rng, 0, "words", "users")(state)
    part(rng, 1, "words")(state)
    first, second = Snapshot(state), Snapshot(state)
    assert len(first.parts) == 2
    assert first.size_bytes == sum(one.num_bytes for one in first.parts)  # there are no rows yet
    decision("applied", 0, 1)(state)
    with_parts = [record.WhichOneof("part") for record, _ in first.records(parts=True)]
    without = [record.WhichOneof("part") for record, _ in second.records(parts=False)]
    assert with_parts.count("staged_part") == 2
    assert "staged_part" not in without
    assert with_parts[-1] == without[-1] == "end"


def test_a_read_only_table_and_last_options_are_in_its_description(state: ShardState) -> None:
    state.table(1).read_only = True
    (info,) = Snapshot(state).tables
    assert (info.read_only, info.num_rows, info.table_step, info.last_options.lr) == (True, NUM_ROWS, 1, 0.1)


@pytest.mark.case("C075")
def test_a_push_completes_while_the_copier_is_held_at_a_gate(state: ShardState, applier: ThreadPoolExecutor) -> None:
    at_gate, gate = threading.Event(), threading.Event()
    snapshot = Snapshot(state)

    def copy() -> int:
        num_rows = 0
        for record, _ in snapshot.records(parts=True):
            num_rows += record.rows.num_rows
            if num_rows == PAGE_ROWS:
                at_gate.set()
                assert gate.wait(HANG_S)
        return num_rows

    with ThreadPoolExecutor(1) as copiers:
        copied = copiers.submit(copy)
        assert at_gate.wait(HANG_S)
        outcome = applier.submit(push, state, range(2 * NUM_ROWS)).result(HANG_S)
        assert outcome.steps == {1: 2}
        assert 0 < snapshot.pre_image_bytes <= (NUM_ROWS - PAGE_ROWS) * ROW_BYTES
        assert state.snapshots.kept_bytes == snapshot.pre_image_bytes
        assert not copied.done()
        gate.set()
        assert copied.result(HANG_S) == NUM_ROWS
    assert state.snapshots.kept_bytes == 0


def waiting(state: ShardState, applier: ThreadPoolExecutor, change: Callable[[], object]) -> Future[object]:
    """Starts a change that has to wait for a snapshot's room."""
    future = applier.submit(change)
    with pytest.raises(TimeoutError):
        future.result(0.2)
    return future


def test_a_change_waits_where_too_much_is_kept_and_takes_no_lock_meanwhile(
    state: ShardState, applier: ThreadPoolExecutor
) -> None:
    snapshot = Snapshot(state, limit_bytes=10 * ROW_BYTES)
    push(state, range(4))
    push(state, range(40))  # one change may go beyond the limit
    assert snapshot.pre_image_bytes == 40 * ROW_BYTES
    before, table = seen(state, [50]), state.table(1)
    changes: list[Callable[[], object]] = [
        lambda: push(state, range(50, 51)),
        lambda: state.assign(table, RowWrite(np.array([60]), np.ones((1, 2), np.float32))),
        lambda: state.clear_moments(table, np.array([70])),
        lambda: state.delete(table, np.array([80])),
    ]
    held = waiting(state, applier, changes[0])
    others = [applier.submit(change) for change in changes[1:]]
    assert table.lock.enter_at_once()
    table.lock.leave()
    assert seen(state, [50]) == before
    assert copied_rows(snapshot) == NUM_ROWS
    for future in (held, *others):
        future.result(HANG_S)
    assert state.snapshots.waited_s > 0
    assert table.num_rows == NUM_ROWS - 1


def test_a_copier_makes_room_page_by_page(state: ShardState, applier: ThreadPoolExecutor) -> None:
    snapshot = Snapshot(state, limit_bytes=ROW_BYTES)
    push(state, range(40))
    held = waiting(state, applier, lambda: push(state, range(50, 51)))
    records = snapshot.records(parts=True)
    num_rows = 0
    while num_rows < PAGE_ROWS + 40:  # the first page, and all that was kept
        num_rows += next(records)[0].rows.num_rows
    next(records)  # what was kept last is written now
    held.result(HANG_S)
    num_rows += sum(record.rows.num_rows for record, _ in records)
    assert num_rows <= NUM_ROWS
    assert snapshot.closed


@pytest.mark.parametrize("end", ["close", "failing copier", "copier that stops", "half applied"])
def test_an_end_of_any_kind_lets_changes_go_on(
    state: ShardState, applier: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    snapshot = Snapshot(state, limit_bytes=ROW_BYTES)
    push(state, range(40))
    held = waiting(state, applier, lambda: push(state, range(50, 51)))
    records = snapshot.records(parts=True)
    match end:
        case "close":
            snapshot.close()
            snapshot.close()
            with pytest.raises(SnapshotFailed, match="was given up before it was copied"):
                list(records)
        case "failing copier":
            monkeypatch.setattr(RowStorage, "copy_page", _fail)
            with pytest.raises(MemoryError):
                list(records)
        case "copier that stops":
            next(records)
            next(records)
            records.close()  # type: ignore[attr-defined]  # a generator
        case "half applied":
            state.half_applied = "change 9 could not be applied in memory"
            with pytest.raises(JournalFailed):
                list(records)
            state.half_applied = ""
    held.result(HANG_S)
    assert snapshot.closed
    assert state.snapshots.kept_bytes == 0
    push(state, range(60))
    assert state.snapshots.kept_bytes == 0
    assert not state.table(1).storage.watchers


def test_a_snapshot_that_nobody_holds_any_more_keeps_no_change_waiting(state: ShardState, applier: ThreadPoolExecutor) -> None:
    snapshots_held = [Snapshot(state, limit_bytes=ROW_BYTES)]
    push(state, range(40))
    held = waiting(state, applier, lambda: push(state, range(50, 51)))
    snapshots_held.clear()
    gc.collect()
    held.result(HANG_S)
    assert state.snapshots.kept_bytes == 0


def _fail(*_: object) -> None:
    raise MemoryError("no room for a page")


def test_a_snapshot_that_ends_while_it_is_copied_says_so(state: ShardState) -> None:
    snapshot = Snapshot(state)
    records = snapshot.records(parts=True)
    for _ in range(3):
        next(records)
    snapshot.close()
    with pytest.raises(SnapshotFailed, match="was given up"):
        list(records)


def test_rows_that_are_not_all_there_are_an_error(state: ShardState, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(state)
    monkeypatch.setattr(state.table(1).storage.watchers, "before", lambda row_ids, slots: [])
    push(state, range(5))
    with pytest.raises(SnapshotFailed, match="has 95 rows of table 1, which had 100"):
        list(snapshot.records(parts=True))


def test_each_open_snapshot_keeps_its_own(state: ShardState) -> None:
    first = Snapshot(state)
    push(state, range(3))
    second = Snapshot(state)
    push(state, range(5))
    assert first.pre_image_bytes == 5 * ROW_BYTES
    assert second.pre_image_bytes == 5 * ROW_BYTES
    assert state.snapshots.kept_bytes == 10 * ROW_BYTES
    assert copied_rows(second) == copied_rows(first) == NUM_ROWS


def test_a_delete_for_whose_rows_there_is_no_room_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state, journal = journaled_state()
    state.install(make_tables([TableSpec("t", 2)]))
    push(state, range(5))
    snapshot = Snapshot(state)
    before, records = all_bits(state), journal.records()
    with monkeypatch.context() as patch:
        patch.setattr(CpuRecords, "read", _fail)
        with pytest.raises(OutOfMemory, match="that a base or checkpoint is yet to copy"):
            state.delete(state.table(1), np.array([1, 2]))
    assert (all_bits(state), journal.records(), state.half_applied) == (before, records, "")
    state.delete(state.table(1), np.array([1, 2, 1]))
    assert copied_rows(snapshot) == 5


def test_the_limit_is_an_eighth_of_the_rows_and_at_least_the_largest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    state, limits = new_state(), list[int]()
    state.install(make_tables([TableSpec("t", 2)]))

    def note(limit_bytes: int) -> PreImageRoom:
        limits.append(limit_bytes)
        return PreImageRoom(limit_bytes)

    monkeypatch.setattr(snapshots, "PreImageRoom", note)
    Snapshot(state).close()
    monkeypatch.setattr(RowStorage, "record_bytes", 2**30)
    Snapshot(state).close()
    assert limits == [LEAST_PRE_IMAGE_BYTES, 2**27]


def test_copiers_and_changes_on_threads_of_their_own_give_the_rows_of_each_cut(
    state: ShardState, applier: ThreadPoolExecutor
) -> None:
    rng, stop = np.random.default_rng(1), threading.Event()

    def change() -> int:
        count = 0
        while not stop.is_set():
            start = int(rng.integers(0, NUM_ROWS))
            push(state, range(start, start + 20))
            state.delete(state.table(1), rng.integers(0, NUM_ROWS, 2))
            count += 1
            if count == 5000:
                break
        return count

    with ThreadPoolExecutor(1) as sequencer:
        for _ in range(20):
            copying = sequencer.submit(Copying, state).result(HANG_S)
            stop.clear()
            changes = sequencer.submit(change)
            wait_for("changes to begin", lambda cut=copying.snapshot.change_number: state.change_number > cut)  # type: ignore[misc]
            try:
                copying.check()
            finally:
                stop.set()
            assert changes.result(HANG_S) > 0
