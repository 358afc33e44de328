"""The state of one shard: its tables and clients, and the changes over them, each whole in the journal before it is applied."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shardam_proto.errors import JournalFailed, OutOfMemory, SchemaMismatch, ShardamError
from shardam_server.shard.clients import MAX_CLIENTS, ClientEntry, Clients, Origin, Outcome, check_client_id
from shardam_server.shard.conditions import RowCondition, check_condition
from shardam_server.shard.groups.entries import Groups
from shardam_server.shard.groups.pending_rows import PendingRows
from shardam_server.shard.installed_tables import InstalledTables
from shardam_server.shard.journal import change_records
from shardam_server.shard.journal.interface import Journal, NoJournal
from shardam_server.shard.phases import Laps
from shardam_server.shard.pre_images import OpenSnapshots
from shardam_server.shard.records import Device, Int64s
from shardam_server.shard.row_limits import check_room
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.staged_steps import discard_all, stage_all
from shardam_server.shard.table import GradientSection, PreparedUpdate, StagedTableStep, Table

logger = logging.getLogger(__name__)

NO_CONDITION = RowCondition()
"""Nothing is asked of the rows that a change names."""


class ShardState(InstalledTables):
    """Tables, clients and the count of changes. Changes come from the sequencer's thread alone; reads from any thread.

    Every change is: validate, reserve, append to the journal, apply, which cannot fail. Should it fail all the same, memory may
    hold the change in part: the journal has it whole, this state is never read or changed again, and its shard has to end.

    Args:
        device: holds the records.
        max_rows: rows over all tables; 0: no limit.
        max_clients: clients whose entries are kept.

    Attributes:
        device: holds the records.
        journal: takes every change; set once the state on disk has been replayed.
        change_number: how many changes have been applied on this timeline.
        loaded_change: the last of those that came with a base or checkpoint, which does not tell which rows were deleted.
        laps: takes the phases of the change that is being applied.
        groups: groups of workers, and parts that wait for their step's decision.
        pending_rows: rows that these parts will create.
        snapshots: copies of it that are being made while changes go on.
        half_applied: what went wrong while a change was applied, and what to do; empty: nothing. Set before the locks of its
            tables are given back.
        when_half_applied: called then, on the sequencer's thread.
    """

    def __init__(self, device: Device, max_rows: int = 0, max_clients: int = MAX_CLIENTS) -> None:
        super().__init__()
        self.device = device
        self.max_rows = max_rows
        self.clients = Clients(max_clients)
        self.journal: Journal = NoJournal()
        self.change_number = 0
        self.loaded_change = 0
        self.laps = Laps(0.0)
        self.half_applied = ""
        self.when_half_applied: Callable[[], None] = lambda: None
        self.groups = Groups(self.clients)
        self.pending_rows = PendingRows(self.groups, self.table)
        self.snapshots = OpenSnapshots()
        self._install_lock = threading.Lock()

    def check_whole(self) -> None:
        """Refuses to read or change what may hold a change in part.

        Raises:
            JournalFailed: it may.
        """
        if self.half_applied:
            raise JournalFailed(self.half_applied)

    # -- tables

    def install(self, tables: Iterable[Table]) -> None:
        """Adds tables. One that is there with the same id is left as it is.

        Raises:
            SchemaMismatch: the name is taken by another table; nothing is added.
        """
        with self._install_lock:
            new = []
            for table in tables:
                present = self.find_table(table.spec.name)
                if present is None:
                    new.append(table)
                elif present.table_id != table.table_id or present.spec != table.spec:
                    raise SchemaMismatch(
                        f"table {table.spec.name!r} is here as id {present.table_id} {present.spec}, "
                        f"not as id {table.table_id} {table.spec}",
                        metadata={"table": table.spec.name},
                    )
            if not new:
                return
            infos = [table.schema_info(with_step=True) for table in new]
            with self.journaled(change_records.install_record(self.change_number + 1, infos)):
                self.put_tables(new)

    def raise_steps(self, steps: Mapping[int, int]) -> None:
        """Raises tables' steps to those that another shard has; never lowers one."""
        raised = {}
        for table_id, step in steps.items():
            table = self.find_table_by_id(table_id)
            if table is not None and step > table.step:
                raised[table_id] = step
        if not raised:
            return
        tables = [self.table(table_id) for table_id in raised]
        with self.write_locks(tables), self.journaled(change_records.steps_record(self.change_number + 1, raised)):
            for table in tables:
                table.step = raised[table.table_id]

    # -- clients (sequencer's thread)

    def open_client(self, client_id: bytes, *, heartbeats: bool = False) -> ClientEntry:
        """Registers a client, or returns the entry of a known one.

        Raises:
            BadOption: no client id.
            ClientClosed: it has left.
            QueueFull: too many clients.
        """
        check_client_id(client_id)
        if self.clients.find(client_id) is not None:
            self.clients.touch(client_id)
            return self.clients.get(client_id)
        forgotten = self.clients.forgettable()
        record = change_records.open_record(self.change_number + 1, client_id, heartbeats=heartbeats, forgotten=forgotten)
        with self.journaled(record):
            self.clients.forget([forgotten] if forgotten is not None else [])
            return self.clients.add(client_id, heartbeats=heartbeats)

    def end_client(self, client_id: bytes, *, settled: bool = False, remember: bool = False) -> ClientEntry | None:
        """Ends a client: no more changes from it. Returns its entry, or None if it was not known (and still is not).

        Args:
            client_id: the client.
            settled: its numbers are equal on all shards.
            remember: keep an entry of a client that is not known, as closed.
        """
        entry = self.clients.find(client_id)
        changes = remember if entry is None else not entry.closed or (settled and not entry.settled)
        if changes:
            with self.journaled(change_records.end_record(self.change_number + 1, client_id, settled=settled)):
                self.clients.end(client_id, settled=settled)
                self.groups.drop_part(client_id)
        return self.clients.find(client_id)

    def forget_idle_clients(self, now: float | None = None) -> int:
        """Forgets clients without contact for a day; returns how many."""
        silent = self.clients.idle(time.monotonic() if now is None else now)
        idle = [client_id for client_id in silent if self.groups.part(client_id) is None]  # its step may count the part
        if idle:
            with self.journaled(change_records.forget_record(self.change_number + 1, idle)):
                self.clients.forget(idle)
        return len(idle)

    def run_number(self, origin: Origin, change: Callable[[], Outcome]) -> tuple[Outcome, bool]:
        """Runs a numbered change once.

        Args:
            origin: client, number and digest.
            change: applies it with this origin, or raises and leaves everything as it was; the number then stays open.

        Returns:
            The outcome, and whether it is the former outcome of a repeat.

        Raises:
            ShardamError: as Clients.former, or what the change raises; or the number is a staged part's (SEQUENCE_REUSED).
        """
        self.clients.touch(origin.client_id)
        former = self.clients.former(origin)
        if former is not None:
            return former, True
        self.groups.check_number(origin)
        return change(), False

    # -- changes (sequencer's thread)

    def push(self, sections: Sequence[GradientSection], origin: Origin | None = None) -> Outcome:
        """Applies one optimizer step to every table named, whole or not at all.

        Raises:
            ShardamError: a section is refused; no table has changed.
            JournalFailed: it could not be journaled; or it broke off while it was applied.
        """
        self.groups.check_push()
        updates = [(section.table, section.table.prepare(section)) for section in sections]
        self.laps.end("merge")
        outcome = Outcome()

        def record(steps: Sequence[StagedTableStep]) -> change_records.Change:
            return change_records.push_record(self.change_number + 1, origin, sections, steps)

        def close(steps: dict[int, int]) -> None:
            outcome.steps.update(steps)
            self.close_number(origin, outcome)

        self.step_tables(updates, record, close)
        return outcome

    def step_tables(
        self,
        updates: Sequence[tuple[Table, PreparedUpdate]],
        record: Callable[[Sequence[StagedTableStep]], change_records.Change],
        close: Callable[[dict[int, int]], None],
        *,
        limited: bool = True,
    ) -> None:
        """Applies one step to each of several tables, whole or not at all.

        Args:
            updates: the tables, each once, and their checked gradients.
            record: makes the change's record of the staged steps, in the order of updates.
            close: closes the numbers that the change was, given table id -> step after it; part of the change.
            limited: whether it may be refused because of its new rows.

        Raises:
            RowLimit, OutOfMemory: there is no room; no table has changed.
            JournalFailed: as push.
        """
        with self.write_locks([table for table, _ in updates]):
            self.laps.end("lock")
            new_rows = [(table, table.count_new(update)) for table, update in updates]
            if limited:
                check_room(new_rows, self.num_rows, self.max_rows)
            for table, num_new in new_rows:
                table.reserve(num_new)
            staged = stage_all(updates, self.change_number + 1)
            self.laps.end("index")
            try:
                keeps = self.journal.keeps_changes
                change = record([step for _, step in staged]) if keeps else change_records.bare_record(self.change_number + 1)
                with self.journaled(change):
                    self.laps.end("journal")
                    for table, step in staged:
                        table.apply(step)
                    self.device.finish()
                    self.laps.end("update")
                    close({table.table_id: step.step.table_step for table, step in staged})
            except BaseException:
                if not self.half_applied:
                    discard_all(staged)
                raise

    def void(self, table_ids: Sequence[int], origin: Origin) -> Outcome:
        """Uses a number up without its change: steps tables without a gradient, because it stepped them on other shards."""
        tables = [self.table(table_id) for table_id in dict.fromkeys(table_ids)]
        for table in tables:
            table.check_writable()
        with self.write_locks(tables):
            outcome = Outcome(steps={table.table_id: table.step + 1 for table in tables})
            with self.journaled(change_records.close_record(self.change_number + 1, origin, outcome.steps)):
                for table in tables:
                    table.step += 1
                self.close_number(origin, outcome)
        return outcome

    def assign(
        self, table: Table, write: RowWrite, condition: RowCondition = NO_CONDITION, origin: Origin | None = None
    ) -> Outcome:
        """Writes rows.

        Raises:
            ShardamError: a value or limit is refused, or the condition does not hold; nothing has changed.
        """
        self.groups.check_row_change(origin)
        table.check_write(write)
        with self.write_locks([table]):
            check_condition(table, write.row_ids, condition)
            new_rows = self.pending_rows.count(self.change_number, [(table, write.row_ids)])
            check_room(new_rows, self.num_rows, self.max_rows)
            table.reserve(dict(new_rows)[table])
            change_number = self.change_number + 1
            record = change_records.assign_record(change_number, origin, table, write)
            with self.journaled(record, undone_by=(OutOfMemory,)):
                num_rows = table.assign(write, change_number)
                self.device.finish()
                return self._close_rows(origin, num_rows, change_number)

    def delete(
        self, table: Table, row_ids: Int64s, condition: RowCondition = NO_CONDITION, origin: Origin | None = None
    ) -> Outcome:
        """Deletes rows; ids without a row are passed over.

        Raises:
            EtagMismatch: the condition does not hold; nothing has changed.
            ReadOnly: the table takes no changes.
            NotAMember: there is a sync group, and the change is not a member's.
            OutOfMemory: a snapshot has no room for the rows; nothing has changed.
        """
        self.groups.check_row_change(origin)
        table.check_writable()
        with self.write_locks([table]):
            check_condition(table, row_ids, condition)
            change_number = self.change_number + 1
            record = change_records.delete_record(change_number, origin, table, row_ids)
            with self.journaled(record, undone_by=(OutOfMemory,)):
                table.last_delete = change_number
                return self._close_rows(origin, table.delete(row_ids), change_number)

    def clear_moments(
        self, table: Table, row_ids: Int64s, condition: RowCondition = NO_CONDITION, origin: Origin | None = None
    ) -> Outcome:
        """Sets rows' moments to zero; ids without a row are passed over.

        Raises:
            EtagMismatch: the condition does not hold; nothing has changed.
            ReadOnly: the table takes no changes.
            NotAMember: there is a sync group, and the change is not a member's.
        """
        self.groups.check_row_change(origin)
        table.check_writable()
        with self.write_locks([table]):
            check_condition(table, row_ids, condition)
            change_number = self.change_number + 1
            record = change_records.clear_moments_record(change_number, origin, table, row_ids)
            with self.journaled(record, undone_by=(OutOfMemory,)):
                num_rows = table.clear_moments(row_ids, change_number)
                self.device.finish()
                return self._close_rows(origin, num_rows, change_number)

    def _close_rows(self, origin: Origin | None, num_rows: int, change_number: int) -> Outcome:
        outcome = Outcome(num_rows=num_rows, change_number=change_number)
        self.close_number(origin, outcome)
        return outcome

    def close_number(self, origin: Origin | None, outcome: Outcome) -> None:
        """Notes how a number ended; within journaled."""
        entry = None if origin is None else self.clients.find(origin.client_id)
        if origin is not None and entry is not None:
            entry.record(origin, outcome)

    @contextlib.contextmanager
    def journaled(self, change: change_records.Change, *, undone_by: tuple[type[ShardamError], ...] = ()) -> Iterator[None]:
        """Counts a change, and has it in the journal before the block applies it.

        Args:
            change: its record.
            undone_by: what the block raises where it has changed nothing; the change is taken back from the journal then.

        Raises:
            JournalFailed: the block failed otherwise; the change stays in the journal, since a part of it may be in memory.
        """
        self.check_whole()
        record, arrays = change
        self.journal.append(record, arrays)
        try:
            yield
        except undone_by:
            self.journal.retract()
            raise
        except BaseException as error:
            why = f"change {record.change_number} could not be applied in memory ({type(error).__name__}: {error})"
            logger.critical("%s", why, exc_info=True)
            self.half_applied = self.journal.fail(why)
            self.when_half_applied()
            raise JournalFailed(self.half_applied) from error
        self.change_number = record.change_number

    @contextlib.contextmanager
    def write_locks(self, tables: Sequence[Table]) -> Iterator[None]:
        """Holds tables for writing, once snapshots have room for what that may change."""
        self.snapshots.wait_for_room()
        held = []  # a push of many tables takes many locks: no context of its own for each
        try:
            for table in sorted(tables, key=lambda table: table.table_id):  # one order for all: no deadlock with reads
                table.lock.enter_alone()
                held.append(table.lock)
            yield
        finally:
            for lock in held:
                lock.leave_alone()
