"""A table in the NumPy reference: the same changes as a shard's table, on rows kept in a dict."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt

from shardam_kernels import reference
from shardam_kernels.factors import AdamOptions, factors, row_step_factors
from shardam_kernels.initializers import InitialRows, fold_normal
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_proto.schema import TableSpec

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

COMPONENTS = ("weight", "exp_avg", "exp_avg_sq")


class ReferenceTable:
    """Rows of one table with standard normal initial weights.

    Attributes:
        t: the table's step.
    """

    def __init__(self, spec: TableSpec, seed: int) -> None:
        self.spec = spec
        self.t = 0
        self._seed = seed
        self._layout = layout(spec.dim, spec.dtype)
        self._records = reference.Records(reference.Arena(self._layout.stride_bytes), self._layout)
        self._initial = InitialRows(fold_normal(0.0, 1.0), seed, spec.padding_idx)
        self._slots: dict[int, int] = {}
        self._row_steps: dict[int, int] = {}
        self._num_slots = 0

    def copy(self) -> ReferenceTable:
        """Returns a table that changes on its own from here on."""
        other = copy.copy(self)
        arena = reference.Arena(self._layout.stride_bytes)
        arena.records = self._records.arena.records.copy()
        other._records = reference.Records(arena, self._layout)
        other._slots, other._row_steps = dict(self._slots), dict(self._row_steps)
        return other

    def push(
        self, row_ids: Int64s, gradients: Float32s, options: AdamOptions, *, grad_scale: float = 1.0, contributions: int = 1
    ) -> None:
        self.t += 1
        step = factors(options, self.t, grad_scale=grad_scale, contributions=contributions)
        merged = reference.merge_gradients(row_ids, gradients, step)
        ids = merged.row_ids.tolist()
        slots = self._insert(ids)
        for row_id in ids:
            self._row_steps[row_id] += 1
        own = np.array([self._row_steps[row_id] for row_id in ids], np.int64)
        steps = own if self.spec.step == "row" else np.full(own.size, self.t, np.int64)
        rounding = None if self.spec.dtype == "float32" else Rounding(self._seed, merged.row_ids, steps)
        row_steps = RowSteps(row_step_factors(options, steps), rounding)
        reference.adam_update(self._records, slots, merged.gradients, step, row_steps)

    def assign(self, row_ids: list[int], weight: Float32s, moments: Float32s | None) -> None:
        slots = self._insert(row_ids)
        reference.write_component(self._records, "weight", slots, weight)
        if moments is not None:
            for name in ("exp_avg", "exp_avg_sq"):
                reference.write_component(self._records, name, slots, moments)

    def delete(self, row_ids: list[int]) -> int:
        return len([self._slots.pop(row_id) for row_id in row_ids if row_id in self._slots])

    def clear_moments(self, row_ids: list[int]) -> int:
        slots = np.array([self._slots[row_id] for row_id in row_ids if row_id in self._slots], np.int64)
        for name in ("exp_avg", "exp_avg_sq"):
            reference.write_component(self._records, name, slots, np.zeros((slots.size, self.spec.dim), np.float32))
        return slots.size

    def rows(self) -> dict[int, bytes]:
        """Returns existing rows' bits: weight, exp_avg, exp_avg_sq as float32."""
        rows = {}
        for row_id, slot in self._slots.items():
            parts = [np.empty((1, self.spec.dim), np.float32) for _ in COMPONENTS]
            for name, part in zip(COMPONENTS, parts, strict=True):
                reference.read_component(self._records, name, np.array([slot]), part)
            rows[row_id] = b"".join(part.tobytes() for part in parts)
        return rows

    def has(self, row_id: int) -> bool:
        return row_id in self._slots

    def bits(self, row_ids: list[int]) -> bytes:
        """Returns the bits of rows that exist: all of weight, of exp_avg, of exp_avg_sq, then steps in bias correction."""
        slots = np.array([self._slots[row_id] for row_id in row_ids], np.int64)
        steps = [self._row_steps[row_id] if self.spec.step == "row" else self.t for row_id in row_ids]
        columns = [self._records.read(name, slots).tobytes() for name in COMPONENTS]
        return b"".join([*columns, np.array(steps, np.int64).tobytes()])

    def _insert(self, row_ids: list[int]) -> Int64s:
        for row_id in row_ids:
            if row_id not in self._slots:
                slot = self._slots[row_id] = self._num_slots
                self._num_slots += 1
                self._row_steps[row_id] = 0
                self._records.arena.reserve(self._num_slots)
                reference.initialize(self._records, np.array([slot]), np.array([row_id]), self._initial)
        return np.array([self._slots[row_id] for row_id in row_ids], np.int64)
