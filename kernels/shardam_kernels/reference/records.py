"""Records in a NumPy array of bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels.layout import Layout


class Arena:
    """Records of one stride; all bytes start as zero.

    Attributes:
        records: uint8 [num_slots, stride_bytes].
    """

    def __init__(self, stride_bytes: int) -> None:
        self.records = np.zeros((0, stride_bytes), np.uint8)

    @property
    def stride_bytes(self) -> int:
        """Distance from one record to the next."""
        return self.records.shape[1]

    @property
    def num_slots(self) -> int:
        """Number of records there is room for."""
        return self.records.shape[0]

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1."""
        missing = max(num_slots - self.num_slots, 0)
        self.records = np.concatenate([self.records, np.zeros((missing, self.stride_bytes), np.uint8)])

    def view_record(self, slot: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a record, writable, uint8 [stride_bytes]."""
        record: npt.NDArray[np.uint8] = self.records[slot]
        return record


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a table: the arena and the layout by which it is read."""

    arena: Arena
    layout: Layout

    def component(self, name: str) -> npt.NDArray[np.float32]:
        """Returns one component of all records, a writable view, float32 [num_slots, dim]."""
        start = self.layout.component(name).offset_bytes
        return self.arena.records[:, start : start + 4 * self.layout.dim].view(np.float32)


def read_component(records: Records, name: str, slots: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
    """Writes one component of rows to out, float32 [N, dim]; zeros where a slot is -1."""
    exists = slots >= 0
    out[exists] = records.component(name)[slots[exists]]
    out[~exists] = 0


def write_component(records: Records, name: str, slots: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
    """Writes values, float32 [N, dim], to one component of rows, slots distinct."""
    records.component(name)[slots] = values
