"""Records in a NumPy array of bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels.layout import WEIGHT, Layout
from shardam_kernels.reference.weights import round_to_nearest_even, widen


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
        """Returns a float32 component of all records, a writable view, float32 [num_slots, dim]."""
        start = self.layout.component(name).offset_bytes
        return self.arena.records[:, start : start + 4 * self.layout.dim].view(np.float32)

    def narrow_weights(self) -> npt.NDArray[np.uint16]:
        """Returns the bits of all records' weights below float32, a writable view, uint16 [num_slots, dim]."""
        start = self.layout.component(WEIGHT).offset_bytes
        return self.arena.records[:, start : start + 2 * self.layout.dim].view(np.uint16)

    def is_narrow(self, name: str) -> bool:
        """Whether a component is stored below float32."""
        return self.layout.component(name).dtype != "float32"

    def read(self, name: str, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns one component of rows as float32 [N, dim]."""
        if self.is_narrow(name):
            return widen(self.narrow_weights()[slots], self.layout.dtype)
        return self.component(name)[slots]


def read_component(records: Records, name: str, slots: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
    """Writes one component of rows to out, float32 [N, dim]; zeros where a slot is -1."""
    exists = slots >= 0
    out[exists] = records.read(name, slots[exists])
    out[~exists] = 0


def write_component(records: Records, name: str, slots: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> int:
    """Writes values, float32 [N, dim], to one component of rows, slots distinct; weights are rounded to nearest even.

    Returns:
        How many values were saturated.
    """
    if not records.is_narrow(name):
        records.component(name)[slots] = values
        return 0
    records.narrow_weights()[slots], saturated = round_to_nearest_even(values, records.layout.dtype)
    return saturated
