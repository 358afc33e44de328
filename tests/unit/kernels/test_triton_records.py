"""The device arena and what the GPU kernels' front refuses before anything is launched; nothing is launched here."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from shardam_kernels import native, triton
from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.gradients import Runs
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_kernels.triton.row_kernels import NO_RECORD
from shardam_kernels.triton.staging import Taken, to_device
from shardam_kernels.triton.tiles import LONG_RUN, long_run_tile, row_tile

CPU = torch.device("cpu")
STEP = factors(AdamOptions(), 1)


def _records(dim: int, num_slots: int, dtype: str = "float32") -> triton.Records:
    record_layout = layout(dim, dtype)
    arena = triton.Arena(record_layout.stride_bytes, CPU)
    arena.reserve(num_slots)
    return triton.Records(arena, record_layout)


@pytest.mark.parametrize("stride_bytes", [16, 768, 9_008, 131_072])
def test_records_never_move_while_the_arena_grows_and_every_slot_has_its_own(stride_bytes: int) -> None:
    arena = triton.Arena(stride_bytes, CPU)
    addresses: dict[int, int] = {}
    for num_slots in (1, 2, 30, 700, 1200):
        arena.reserve(num_slots)
        assert arena.num_slots >= num_slots
        assert arena.memory_bytes == arena.num_slots * stride_bytes
        for slot in range(num_slots):
            record = arena.view_record(slot)
            address = record.data_ptr()
            assert addresses.setdefault(slot, address) == address
            assert record.numel() == stride_bytes
    assert len(set(addresses.values())) == len(addresses)
    slots = np.array(list(addresses))
    base = arena.base(torch.uint8).data_ptr()
    assert (base + arena.distances(slots) * 16).tolist() == list(addresses.values())
    assert not arena.view_record(1199).any()


def test_an_absent_slot_has_no_record_and_one_out_of_range_is_named() -> None:
    arena = triton.Arena(16, CPU)
    assert arena.distances(np.array([-1, -1]), allow_absent=True).tolist() == [NO_RECORD.value] * 2
    arena.reserve(512)
    assert arena.distances(np.array([-1, 3]), allow_absent=True).tolist() == [NO_RECORD.value, 3]
    for slot in (-1, 512, 2**62, -(2**62)):
        with pytest.raises(IndexError, match=f"slot {slot} lies outside 0 to 511"):
            arena.distances(np.array([0, slot]))
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        triton.Arena(24, CPU)
    with pytest.raises(ValueError, match="stride is 16 bytes, the layout's 768"):
        triton.Records(arena, layout(64))


def test_staged_arrays_arrive_unchanged_aligned_and_in_the_order_asked_for() -> None:
    rng = np.random.default_rng(0)
    gradients, order = rng.standard_normal((7, 3)).astype(np.float32), rng.permutation(7).astype(np.int32)
    arrays = {"odd": np.arange(3, dtype=np.int32), "ids": np.array([2**62, -1]), "empty": np.empty((0, 5), np.float32)}
    staged = to_device(arrays | {"gradients": Taken(gradients, order)}, CPU)
    for name, array in arrays.items():
        assert np.array_equal(staged[name].numpy(), array)
        assert staged[name].numpy().dtype == array.dtype
    assert np.array_equal(staged["gradients"].numpy(), gradients[order])
    assert all(tensor.data_ptr() % 16 == 0 for tensor in staged.values())


def test_a_staged_step_has_each_row_s_run_together_in_the_order_of_the_push_and_long_runs_last() -> None:
    rng = np.random.default_rng(1)
    records = _records(4, 50)
    row_ids = np.concatenate([rng.integers(0, 40, 60), np.full(LONG_RUN + 1, 45), np.full(LONG_RUN, 46)])
    rng.shuffle(row_ids)
    gradients = rng.standard_normal((len(row_ids), 4)).astype(np.float32)
    runs = native.group_gradients(row_ids, gradients, STEP)
    step = triton.stage_step(records, runs.row_ids, gradients, runs, RowSteps(STEP.step_factors(len(runs.row_ids))))
    starts = step.starts.numpy()
    for row, row_id in enumerate(runs.row_ids):
        assert np.array_equal(step.gradients.numpy()[starts[row] : starts[row + 1]], gradients[row_ids == row_id])
    assert step.num_short == len(runs.row_ids) - 1
    assert runs.row_ids[-1] == 45
    assert step.streams is None


def test_sizes_and_roundings_that_do_not_fit_are_refused() -> None:
    records, low = _records(4, 8), _records(4, 8, "float16")
    row_ids, gradients = np.array([1, 2, 1]), np.ones((3, 4), np.float32)
    runs = native.group_gradients(row_ids, gradients, STEP)
    steps = RowSteps(STEP.step_factors(2))
    rounding = Rounding(0, runs.row_ids, np.ones(2, np.int64))
    with pytest.raises(ValueError, match=r"slots has shape \[3\], needed is \[2\]"):
        triton.stage_step(records, row_ids, gradients, runs, steps)
    with pytest.raises(ValueError, match=r"gradients has shape \[3, 5\], needed is \[3, 4\]"):
        triton.stage_step(records, runs.row_ids, np.ones((3, 5), np.float32), runs, steps)
    with pytest.raises(ValueError, match=r"steps.factors has shape \[3\], needed is \[2\]"):
        triton.stage_step(records, runs.row_ids, gradients, runs, RowSteps(STEP.step_factors(3)))
    with pytest.raises(ValueError, match="give no rounding"):
        triton.stage_step(records, runs.row_ids, gradients, runs, RowSteps(STEP.step_factors(2), rounding))
    with pytest.raises(ValueError, match="give a Rounding"):
        triton.stage_step(low, runs.row_ids, gradients, runs, steps)
    short = Rounding(0, runs.row_ids, np.ones(1, np.int64))
    with pytest.raises(ValueError, match=r"steps.rounding.steps has shape \[1\]"):
        triton.stage_step(low, runs.row_ids, gradients, runs, RowSteps(STEP.step_factors(2), short))
    with pytest.raises(IndexError, match="slot 8000 lies outside"):
        triton.stage_step(records, np.array([8000, 1]), gradients, runs, steps)
    with pytest.raises(ValueError, match=r"weight has shape \[2, 3\], needed is \[2, 4\]"):
        triton.write_component(records, "weight", np.array([1, 2]), np.ones((2, 3), np.float32))


@pytest.mark.case("C004")
def test_a_step_without_ids_and_reads_and_writes_of_no_rows_launch_nothing() -> None:
    records = _records(4, 8)
    nothing, no_rows = np.empty(0, np.int64), np.empty((0, 4), np.float32)
    runs = Runs(nothing, np.zeros(1, np.int32), np.empty(0, np.int32), nothing)
    step = triton.stage_step(records, nothing, no_rows, runs, RowSteps(STEP.step_factors(0)))
    assert int(triton.adam_update(records, step, STEP)) == 0
    assert int(triton.write_component(records, "weight", nothing, no_rows)) == 0
    assert int(triton.initialize(records, nothing, no_rows)) == 0
    assert triton.gather_weights(records, nothing).shape == (0, 4)
    empty = triton.Records(triton.Arena(records.layout.stride_bytes, CPU), records.layout)
    assert triton.gather_weights(empty, np.array([-1, -1])).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("dim", [1, 3, 4, 10, 64, 100, 513, 4096])
def test_a_tile_covers_rows_and_columns_with_powers_of_two(dim: int) -> None:
    for tile in (
        *(row_tile(dim, interpreted=how) for how in (False, True)),
        *(long_run_tile(dim, interpreted=how) for how in (False, True)),
    ):
        for size in (tile.rows, tile.block):
            assert size & (size - 1) == 0
        by_rows, by_columns = tile.grid(1000, dim)
        assert by_rows * tile.rows >= 1000
        assert by_columns * tile.block >= dim
        assert (by_columns - 1) * tile.block < dim


def test_the_gpu_kernels_load_no_native_code_and_nothing_else_loads_them() -> None:
    gpu = "import sys, shardam_kernels.triton; sys.exit('shardam_kernels._native' in sys.modules or 'xxhash' in sys.modules)"
    subprocess.run([sys.executable, "-c", gpu], check=True, timeout=120)
    other = "import sys, shardam_kernels.native, shardam_kernels.reference; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", other], check=True, timeout=60)
