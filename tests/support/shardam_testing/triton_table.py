"""The Triton kernels behind the face of the other implementations; imports torch and triton."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shardam_kernels import native, triton
from shardam_kernels.factors import Factors
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import layout
from shardam_testing.kernel_cover import Float32s, Int64s, RowsOf


class TritonTable:
    """Rows in device memory; the host does what a shard's host does: it groups, and makes rows that do not exist."""

    def __init__(self, dim: int, num_slots: int, dtype: str, device: str = "cpu") -> None:
        self.layout = layout(dim, dtype)
        self.num_slots = num_slots
        self.records = triton.Records(triton.Arena(self.layout.stride_bytes, torch.device(device)), self.layout)
        for slots in range(1, num_slots + 1):
            self.records.arena.reserve(slots)  # in many blocks
        self._absent = native.Records(native.Arena(self.layout.stride_bytes), self.layout)
        wide = layout(dim)
        self._absent_float32 = native.Records(native.Arena(wide.stride_bytes), wide)

    def _starting_weights(self, records: native.Records, row_ids: Int64s, initial: InitialRows) -> Float32s:
        weights = np.empty((len(row_ids), self.layout.dim), np.float32)
        native.gather_weights(records, np.full(len(row_ids), -1), row_ids, initial, weights)
        return weights

    def initialize(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> int:
        weights = self._starting_weights(self._absent_float32, row_ids, initial)
        return int(triton.initialize(self.records, slots, weights))

    def push(self, row_ids: Int64s, gradients: Float32s, factors: Factors, rows_of: RowsOf) -> int:
        runs = native.group_gradients(row_ids, gradients, factors)
        assert runs.bad_rows.size == 0
        slots, steps = rows_of(runs.row_ids)
        staged = triton.stage_step(self.records, slots, gradients, runs, steps)
        return int(triton.adam_update(self.records, staged, factors))

    def gather(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> Float32s:
        out = triton.gather_weights(self.records, slots).cpu().numpy().copy()
        absent = slots < 0
        out[absent] = self._starting_weights(self._absent, row_ids[absent], initial)
        return out

    def read(self, name: str, slots: Int64s) -> Float32s:
        values: Float32s = triton.read_component(self.records, name, slots).cpu().numpy().copy()
        return values

    def write(self, name: str, slots: Int64s, values: Float32s) -> int:
        return int(triton.write_component(self.records, name, slots, values))

    def all_bytes(self) -> npt.NDArray[np.uint8]:
        return np.stack([self.records.arena.view_record(slot).cpu().numpy() for slot in range(self.num_slots)])
