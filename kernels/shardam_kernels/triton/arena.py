"""Records in device memory: blocks that never move, addressed from one base pointer in 16-byte units."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from shardam_kernels.layout import UNIT_BYTES, Layout
from shardam_kernels.triton.row_kernels import NO_RECORD

Int64s = npt.NDArray[np.int64]

_FIRST_BLOCK_BYTES = 1 << 13  # a table of ten rows costs 8 KiB, not megabytes
_FULL_BLOCK_BYTES = 1 << 26  # 64 MiB: growth never needs more than this in one piece


class Arena:
    """Records of one stride on one device; all bytes start as zero.

    Args:
        stride_bytes: distance from one record to the next, a multiple of 16.
        device: a CUDA device; the CPU only under Triton's interpreter.

    Raises:
        ValueError: the stride is no multiple of 16.
    """

    def __init__(self, stride_bytes: int, device: torch.device) -> None:
        if stride_bytes < UNIT_BYTES or stride_bytes % UNIT_BYTES:
            raise ValueError(f"stride_bytes must be a multiple of {UNIT_BYTES}, got {stride_bytes}")
        self.stride_bytes = stride_bytes
        self.device = device
        self._first_slots = max(1, _FIRST_BLOCK_BYTES // stride_bytes)
        self._full_slots = max(self._first_slots, _FULL_BLOCK_BYTES // stride_bytes)
        self._blocks: list[torch.Tensor] = []
        self._ends = np.zeros(0, np.int64)  # of each block, in slots
        self._origins = np.zeros(0, np.int64)  # distance of the slot 0 that a block would have, in units from the base

    @property
    def num_slots(self) -> int:
        """Number of records there is room for."""
        return int(self._ends[-1]) if self._blocks else 0

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes."""
        return self.num_slots * self.stride_bytes

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        sizes: list[int] = []
        total = self.num_slots
        while total < num_slots:  # each block as large as all before it, up to a full one
            sizes.append(min(max(total, self._first_slots), self._full_slots))
            total += sizes[-1]
        try:
            blocks = [torch.zeros(size * self.stride_bytes, dtype=torch.uint8, device=self.device) for size in sizes]
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{self.device} has no room for {total * self.stride_bytes:,} bytes of records, {self.memory_bytes:,} in use"
            ) from error
        self._blocks += blocks
        units = self.stride_bytes // UNIT_BYTES
        self._ends = np.cumsum([block.numel() // self.stride_bytes for block in self._blocks], dtype=np.int64)
        starts = np.concatenate([[0], self._ends[:-1]]).astype(np.int64)
        addresses = np.array([block.data_ptr() for block in self._blocks], np.int64)
        if blocks:
            self._origins = (addresses - addresses[0]) // UNIT_BYTES - starts * units

    def distances(self, slots: Int64s, *, allow_absent: bool = False) -> Int64s:
        """Returns each record's distance from the base in 16-byte units, int64 [N]; NO_RECORD where a slot is -1.

        Args:
            slots: int64 [N].
            allow_absent: -1 is legal.

        Raises:
            IndexError: a slot lies outside the arena.
        """
        lowest = -1 if allow_absent else 0
        bad = (slots < lowest) | (slots >= self.num_slots)
        if bad.any():
            raise IndexError(
                f"slot {slots[bad][0]} lies outside {lowest} to {self.num_slots - 1} of the arena; reserve more slots first"
            )
        if not self._blocks:
            return np.full(slots.shape, NO_RECORD.value, np.int64)
        block = np.searchsorted(self._ends, slots, side="right")
        distances = self._origins[block] + slots * (self.stride_bytes // UNIT_BYTES)
        return np.where(slots < 0, NO_RECORD.value, distances) if allow_absent else distances

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor whose start distances count from, as values of a dtype; there must be a record."""
        return self._blocks[0].view(dtype)

    def view_record(self, slot: int) -> torch.Tensor:
        """Returns the bytes of a record, uint8 [stride_bytes], a view."""
        block = int(np.searchsorted(self._ends, slot, side="right"))
        start = slot - (int(self._ends[block - 1]) if block else 0)
        return self._blocks[block][start * self.stride_bytes : (start + 1) * self.stride_bytes]


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a table: the arena and the layout by which it is read.

    Raises:
        ValueError: the arena has another stride.
    """

    arena: Arena
    layout: Layout

    def __post_init__(self) -> None:
        if self.layout.stride_bytes != self.arena.stride_bytes:
            raise ValueError(f"the arena's stride is {self.arena.stride_bytes} bytes, the layout's {self.layout.stride_bytes}")
