"""The operations on records of a GPU: the same names and bits as shardam_kernels.native, over tensors on the device.

Launches go to the current stream and do not wait for it. Sizes are checked on the host before anything is launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from shardam_kernels.factors import Factors
from shardam_kernels.gradients import Runs
from shardam_kernels.layout import ITEM_BYTES, WEIGHT, Component
from shardam_kernels.row_steps import RowSteps
from shardam_kernels.triton.adam_kernel import COUPLED, DECOUPLED, NO_DECAY, adam_update_kernel
from shardam_kernels.triton.arena import Records
from shardam_kernels.triton.row_kernels import clear_rows_kernel, read_rows_kernel, write_rows_kernel
from shardam_kernels.triton.staging import Taken, to_device
from shardam_kernels.triton.tiles import LONG_RUN, Tile, long_run_tile, row_tile
from shardam_kernels.triton.weights import DTYPE_CODES

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

_SIGN_BIT = -(2**31)


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """The rows of one optimizer step on the device.

    Attributes:
        distances: int64 [U], of the records.
        step_factors: float32 [U].
        streams: int64 [U], what each row's rounding is drawn from; None for float32 weights.
        starts: int32 [U + 1], as in Runs.
        gradients: float32 [N, dim], run after run.
        num_short: the first so many rows have runs of at most LONG_RUN gradients.
    """

    distances: torch.Tensor
    step_factors: torch.Tensor
    streams: torch.Tensor | None
    starts: torch.Tensor
    gradients: torch.Tensor
    num_short: int


def stage_step(records: Records, slots: Int64s, gradients: Float32s, runs: Runs, steps: RowSteps) -> DeviceStep:
    """Brings a step to the device in one transfer; gradients are put in the order of their runs on the way.

    Args:
        records: the table's records.
        slots: int64 [U], of runs.row_ids: distinct.
        gradients: float32 [N, dim], as pushed: neither summed nor unscaled.
        runs: of native.group_gradients; bad_rows must be empty.
        steps: the step of each of the U rows, in the order of runs.row_ids.

    Raises:
        ValueError: lengths do not fit, a rounding is missing or superfluous.
        IndexError: a slot lies outside the arena.
        MemoryError: the device has no room; nothing has changed.
    """
    dim, num_rows = records.layout.dim, runs.row_ids.size
    steps.check(records.layout.dtype)
    _require_shape("slots", slots, (num_rows,))
    _require_shape("steps.factors", steps.factors, (num_rows,))
    _require_shape("gradients", gradients, (runs.order.size, dim))
    arrays: dict[str, npt.NDArray[np.generic] | Taken] = {
        "gradients": Taken(gradients, runs.order),
        "distances": records.arena.distances(slots),
        "starts": runs.starts,
        "step_factors": steps.factors,
    }
    if steps.rounding is not None:
        _require_shape("steps.rounding.row_ids", steps.rounding.row_ids, (num_rows,))
        _require_shape("steps.rounding.steps", steps.rounding.steps, (num_rows,))
        arrays["streams"] = steps.rounding.streams().view(np.int64)
    tensors = to_device(arrays, records.arena.device)
    num_short = int(np.searchsorted(np.diff(runs.starts), LONG_RUN, side="right"))
    return DeviceStep(
        distances=tensors["distances"],
        step_factors=tensors["step_factors"],
        streams=tensors.get("streams"),
        starts=tensors["starts"],
        gradients=tensors["gradients"],
        num_short=num_short,
    )


def adam_update(records: Records, step: DeviceStep, factors: Factors) -> torch.Tensor:
    """Sums each run, unscales, divides and applies one step to its row, in place (CONTRACT.md, Arithmetic).

    Args:
        records: the table's records.
        step: of stage_step.
        factors: of the step; its s is not used.

    Returns:
        How many weights left their dtype's finite range and were saturated: int64 [1] on the device.
    """
    saturated = torch.zeros(1, dtype=torch.int64, device=records.arena.device)
    dim, num_rows = records.layout.dim, step.distances.numel()
    _update_rows(records, step, factors, saturated, range(step.num_short), row_tile(dim))
    _update_rows(records, step, factors, saturated, range(step.num_short, num_rows), long_run_tile(dim))
    return saturated


def _update_rows(
    records: Records, step: DeviceStep, factors: Factors, saturated: torch.Tensor, rows: range, tile: Tile
) -> None:
    """Updates some of the step's rows."""
    if not rows:
        return
    layout, arena = records.layout, records.arena
    decay = DECOUPLED if factors.decoupled else COUPLED if factors.weight_decay != 0 else NO_DECAY
    if factors.decoupled and factors.d == 1:
        decay = NO_DECAY  # one variant fewer; a product with 1 changes no bit
    adam_update_kernel[tile.grid(len(rows), layout.dim)](
        step.gradients,
        step.starts,
        step.distances,
        step.step_factors,
        step.distances if step.streams is None else step.streams,
        arena.base(torch.int16),
        arena.base(torch.float32),
        saturated,
        factors.c1,
        factors.c2,
        factors.d,
        factors.eps,
        factors.weight_decay,
        factors.unscale,
        factors.divisor,
        _SIGN_BIT if factors.maximize else 0,
        rows.start,
        rows.stop,
        DIM=layout.dim,
        BLOCK=tile.block,
        ROWS=tile.rows,
        UNROLL=tile.unroll,
        EXP_AVG=layout.component("exp_avg").offset_bytes // 4,
        EXP_AVG_SQ=layout.component("exp_avg_sq").offset_bytes // 4,
        DTYPE=DTYPE_CODES[layout.dtype],
        DECAY=decay.value,
        MEAN=factors.divisor != 1,
        **tile.options(),
    )


