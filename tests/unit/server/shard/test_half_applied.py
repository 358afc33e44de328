"""A change that breaks off in memory: the journal has it whole, and nothing is read or changed from what is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from shardam_testing.held_shard import HANG_S, held_shard
from shardam_testing.matrix import num_threads
from shardam_testing.shard_states import journaled_state, make_tables, replayed, seen

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import JournalDamaged, JournalFailed, OutOfMemory
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.journal import change_records
from shardam_server.shard.journal.replay import Replay
from shardam_server.shard.records import CpuDevice, CpuRecords
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import RowStorage
from shardam_server.shard.table import GradientSection, Table

CLIENT = b"c" * 16
ROW_IDS = np.arange(4, dtype=np.int64)
OPTIONS = AdamOptions(lr=0.1)
SPECS = [TableSpec("first", 3), TableSpec("second", 3)]


def rows() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.arange(12, dtype=np.float32).reshape(4, 3)


def push(state: ShardState, number: int = 1) -> Outcome:
    sections = [GradientSection(table, ROW_IDS, rows(), OPTIONS, 1.0) for table in state.tables()]
    origin = Origin(CLIENT, number, b"content %d" % number)
    return state.run_number(origin, lambda: state.push(sections, origin))[0]


def assign(state: ShardState) -> Outcome:
    return state.assign(state.table(1), RowWrite(ROW_IDS, rows() + 1, exp_avg=rows()))


def clear_moments(state: ShardState) -> Outcome:
    return state.clear_moments(state.table(1), ROW_IDS)


def delete(state: ShardState) -> Outcome:
    return state.delete(state.table(1), ROW_IDS[:2])


def fail_at_second_table(patch: pytest.MonkeyPatch, error: Exception) -> None:
    apply = Table.apply

    def apply_or_fail(table: Table, *arguments: object) -> None:
        if table.spec.name == "second":
            raise error
        apply(table, *arguments)  # type: ignore[arg-type]

    patch.setattr(Table, "apply", apply_or_fail)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [MemoryError("injected"), OutOfMemory("injected"), RuntimeError("CUDA error")])
def test_a_push_that_breaks_off_stays_in_the_journal_and_is_never_applied_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    called: list[str] = []
    state.when_half_applied = lambda: called.append(state.half_applied)
    with monkeypatch.context() as patch:
        fail_at_second_table(patch, error)
        with pytest.raises(JournalFailed, match=r"change 3 could not be applied in memory \(.*\(?.*start the shard again"):
            push(state)
    assert called == [state.half_applied]
    assert state.change_number == 2
    for change in (push, assign, delete, lambda state: state.open_client(b"d" * 16)):
        with pytest.raises(JournalFailed, match="change 3 could not be applied"):
            change(state)
    again = replayed(journal.records())
    other, _ = journaled_state()
    other.install(make_tables(SPECS))
    other.open_client(CLIENT)
    outcome = push(other)
    assert seen(again, list(ROW_IDS)) == seen(other, list(ROW_IDS))
    assert push(again) == outcome  # the client's repeat


@pytest.mark.parametrize("change", [push, assign, clear_moments])
def test_what_a_device_reports_at_the_end_of_a_change_leaves_it_in_the_journal(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[ShardState], Outcome]
) -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    num_records = len(journal.records())
    monkeypatch.setattr(CpuDevice, "finish", raising(RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(JournalFailed, match="an illegal memory access"):
        change(state)
    assert len(journal.records()) == num_records + 1


@pytest.mark.parametrize("change", [assign, clear_moments])
def test_a_change_that_finds_no_room_before_its_first_write_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[ShardState], Outcome]
) -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    push(state)
    before, records = seen(state, list(ROW_IDS)), journal.records()
    with monkeypatch.context() as patch:
        patch.setattr(CpuRecords, "write", raising(MemoryError("full")))
        with pytest.raises(OutOfMemory, match="nothing was changed"):
            change(state)
    assert (seen(state, list(ROW_IDS)), journal.records()) == (before, records)
    change(state)
    assert seen(replayed(journal.records()), list(ROW_IDS)) == seen(state, list(ROW_IDS))


def test_a_step_that_cannot_be_staged_for_any_reason_leaves_no_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    before = seen(state, list(ROW_IDS))
    for operation in ("initialize", "stage"):
        with monkeypatch.context() as patch:
            patch.setattr(CpuRecords, operation, raising(RuntimeError("CUDA error")))
            with pytest.raises(RuntimeError, match="CUDA error"):
                push(state)
        assert seen(state, list(ROW_IDS)) == before
    push(state)
    assert seen(replayed(journal.records()), list(ROW_IDS)) == seen(state, list(ROW_IDS))


def test_a_replay_that_breaks_off_in_memory_is_no_damage_of_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    push(state)
    fail_at_second_table(monkeypatch, RuntimeError("CUDA error"))
    with pytest.raises(JournalFailed) as caught:
        replayed(journal.records())
    assert not isinstance(caught.value, JournalDamaged)


def test_memory_only_says_that_the_rows_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ShardState(CpuDevice(num_threads()))
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    fail_at_second_table(monkeypatch, MemoryError("injected"))
    with pytest.raises(JournalFailed, match="no file has the rows: the shard ends, and is LOST when it is started again"):
        push(state)


def test_a_shard_answers_no_pull_read_or_change_from_half_applied_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    applies, release = threading.Event(), threading.Event()

    def fail_when_told(*_: object) -> None:
        applies.set()
        release.wait(HANG_S)
        raise MemoryError("injected")

    with held_shard() as held, held.client() as client, held.client() as other, ThreadPoolExecutor(3) as threads:
        table, untouched = held.install(), held.install()
        client.push(1, table, [1], np.ones((1, 2)))
        with monkeypatch.context() as patch:
            patch.setattr(RowStorage, "apply", fail_when_told)
            pushed = threads.submit(client.push, 2, table, [1], np.ones((1, 2)))
            assert applies.wait(HANG_S)
            pulled = threads.submit(other.pull, table, [1])  # waits for the table's lock, or comes too late
            queued = threads.submit(other.push, 1, untouched, [1], np.ones((1, 2)))
            release.set()
            for call in (pushed, pulled, queued):
                with pytest.raises(JournalFailed, match="change 6 could not be applied in memory"):
                    call.result(HANG_S)
        calls: list[Callable[[], object]] = [
            lambda: client.pull(untouched, [1]),
            lambda: client.read(table, [1]),
            lambda: client.push(2, table, [1], np.ones((1, 2))),
            lambda: other.open(),
        ]
        for action in calls:
            with pytest.raises(JournalFailed, match="change 6 could not be applied in memory"):
                action()
        assert client.status().state == shard_pb2.SERVING_STATE_SERVING


def test_a_read_that_was_let_in_before_is_refused_when_it_gets_its_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_shard() as held, held.client() as client, ThreadPoolExecutor(1) as threads:
        table = held.install()
        own = held.shard.state.table(table.table_id)
        with own.lock.write():
            pulled = threads.submit(client.pull, table, [1])
            held.wait_for_reads(1)
            held.shard.state.half_applied = "change 7 could not be applied in memory"
        with pytest.raises(JournalFailed, match="change 7"):
            pulled.result(HANG_S)
        held.shard.state.half_applied = ""


def test_records_of_changes_are_made_before_the_journal_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    state, journal = journaled_state()
    state.install(make_tables(SPECS))
    state.open_client(CLIENT)
    before, records = seen(state, list(ROW_IDS)), journal.records()
    with monkeypatch.context() as patch:
        patch.setattr(change_records, "push_record", raising(MemoryError("no room for a record")))
        with pytest.raises(MemoryError):
            push(state)
    assert (seen(state, list(ROW_IDS)), journal.records(), state.half_applied) == (before, records, "")
    replay = Replay(ShardState(CpuDevice(num_threads())), CpuDevice(num_threads()).make_records)
    for record, data in records:
        replay.apply(record, data)
