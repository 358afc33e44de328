"""Counters of a table's rows by slot, on the host whatever device has the records."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_server.shard.records import Int64s, Touches

Uint32s = npt.NDArray[np.uint32]
Counter = TypeVar("Counter", np.int64, np.uint64, np.uint32)

_FIRST_SLOTS = 64
"""Slots that there is room for at first; thousands of small tables must stay small."""

_CHANGE_NUMBER, _TABLE_STEP = 0, 1
"""Columns of touches."""


@dataclasses.dataclass(frozen=True)
class RowCounters:
    """Counters of rows; zeros where a row does not exist.

    Attributes:
        row_step: int64 [N], steps of the row itself; zeros in table step mode.
        touched_step: int64 [N], the table's step when a push last touched the row.
        change_number: uint64 [N], the shard's change that last touched it.
    """

    row_step: Int64s
    touched_step: Int64s
    change_number: npt.NDArray[np.uint64]


class SlotCounters:
    """The counters of one table's rows.

    Args:
        counts_row_steps: each row counts its own steps.

    Attributes:
        touches: uint64 [room, 2], change number and the table's step of each row's last touch: one line of the cache.
    """

    def __init__(self, *, counts_row_steps: bool) -> None:
        self.touches: Touches = np.zeros((0, 2), np.uint64)
        self._row_steps = np.zeros(0, np.uint32) if counts_row_steps else None

    @property
    def memory_bytes(self) -> int:
        """Bytes that there is room for; those never written are not resident."""
        return self.touches.nbytes + (0 if self._row_steps is None else self._row_steps.nbytes)

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1.

        Raises:
            MemoryError: there is none; nothing has changed.
        """
        if len(self.touches) >= num_slots:
            return
        size = max(num_slots, 2 * len(self.touches), _FIRST_SLOTS)
        touches = _grown(self.touches.reshape(-1), 2 * size).reshape(size, 2)
        if self._row_steps is not None:
            self._row_steps = _grown(self._row_steps, size)
        self.touches = touches

    def clear(self, slots: Int64s) -> None:
        """Sets the counters of new rows to zero."""
        self.touches[slots] = 0
        if self._row_steps is not None:
            self._row_steps[slots] = 0

    def next_row_steps(self, slots: Int64s) -> Uint32s | None:
        """Returns the step that each row takes next; None if they do not count their own."""
        return None if self._row_steps is None else self._row_steps[slots] + np.uint32(1)

    def set_row_steps(self, slots: Int64s, row_steps: Uint32s) -> None:
        """Sets rows' own steps."""
        if self._row_steps is None:
            raise TypeError("rows of this table have no steps of their own")
        self._row_steps[slots] = row_steps

    def change_numbers(self, slots: Int64s) -> npt.NDArray[np.uint64]:
        """Returns the change that last touched each row."""
        changes: npt.NDArray[np.uint64] = self.touches[slots, _CHANGE_NUMBER]
        return changes

    def set_change_numbers(self, slots: Int64s, change_number: int) -> None:
        """Notes a change that is no step."""
        self.touches[slots, _CHANGE_NUMBER] = change_number

    def read(self, slots: Int64s) -> RowCounters:
        """Returns counters by slot; zeros where a slot is -1."""
        row_steps = np.zeros(slots.size, np.uint32) if self._row_steps is None else _picked(self._row_steps, slots)
        touches = self.touches.T
        return RowCounters(
            row_steps.astype(np.int64),
            _picked(touches[_TABLE_STEP], slots).view(np.int64),
            _picked(touches[_CHANGE_NUMBER], slots),
        )

    def restore(self, slots: Int64s, counters: RowCounters) -> None:
        """Puts counters back as they were read."""
        self.touches[slots, _CHANGE_NUMBER] = counters.change_number
        self.touches[slots, _TABLE_STEP] = counters.touched_step
        if self._row_steps is not None:
            self._row_steps[slots] = counters.row_step


def _grown(array: npt.NDArray[Counter], size: int) -> npt.NDArray[Counter]:
    grown = native.zeroed_memory(size * array.itemsize).view(array.dtype)
    grown[: array.size] = array
    return grown


def _picked(array: npt.NDArray[Counter], slots: Int64s) -> npt.NDArray[Counter]:
    """Returns array[slot] per slot, zero where it is -1."""
    picked = np.zeros(slots.size, array.dtype)
    found = slots >= 0
    picked[found] = array[slots[found]]
    return picked