def gather_weights(records: Records, slots: Int64s) -> torch.Tensor:
    """Returns the weights of rows, float32 [N, dim] on the device; zeros where a slot is -1.

    What such a row would start with the host writes into the reply (native.gather_weights).

    Args:
        records: the table's records.
        slots: int64 [N], -1 for a row that does not exist; duplicates allowed.

    Raises:
        IndexError: a slot lies outside the arena.
        MemoryError: the device has no room.
    """
    return read_component(records, WEIGHT, slots)


def read_component(records: Records, name: str, slots: Int64s) -> torch.Tensor:
    """Returns one component ("weight", "exp_avg", "exp_avg_sq") of rows: as gather_weights."""
    layout, arena = records.layout, records.arena
    distances = to_device({"distances": arena.distances(slots, allow_absent=True)}, arena.device)["distances"]
    out = torch.empty((slots.size, layout.dim), dtype=torch.float32, device=arena.device)
    read_rows(records, layout.component(name), distances, out)
    return out


def read_rows(records: Records, component: Component, distances: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a component of rows to out, both on the device.

    Args:
        records: the table's records.
        component: of its layout.
        distances: int64 [N], of the records; NO_RECORD for a row that does not exist.
        out: float32 [N, dim], written; zeros for rows that do not exist.
    """
    if records.arena.num_slots == 0:
        out.zero_()
        return
    if out.shape[0] == 0:
        return
    dim, tile = records.layout.dim, row_tile(records.layout.dim)
    read_rows_kernel[tile.grid(out.shape[0], dim)](
        distances,
        records.arena.base(torch.int16),
        records.arena.base(torch.float32),
        out,
        out.shape[0],
        DIM=dim,
        BLOCK=tile.block,
        ROWS=tile.rows,
        OFFSET=component.offset_bytes // ITEM_BYTES[component.dtype],
        DTYPE=DTYPE_CODES[component.dtype],
        **tile.options(),
    )


def write_component(records: Records, name: str, slots: Int64s, values: Float32s) -> torch.Tensor:
    """Writes values to one component of rows: as write_components."""
    return write_components(records, slots, {name: values})


def write_components(records: Records, slots: Int64s, components: Mapping[str, Float32s]) -> torch.Tensor:
    """Writes components of rows; weights are rounded to nearest even in their dtype.

    Args:
        records: the table's records.
        slots: int64 [N], distinct.
        components: float32 [N, dim] by name.

    Returns:
        How many values were saturated, int64 [1] on the device.

    Raises:
        ValueError: a shape does not fit.
        IndexError: a slot lies outside the arena.
        MemoryError: the device has no room; nothing has changed.
    """
    return _write_rows(records, slots, components, clear=False)


def initialize(records: Records, slots: Int64s, weights: Float32s) -> torch.Tensor:
    """Writes new rows: the weight to nearest even, zero moments, zero padding bytes. What the slots held is gone.

    Args:
        records: the table's records.
        slots: int64 [N], distinct.
        weights: float32 [N, dim], what the rows start with (native.gather_weights of rows that do not exist).

    Returns, Raises:
        As write_components.
    """
    return _write_rows(records, slots, {WEIGHT: weights}, clear=True)


def _write_rows(records: Records, slots: Int64s, components: Mapping[str, Float32s], *, clear: bool) -> torch.Tensor:
    layout, arena = records.layout, records.arena
    for name, values in components.items():
        _require_shape(name, values, (slots.size, layout.dim))
    saturated = torch.zeros(1, dtype=torch.int64, device=arena.device)
    if slots.size == 0:
        return saturated
    arrays: dict[str, npt.NDArray[np.generic]] = {f"values of {name}": values for name, values in components.items()}
    staged = to_device({**arrays, "distances": arena.distances(slots)}, arena.device)
    base = arena.base(torch.float32)
    if clear:
        tile = row_tile(layout.stride_bytes // 4)
        clear_rows_kernel[tile.grid(slots.size, layout.stride_bytes // 4)](
            staged["distances"],
            base,
            slots.size,
            STRIDE=layout.stride_bytes // 4,
            BLOCK=tile.block,
            ROWS=tile.rows,
            **tile.options(),
        )
    tile = row_tile(layout.dim)
    for name in components:
        component = layout.component(name)
        write_rows_kernel[tile.grid(slots.size, layout.dim)](
            staged["distances"],
            staged[f"values of {name}"],
            arena.base(torch.int16),
            base,
            saturated,
            slots.size,
            DIM=layout.dim,
            BLOCK=tile.block,
            ROWS=tile.rows,
            OFFSET=component.offset_bytes // ITEM_BYTES[component.dtype],
            DTYPE=DTYPE_CODES[component.dtype],
            **tile.options(),
        )
    return saturated


def _require_shape(what: str, array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{what} has shape {list(array.shape)}, needed is {list(shape)}")
