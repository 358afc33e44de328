"""The tables of one shard, by id and by name."""

from __future__ import annotations

from collections.abc import Iterable

from shardam_proto.errors import UnknownTable
from shardam_server.shard.table import Table


class InstalledTables:
    """Tables that a shard has. Changed by the sequencer's thread alone, read by any."""

    def __init__(self) -> None:
        self._tables_by_id: dict[int, Table] = {}
        self._tables_by_name: dict[str, Table] = {}

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

    def find_table_by_id(self, table_id: int) -> Table | None:
        """Returns a table by its id, or None."""
        return self._tables_by_id.get(table_id)

    def find_table(self, name: str) -> Table | None:
        """Returns a table by name, or None."""
        return self._tables_by_name.get(name)

    def put_tables(self, tables: Iterable[Table]) -> None:
        """Adds tables as they were stored, without counting a change."""
        for table in tables:
            self._tables_by_id[table.table_id] = table
            self._tables_by_name[table.spec.name] = table

    @property
    def num_rows(self) -> int:
        """Rows over all tables."""
        return sum(table.num_rows for table in self._tables_by_id.values())
