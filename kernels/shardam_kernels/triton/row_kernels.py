"""Reading and writing one component of rows on a GPU, and clearing records. Float32 outside, the component's dtype inside."""

from __future__ import annotations

import triton
import triton.language as tl

from shardam_kernels.triton.weights import FLOAT32, is_beyond, narrow_bits, round_to_nearest_even, widen

NO_RECORD = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_rows"])
def read_rows_kernel(
    distances,  # int64 [N], NO_RECORD for a row that does not exist
    narrow_base,  # int16, the arena's base
    base,  # float32, the same
    out,  # float32 [N, DIM]
    num_rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,  # of the component, in its own values
    DTYPE: tl.constexpr,
):
    """Writes a component of rows to out; zeros where a row does not exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = is_row[:, None] & (columns < DIM)
    distance = tl.load(distances + rows, mask=is_row, other=NO_RECORD)[:, None]
    exists = mask & (distance != NO_RECORD)
    if DTYPE == FLOAT32:
        stored = base + distance * 4 + (OFFSET + columns)
    else:
        stored = narrow_base + distance * 8 + (OFFSET + columns)
    values = widen(tl.load(stored, mask=exists, other=0), DTYPE)
    tl.store(out + rows[:, None].to(tl.int64) * DIM + columns, values, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def write_rows_kernel(
    distances,  # int64 [N]
    values,  # float32 [N, DIM]
    narrow_base,
    base,
    saturated,  # int64, one counter
    num_rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes values to a component of rows, to nearest even."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = is_row[:, None] & (columns < DIM)
    distance = tl.load(distances + rows, mask=is_row, other=0)[:, None]
    value = tl.load(values + rows[:, None].to(tl.int64) * DIM + columns, mask=mask, other=0.0)
    if DTYPE == FLOAT32:
        tl.store(base + distance * 4 + (OFFSET + columns), value, mask=mask)
    else:
        magnitude = round_to_nearest_even(value, DTYPE)
        tl.store(narrow_base + distance * 8 + (OFFSET + columns), narrow_bits(magnitude, value, DTYPE), mask=mask)
        counter = saturated + tl.zeros_like(columns) + tl.zeros_like(distance).to(tl.int32)
        beyond = mask & is_beyond(magnitude, DTYPE)
        tl.atomic_add(counter, tl.full(mask.shape, 1, tl.int64), mask=beyond, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def clear_rows_kernel(
    distances,  # int64 [N]
    base,
    num_rows,
    STRIDE: tl.constexpr,  # of a record, in float32
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes zero to every byte of records."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    distance = tl.load(distances + rows, mask=is_row, other=0)[:, None]
    zeros = tl.zeros([ROWS, BLOCK], tl.float32)
    tl.store(base + distance * 4 + columns, zeros, mask=is_row[:, None] & (columns < STRIDE))
