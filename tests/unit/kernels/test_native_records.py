"""Arenas, and what the native kernels refuse before they write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.initializers import InitialRows, fold_constant
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import Rounding, RowSteps

INITIAL = InitialRows(fold_constant(1.0), 0)
STEP = factors(AdamOptions(), 1)


def _records(dim: int, num_slots: int) -> native.Records:
    record_layout = layout(dim)
    arena = native.Arena(record_layout.stride_bytes)
    arena.reserve(num_slots)
    return native.Records(arena, record_layout)


def test_records_never_move_and_keep_their_bytes_while_the_arena_grows() -> None:
    arena = native.Arena(16)
    views: list[tuple[int, npt.NDArray[np.uint8], int]] = []
    for num_slots in (1, 10, 1000, 100_000, 6_000_000):
        arena.reserve(num_slots)
        assert arena.num_slots >= num_slots
        for slot in {num_slots - 1, arena.num_slots - 1} - {slot for slot, _, _ in views}:
            view = arena.view_record(slot)
            assert not view.any()
            view[:] = len(views) + 1
            views.append((slot, view, view.ctypes.data))
    for value, (slot, view, address) in enumerate(views, 1):
        assert arena.view_record(slot).ctypes.data == address
        assert (view == value).all()


@pytest.mark.parametrize(("stride_bytes", "num_slots"), [(16, 3000), (768, 3000), (9_008, 300), (786_432, 40)])
def test_every_slot_has_a_record_of_its_own(stride_bytes: int, num_slots: int) -> None:
    arena = native.Arena(stride_bytes)
    for slot in range(num_slots):
        arena.reserve(slot + 1)
        arena.view_record(slot)[[0, -1]] = slot % 251, slot % 241
    for slot in range(num_slots):
        assert arena.view_record(slot)[[0, -1]].tolist() == [slot % 251, slot % 241]


def test_a_view_keeps_its_arena_alive() -> None:
    arena = native.Arena(64)
    arena.reserve(1)
    view = arena.view_record(0)
    del arena
    view[:] = 7
    assert (view == 7).all()


def test_five_thousand_tables_of_ten_rows_stay_small_and_a_large_arena_is_not_resident_before_it_is_used() -> None:
    before = psutil.Process().memory_info().rss
    large = native.Arena(768)
    large.reserve(20_000_000)
    assert large.memory_bytes >= 20_000_000 * 768
    tables = [(_records(64, 10), native.HashIndex()) for _ in range(5000)]
    row_ids = np.arange(10)
    for records, index in tables:
        index.insert(row_ids, np.empty(10, np.int64), np.empty(10, np.uint8))
        native.initialize(records, row_ids, row_ids, INITIAL)
    assert psutil.Process().memory_info().rss - before < 160e6  # 38 MB of records, in whole blocks


def test_an_arena_that_no_machine_can_hold_is_a_memory_error_and_changes_nothing() -> None:
    arena = native.Arena(768)
    arena.reserve(10)
    before = arena.num_slots, arena.memory_bytes
    for num_slots in (2**40, 2**62):
        with pytest.raises(MemoryError):
            arena.reserve(num_slots)
    assert (arena.num_slots, arena.memory_bytes) == before
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        native.Arena(24)


def test_records_are_refused_when_arena_and_layout_differ() -> None:
    with pytest.raises(ValueError, match="stride is 16 bytes, the layout's 768"):
        native.Records(native.Arena(16), layout(64))


def test_a_rounding_is_wanted_where_weights_are_rounded_and_nowhere_else() -> None:
    low = layout(8, "bfloat16")
    arena = native.Arena(low.stride_bytes)
    arena.reserve(4)
    slots, rows = np.arange(3), np.ones((3, 8), np.float32)
    with pytest.raises(ValueError, match="give a Rounding"):
        native.adam_update(native.Records(arena, low), slots, rows, STEP, RowSteps(STEP.step_factors(3)))
    rounding = Rounding(0, slots, np.ones(3, np.int64))
    with pytest.raises(ValueError, match="give no rounding"):
        native.adam_update(_records(8, 4), slots, rows, STEP, RowSteps(STEP.step_factors(3), rounding))
    for short in (Rounding(0, slots[:2], slots), Rounding(0, slots[:2], slots[:2])):
        with pytest.raises(ValueError, match="has length"):
            native.adam_update(native.Records(arena, low), slots, rows, STEP, RowSteps(STEP.step_factors(3), short))


@pytest.mark.parametrize("slot", [-1, 8, 2**62])
def test_a_slot_out_of_range_is_named_before_anything_is_written(slot: int) -> None:
    records = _records(512, 4)  # of 6,144 bytes: the arena has room for 4
    slots = np.array([0, slot])
    before = records.arena.view_record(0).copy()
    rows = np.ones((2, 512), np.float32)
    calls: list[Callable[[], object]] = [
        lambda: native.initialize(records, slots, slots, INITIAL),
        lambda: native.adam_update(records, slots, rows, STEP, RowSteps(STEP.step_factors(2))),
        lambda: native.write_component(records, "weight", slots, rows),
    ]
    if slot != -1:
        calls.append(lambda: native.gather_weights(records, slots, slots, INITIAL, rows.copy()))
        calls.append(lambda: native.read_component(records, "exp_avg", slots, rows.copy()))
    for call in calls:
        with pytest.raises(IndexError, match=f"slot {slot} lies outside"):
            call()
    assert (records.arena.view_record(0) == before).all()


def test_lengths_and_dims_that_do_not_fit_are_named() -> None:
    records = _records(8, 4)
    slots, rows = np.arange(3), np.ones((3, 8), np.float32)
    with pytest.raises(ValueError, match="gradients has length 3, row_ids has 2"):
        native.merge_gradients(slots[:2], rows, STEP)
    with pytest.raises(ValueError, match="gradients has 7 columns, the records have dim 8"):
        native.adam_update(records, slots, np.ones((3, 7), np.float32), STEP, RowSteps(STEP.step_factors(3)))
    with pytest.raises(ValueError, match="step_factors has length 2, slots has 3"):
        native.adam_update(records, slots, rows, STEP, RowSteps(STEP.step_factors(2)))
    with pytest.raises(ValueError, match="row_ids has length 2, slots has 3"):
        native.initialize(records, slots, slots[:2], INITIAL)
    with pytest.raises(ValueError, match="out has length 3, slots has 2"):
        native.gather_weights(records, slots[:2], slots[:2], INITIAL, rows)
    with pytest.raises(ValueError, match="values has 7 columns"):
        native.write_component(records, "weight", slots, np.ones((3, 7), np.float32))
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        native.merge_gradients(slots, rows, STEP, 0)
    with pytest.raises(ValueError, match="gradients of 3 ids have no columns"):
        native.merge_gradients(slots, np.ones((3, 0), np.float32), STEP)
    with pytest.raises(KeyError, match="no component 'momentum'"):
        native.read_component(records, "momentum", slots, rows)


@pytest.mark.parametrize("how", ["float64", "strided", "read-only", "float16"])
def test_an_output_that_would_have_to_be_copied_is_refused_instead_of_losing_what_is_written(how: str) -> None:
    records = _records(8, 4)
    slots = np.arange(3)
    out = np.zeros((3, 8), np.float32)
    if how == "strided":
        out = np.zeros((3, 16), np.float32)[:, ::2]
    elif how == "read-only":
        out.flags.writeable = False
    else:
        out = out.astype(how)
    with pytest.raises(TypeError):
        native.gather_weights(records, slots, slots, INITIAL, out)
    with pytest.raises(TypeError):
        native.read_component(records, "weight", slots, out)


def test_the_native_module_needs_no_torch() -> None:
    program = "import sys, shardam_kernels.native, shardam_kernels.reference; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
