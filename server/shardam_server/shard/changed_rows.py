"""Which rows are no more as they were read: changed, created or deleted since."""

from __future__ import annotations

import numpy as np

from shardam_server.shard.records import Int64s
from shardam_server.shard.table import Table


def changed_positions(table: Table, row_ids: Int64s, change_number: int, *, known_from: int) -> Int64s:
    """Returns the positions of rows that a later change has touched, ascending; some more where that is not known.

    Used under the table's lock.

    Args:
        table: the table.
        row_ids: int64 [N].
        change_number: the last change before they were read.
        known_from: deletes up to this change may have been forgotten: the state came from a base or checkpoint, which has what
            exists alone.

    Raises:
        IdOutOfRange: as Table.check_ids.
    """
    table.check_ids(row_ids)
    slots = table.storage.lookup(row_ids)
    exists = slots >= 0
    changed = np.zeros(row_ids.size, np.bool_)
    changed[exists] = table.storage.change_numbers(slots[exists]) > np.uint64(change_number)
    if max(table.last_delete, known_from) > change_number:
        changed |= ~exists
    return np.flatnonzero(changed)
