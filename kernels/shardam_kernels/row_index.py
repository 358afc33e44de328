"""What an index of rows is, whichever way it finds them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]


class RowIndex(Protocol):
    """What HashIndex() (any int64 id) and ArrayIndex(num_embeddings) (ids 0 to num_embeddings - 1) both are: id -> slot.

    Slots are 0 to num_slots - 1; a freed slot is given again before a new one. ArrayIndex raises IndexError for an id out of
    its bounds, before it changes anything.
    """

    def __len__(self) -> int:
        """Number of rows."""
        ...

    @property
    def num_slots(self) -> int:
        """One more than the largest slot ever given: what the arena must hold."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory of the index; of an ArrayIndex, pages never written are not resident."""
        ...

    def lookup(self, row_ids: Int64s, out_slots: Int64s) -> int:
        """Writes each id's slot, -1 if absent; returns how many are not -1."""
        ...

    def reserve(self, num_new: int) -> None:
        """Makes room so that inserting num_new new ids cannot fail.

        Raises:
            MemoryError: there is no such room; nothing has changed.
        """
        ...

    def insert(self, row_ids: Int64s, out_slots: Int64s, out_is_new: Uint8s) -> int:
        """Writes each id's slot, given now if the id is new; returns the number of new rows.

        out_is_new is 1 at the first place of each new id, else 0. Duplicates are allowed.

        Raises:
            MemoryError: there is no room and none was reserved; nothing has changed.
        """
        ...

    def remove(self, row_ids: Int64s, out_slots: Int64s) -> int:
        """Removes rows and writes the slot each had, -1 if it was absent; returns how many were removed."""
        ...

    def scan(self, from_key: int, max_rows: int) -> tuple[Int64s, Int64s, int | None]:
        """Returns (row_ids, slots, next_key): up to max_rows rows from from_key on, in the index's order.

        The order is that of mix64(id) as an unsigned number for HashIndex, of the id for ArrayIndex, and keys are these
        numbers: start at 0, go on at next_key, stop at None. A row that exists throughout is met exactly once.
        """
        ...
