"""How many rows a shard and a table may hold."""

from __future__ import annotations

from collections.abc import Sequence

from shardam_proto.errors import RowLimit
from shardam_server.shard.table import Table


def check_room(new_rows: Sequence[tuple[Table, int]], num_rows: int, max_rows: int) -> None:
    """Refuses a change that would create too many rows.

    Args:
        new_rows: tables, and how many rows the change would add to each.
        num_rows: rows of the shard, over all tables.
        max_rows: rows that it may hold; 0: no limit.

    Raises:
        RowLimit: the limit of a table, or of the shard.
    """
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
    if max_rows and total_new and num_rows + total_new > max_rows:
        raise RowLimit(
            f"this shard holds {num_rows} rows and may hold {max_rows}; the change would add {total_new}. "
            "Delete rows, add shards, or start shards with a larger --max-rows",
            metadata={"limit": str(max_rows), "rows": str(num_rows), "new_rows": str(total_new)},
        )
