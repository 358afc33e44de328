"""What must hold of rows for a change of them to be applied; asked within the change, so that nothing comes between."""

from __future__ import annotations

import dataclasses

import numpy as np

from shardam_proto.errors import EtagMismatch
from shardam_server.shard.table import Int64s, Table


@dataclasses.dataclass(frozen=True)
class RowCondition:
    """What must hold of every row that a change names. All None: nothing is asked.

    Attributes:
        exists: whether the row must exist or must not.
        change_number: the change number that the row must have; implies that it exists.
    """

    exists: bool | None = None
    change_number: int | None = None


def check_condition(table: Table, row_ids: Int64s, condition: RowCondition) -> None:
    """Refuses a change whose condition does not hold; the caller holds the table's lock.

    Args:
        table: the table.
        row_ids: int64 [N], the rows named.
        condition: what must hold of each.

    Raises:
        EtagMismatch: it does not hold of a row; the message names the first.
    """
    if condition == RowCondition() or not row_ids.size:
        return
    slots = table.storage.lookup(row_ids)
    exists = slots >= 0
    _, change_numbers = table.storage.marks(slots)
    if condition.change_number is not None:
        wrong = ~exists | (change_numbers != np.uint64(condition.change_number))
        rule = f"change number {condition.change_number}"
    else:
        wrong = exists != condition.exists
        rule = "a row" if condition.exists else "no row"
    if not wrong.any():
        return
    first = int(np.flatnonzero(wrong)[0])
    state = f"has change number {change_numbers[first]}" if exists[first] else "does not exist"
    more = f" ({np.count_nonzero(wrong) - 1} more rows likewise)" if np.count_nonzero(wrong) > 1 else ""
    raise EtagMismatch(
        f"row {row_ids[first]} of table {table.spec.name!r} {state}, the change asks for {rule}{more}; read it "
        "and decide again",
        metadata={"table": table.spec.name, "row_id": str(row_ids[first])},
    )
