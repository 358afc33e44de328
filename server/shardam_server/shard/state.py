"""The state of one shard: its tables and clients, and the numbered changes over them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardam_proto.errors import RowLimit, SchemaMismatch, UnknownTable
from shardam_server.shard.clients import Clients, Outcome
from shardam_server.shard.conditions import RowCondition, check_condition
from shardam_server.shard.table import GradientSection, Int64s, RowWrite, Table

NO_CONDITION = RowCondition()
"""Nothing is asked of the rows that a change names."""


class ShardState:
    """Tables, clients and the count of changes. Changes come from the sequencer's thread alone; reads from any thread.

    Args:
        max_rows: rows over all tables; 0: no limit.
    """

    def __init__(self, max_rows: int = 0) -> None:
        self.max_rows = max_rows
        self.clients = Clients()
        self.change_number = 0
        self._tables_by_id: dict[int, Table] = {}
        self._tables_by_name: dict[str, Table] = {}
        self._install_lock = threading.Lock()

    # -- tables

    def tables(self) -> list[Table]:
        """Returns the tables by name."""
        return [self._tables_by_name[name] for name in sorted(self._tables_by_name)]

    def table(self, table_id: int) -> Table:
        """Returns a table.

        Raises:
            UnknownTable: no table has this id.
        """
        table = self._tables_by_id.get(table_id)
        if table is None:
            raise UnknownTable(
                f"no table has the id {table_id}; it may have been made in another cluster",
                metadata={"table_id": str(table_id)},
            )
        return table

    def find_table(self, name: str) -> Table | None:
        """Returns a table by name, or None."""
        return self._tables_by_name.get(name)

    def install(self, tables: Iterable[Table]) -> None:
        """Adds tables. One that is there with the same id is left as it is.

        Raises:
            SchemaMismatch: the name is taken by another table; nothing is added.
        """
        with self._install_lock:
            new = []
            for table in tables:
                present = self._tables_by_name.get(table.spec.name)
                if present is None:
                    new.append(table)
                elif present.table_id != table.table_id or present.spec != table.spec:
                    raise SchemaMismatch(
                        f"table {table.spec.name!r} is here as id {present.table_id} {present.spec}, "
                        f"not as id {table.table_id} {table.spec}",
                        metadata={"table": table.spec.name},
                    )
            for table in new:
                self._tables_by_id[table.table_id] = table
                self._tables_by_name[table.spec.name] = table
            self.change_number += len(new)

    def raise_steps(self, steps: Mapping[int, int]) -> None:
        """Raises tables' steps to those that another shard has; never lowers one."""
        for table_id, step in steps.items():
            table = self._tables_by_id.get(table_id)
            if table is not None and step > table.step:
                with self._write_locks([table]):
                    table.step = step

    @property
    def num_rows(self) -> int:
        """Rows over all tables."""
        return sum(table.num_rows for table in self._tables_by_id.values())

    # -- changes (sequencer's thread)

    def push(self, sections: Sequence[GradientSection]) -> Outcome:
        """Applies one optimizer step to every table named, whole or not at all.

        Raises:
            ShardamError: a section is refused; no table has changed.
        """
        updates = [section.table.merge(section) for section in sections]
        tables = [section.table for section in sections]
        with self._write_locks(tables):
            new_rows = [(table, table.count_new(update.row_ids)) for table, update in zip(tables, updates, strict=True)]
            self._check_room(new_rows)
            for table, num_new in new_rows:
                table.reserve(num_new)
            self.change_number += 1
            for table, update in zip(tables, updates, strict=True):
                table.apply(update, self.change_number)
        return Outcome(steps={table.table_id: table.step for table in tables})

    def void(self, table_ids: Sequence[int]) -> Outcome:
        """Steps tables without a gradient, because the same number stepped them on other shards."""
        tables = [self.table(table_id) for table_id in dict.fromkeys(table_ids)]
        with self._write_locks(tables):
            self.change_number += 1
            for table in tables:
                table.step += 1
        return Outcome(steps={table.table_id: table.step for table in tables})

    def assign(self, table: Table, write: RowWrite, condition: RowCondition = NO_CONDITION) -> Outcome:
        """Writes rows.

        Raises:
            ShardamError: a value or limit is refused, or the condition does not hold; nothing has changed.
        """
        table.check_write(write)
        with self._write_locks([table]):
            check_condition(table, write.row_ids, condition)
            num_new = table.count_new(write.row_ids)
            self._check_room([(table, num_new)])
            table.reserve(num_new)
            self.change_number += 1
            return Outcome(num_rows=table.assign(write, self.change_number), change_number=self.change_number)

    def delete(self, table: Table, row_ids: Int64s, condition: RowCondition = NO_CONDITION) -> Outcome:
        """Deletes rows; ids without a row are passed over.

        Raises:
            EtagMismatch: the condition does not hold; nothing has changed.
        """
        with self._write_locks([table]):
            check_condition(table, row_ids, condition)
            self.change_number += 1
            return Outcome(num_rows=table.delete(row_ids), change_number=self.change_number)

    def clear_moments(self, table: Table, row_ids: Int64s, condition: RowCondition = NO_CONDITION) -> Outcome:
        """Sets rows' moments to zero; ids without a row are passed over.

        Raises:
            EtagMismatch: the condition does not hold; nothing has changed.
        """
        with self._write_locks([table]):
            check_condition(table, row_ids, condition)
            self.change_number += 1
            return Outcome(num_rows=table.clear_moments(row_ids, self.change_number), change_number=self.change_number)

    def _check_room(self, new_rows: Sequence[tuple[Table, int]]) -> None:
        for table, num_new in new_rows:
            limit = table.spec.max_rows_per_shard
            if limit and num_new and table.num_rows + num_new > limit:
                raise RowLimit(
                    f"table {table.spec.name!r} holds {table.num_rows} rows here and may hold {limit}; the change would add "
                    f"{num_new}. Delete rows, or create the table with a larger max_rows_per_shard",
                    metadata={
                        "table": table.spec.name,
                        "limit": str(limit),
                        "rows": str(table.num_rows),
                        "new_rows": str(num_new),
                    },
                )
        total_new = sum(num_new for _, num_new in new_rows)
        if self.max_rows and total_new and self.num_rows + total_new > self.max_rows:
            raise RowLimit(
                f"this shard holds {self.num_rows} rows and may hold {self.max_rows}; the change would add {total_new}. "
                "Delete rows, add shards, or start shards with a larger --max-rows",
                metadata={"limit": str(self.max_rows), "rows": str(self.num_rows), "new_rows": str(total_new)},
            )

    @contextlib.contextmanager
    def _write_locks(self, tables: Sequence[Table]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for table in sorted(tables, key=lambda table: table.table_id):  # one order for all: no deadlock with reads
                stack.enter_context(table.lock.write())
            yield


@contextlib.contextmanager
def read_locks(tables: Iterable[Table]) -> Iterator[None]:
    """Holds tables for reading, so that a read sees each between whole changes."""
    unique = {table.table_id: table for table in tables}
    with contextlib.ExitStack() as stack:
        for table_id in sorted(unique):
            stack.enter_context(unique[table_id].lock.read())
        yield
